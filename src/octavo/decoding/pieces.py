"""What an answer is made of: words, thoughts and calls, in pieces as they come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Call", "Piece", "Whole", "whole"]


@dataclass(frozen=True)
class Piece:
    """``text`` is more content, more reasoning, a new call's name, or a fragment of the arguments of call ``index``."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    index: int = -1


@dataclass
class Call:
    """A call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str = ""


@dataclass
class Whole:
    """An answer, gathered from its pieces."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    is_cut: bool = field(default=False, compare=False)  # within the last call


def whole(pieces: Iterable[Piece]) -> Whole:
    """The pieces of one answer, put together."""
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for piece in pieces:
        if piece.kind == "call":
            names[piece.index] = piece.text
            arguments[piece.index] = []
        elif piece.kind == "arguments":
            arguments[piece.index].append(piece.text)
        else:
            texts[piece.kind].append(piece.text)
    calls = [Call(name, "".join(arguments[index])) for index, name in names.items()]
    return Whole("".join(texts["content"]), "".join(texts["reasoning"]), calls)
