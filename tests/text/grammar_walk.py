"""Outputs drawn at random from the masks of a grammar, no model needed; and the vocabularies for it."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

from octavo.core.grammar import Grammar
from octavo.decoding.grammar import GrammarCompiler, Matcher
from octavo.tokenizers.simple import SimpleTokenizer

_PIECES = ['{"', '": ', '", "', "true", "false", "null", "  ", "ab", "abc", "the", "10", "e+", "\\u", "]}", "}}"]


@functools.cache
def compiler(kind: str = "bytes") -> GrammarCompiler:
    """Grammars over every byte, or over ASCII and longer tokens. Id 0 ends an output; the last 3 ids are spare."""
    if kind == "bytes":
        vocab = ["<eos>", "<pad>", *(f"<0x{byte:02X}>" for byte in range(256))]
    else:
        vocab = ["<eos>", "<pad>", "\n", *map(chr, range(32, 127)), *_PIECES]
    tokenizer = SimpleTokenizer(vocab, kind=kind, eos=["<eos>"], special=["<pad>"])
    made = GrammarCompiler(tokenizer, len(vocab) + 3, [0])
    made.tokenizer = tokenizer  # type: ignore[attr-defined]
    return made


def bits(mask: bytes) -> list[int]:
    """The ids that a mask allows, rising."""
    return [8 * at + i for at, byte in enumerate(mask) if byte for i in range(8) if byte >> i & 1]


def text_of(ids: Sequence[int], kind: str = "bytes") -> str:
    """The text of an output."""
    tokenizer = compiler(kind).tokenizer  # type: ignore[attr-defined]
    return b"".join(tokenizer.token_bytes(i, skip_special_tokens=False) for i in ids).decode()


def walk(
    grammar: Grammar, rng: random.Random, most: int = 400, kind: str = "bytes", haste: float = 0.3
) -> tuple[list[int], bool]:
    """(output ids without the end token, whether it ended). It ends with probability ``haste`` wherever it may."""
    matcher = compiler(kind).matcher(grammar)
    ids: list[int] = []
    while len(ids) < most:
        allowed = bits(matcher.mask())
        if allowed[0] == 0 and (len(allowed) == 1 or rng.random() < haste):
            return ids, True
        ids.append(rng.choice([i for i in allowed if i] or allowed))
        matcher.accept(ids[-1:])
    return ids, False


def taken(matcher: Matcher, ids: Sequence[int]) -> int:
    """How many of these ids, from the first on, the masks allow. Nothing is accepted."""
    count = 0
    while count < len(ids) and ids[count] in bits(matcher.mask()):
        matcher.accept(ids[count : count + 1])
        count += 1
        if count < len(ids) and ids[count - 1] in matcher._end_ids:
            break
    matcher.rollback(count)
    return count


def fresh(grammar: Grammar, ids: Sequence[int], kind: str = "bytes") -> Matcher:
    """A new matcher that has accepted these ids at once."""
    matcher = compiler(kind).matcher(grammar)
    matcher.accept(ids)
    return matcher
