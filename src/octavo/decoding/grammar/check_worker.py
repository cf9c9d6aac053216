"""The process that tries grammars out. Run as a module by `checker.py`.

A grammar comes from a stranger, and compiling one may take any time and memory: so it is done here first, under limits
that the kernel enforces. First line in: the texts of special tokens. Then a grammar a line, and a verdict a line.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.decoding.grammar.compiler import compiled, opened
from octavo.decoding.grammar.vocabulary import Vocabulary

_MEMORY_BYTES = 256 << 20  # beyond what the process has when it begins
_NICE = 10


def vocabulary(special: Sequence[str]) -> Vocabulary:
    """All bytes, an end token, special tokens."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"\x00<end>"] + [text.encode() for text in special]
    return Vocabulary(tokens, range(256, len(tokens)), [256])


def verdict(request: dict[str, Any], tokenizer: Any) -> list[str] | None:
    """None: it compiles, and something can be said in it. Else the field and the remedy."""
    try:
        _cpu_limit(request["seconds"])
        compiled(Grammar(request["kind"], request["source"]), tokenizer)
    except InvalidInput as error:
        return [error.field, error.remedy]
    except Exception as error:
        return [request["kind"], f"it cannot be compiled: {type(error).__name__}"]
    finally:
        _cpu_limit(0)
    return None


def _cpu_limit(seconds: float) -> None:
    """End the process after so much CPU time; 0 stops the clock. (Elsewhere than POSIX the caller's clock must do.)"""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _limit_resources() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is for the owner, who closes our input
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize() + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(AttributeError, OSError):
        os.nice(_NICE)


def main() -> None:
    """Answer until the input ends."""
    lines = iter(sys.stdin.buffer)
    special = next(lines, None)
    if special is None:
        return
    tokenizer = opened(vocabulary(json.loads(special)), 257 + len(json.loads(special)))
    _limit_resources()
    reply: object = "ready"
    while True:
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()
        line = next(lines, None)
        if line is None:
            return
        reply = verdict(json.loads(line), tokenizer)


if __name__ == "__main__":
    main()
