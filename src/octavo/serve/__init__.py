"""HTTP APIs over the engine."""
