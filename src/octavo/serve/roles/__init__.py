"""The processes of a server and how they hold together; what they say to each other is in `octavo.serve.links`.

supervisor.py   starts the others, watches them, starts them again        octavo serve
child.py        what every other process begins with and dies by           +- engine
detokenizer.py  text, between engine and front ends                        +- detokenizer
engine.py       the scheduler's process: steps, and nothing that waits     +- api-0
api.py          the front end's process: HTTP, templates, tokens, text
remote.py       the engine, as the front end sees it
sockets.py      ZeroMQ over Unix sockets in a folder of our own
"""
