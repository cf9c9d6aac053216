"""Batches: files of requests, answered when nobody else needs the engine, over restarts and crashes.

folder.py    what is on disk, and how it is written: after a crash there is the old state or the new one
form.py      a multipart body, read as it comes
files.py     files: uploaded ones, and those with answers
lines.py     the requests in a file, checked
records.py   one batch: its state, its journals
desk.py      runs them: validating -> in_progress -> finalizing -> completed (or failed, expired, cancelled)
inside.py    one request through the very handlers of its route
"""
