"""What constrains an output: plain data that travels with a request's parameters; `octavo.decoding.grammar` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["KINDS", "MAX_REGEX_BYTES", "MAX_SOURCE_BYTES", "Grammar"]

KINDS = ("json_schema", "json_object", "regex", "choice", "lark", "structural_tag")
MAX_SOURCE_BYTES = 64 << 10
MAX_REGEX_BYTES = 4 << 10


@dataclass(frozen=True)
class Grammar:
    """A language that an output must be a member of, written as text.

    ``json_schema``, ``choice`` (a list of strings) and ``structural_tag`` are JSON, ``lark`` is a grammar in Lark's or
    in GBNF's spelling, ``json_object`` needs no source. Raises ``InvalidInput`` for another kind or a source beyond
    its limit; what the source says is checked where it is compiled. ``before``: rules in Lark of which ``thoughts`` is
    what stands in front of the word, ours and not a client's.
    """

    kind: str
    source: str = ""
    before: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInput("grammar.kind", self.kind, f"give one of {', '.join(KINDS)}")
        if not isinstance(self.source, str) or not isinstance(self.before, str):
            raise InvalidInput("grammar.source", self.source, "give a string")
        most = MAX_REGEX_BYTES if self.kind == "regex" else MAX_SOURCE_BYTES
        try:
            size = len(self.source.encode()) + len(self.before.encode())
        except UnicodeEncodeError:
            raise InvalidInput("grammar.source", self.source, "half of a surrogate pair is no character") from None
        if size > most:
            raise InvalidInput("grammar.source", f"{size} bytes", f"give at most {most}")
        if bool(self.source) == (self.kind == "json_object"):
            raise InvalidInput("grammar.source", self.source, "give a source, but none with json_object")

    def to_dict(self) -> dict[str, str]:
        """As JSON values."""
        return {"kind": self.kind, "source": self.source, **({"before": self.before} if self.before else {})}

    @classmethod
    def of(cls, value: Any) -> Grammar:
        """A grammar, or what ``to_dict`` made of one. Raises ``InvalidInput``."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or not {"kind"} <= set(value) <= {"kind", "source", "before"}:
            raise InvalidInput("grammar", value, "give a Grammar, or a mapping with kind and source")
        return cls(**value)
