"""Requests, pages, prefix cache, scheduler: deterministic, single-threaded, free of I/O, standard library only."""
