"""Architectures, each a short file over the ops."""
