"""What the processes of a server say to each other, and what each keeps to outlive the others. No I/O, no clock.

messages.py      the messages, their schema and their limits
api_side.py      the front end's end: holds every request until its last event is out, and resumes it
engine_side.py   the engine's end: whom it runs what for
supervision.py   who is alive, who is started again and when
"""
