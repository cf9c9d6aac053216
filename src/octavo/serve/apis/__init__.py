"""One module for each API: its routes, its bodies in our words, our answers in its."""
