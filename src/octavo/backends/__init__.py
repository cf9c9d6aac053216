"""The ops and who runs them."""
