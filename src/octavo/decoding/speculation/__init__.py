"""Speculative decoding: who guesses the next tokens, and what of a guess counts."""
