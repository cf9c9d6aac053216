"""The process that tries grammars out. Run as a module by `checker.py`.

A grammar comes from a stranger, and compiling one may take any time and memory: so it is done here first, under limits
that the kernel enforces. It is told the texts of special tokens, then grammars, and answers with verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.decoding.grammar.compiler import compiled, opened
from octavo.decoding.grammar.definition import in_lark
from octavo.decoding.grammar.rules import may_end
from octavo.decoding.grammar.vocabulary import Vocabulary
from octavo.tokenizers.worker_process import limit_cpu, serve

_MEMORY_BYTES = 256 << 20  # beyond what the process has when it begins
_NICE = 10


def vocabulary(special: Sequence[str]) -> Vocabulary:
    """All bytes, an end token, special tokens."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"\x00<end>"] + [text.encode() for text in special]
    return Vocabulary(tokens, range(256, len(tokens)), [256])


def verdict(request: dict[str, Any], tokenizer: Any) -> list[str] | None:
    """None: it compiles, and something can be said in it. Else the field and the remedy."""
    try:
        limit_cpu(request["seconds"])
        grammar = Grammar(request["kind"], request["source"])
        compiled(grammar, tokenizer)
        if grammar.kind == "lark" and not may_end(in_lark(grammar.source)):
            return ["grammar", "nothing fits it: what the rule start must hold never ends"]
    except InvalidInput as error:
        return [error.field, error.remedy]
    except Exception as error:
        return [request["kind"], f"it cannot be compiled: {type(error).__name__}"]
    finally:
        limit_cpu(0)
    return None


def main() -> None:
    """Answer until the input ends."""
    serve(_prepared, memory_bytes=_MEMORY_BYTES, nice=_NICE)


def _prepared(special: Sequence[str]) -> Any:
    return partial(verdict, tokenizer=opened(vocabulary(special), 257 + len(special)))
