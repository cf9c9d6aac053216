"""Where one output stands in its grammar: a fold over its ids, which can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from octavo.core.errors import OctavoError

__all__ = ["GrammarFault", "Matcher", "allows", "guarded"]

_Result = TypeVar("_Result")
_REASONS = {
    "ParserTooComplex": "it is too ambiguous here",
    "LexerTooComplex": "its regular expressions grow too large here",
}
_NOTHING = "no token of the model can go on from here"


class GrammarFault(OctavoError):
    """A grammar cannot be followed any further: it reached a limit, or no token fits. Ends its own request."""


def guarded(call: Callable[..., _Result], *values: Any) -> _Result:
    """A call into the library whose failures, panics included, become a ``GrammarFault``."""
    try:
        return call(*values)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library does not descend from Exception
        raise GrammarFault(f"the grammar library failed: {type(error).__name__}") from None


class Matcher:
    """The state after some output ids. Masks have bit (id & 7) of byte (id >> 3) set where a token is allowed.

    An end token is allowed exactly where the grammar may end. Every method raises ``GrammarFault`` when the grammar
    cannot be followed, and from then on always.
    """

    def __init__(self, state: Any, size: int, end_ids: frozenset[int]) -> None:
        self._state = state  # an LLMatcher
        self._size, self._end_ids = size, end_ids
        self.length = 0  # ids accepted
        self._mask: bytes | None = None
        self._ended = False

    def mask(self) -> bytes:
        """Which tokens may come next; at least one."""
        if self._ended:
            raise GrammarFault("the output has ended")
        if self._mask is None:
            found = guarded(self._state.compute_bitmask)
            stuck = self._state.is_stopped() and not self._state.is_accepting()
            if self._state.is_error() or stuck or not any(found):
                raise self._fault(_NOTHING)
            self._mask = found
        return self._mask

    def accept(self, ids: Sequence[int]) -> None:
        """Go on by these ids. Nothing follows an end token, which the library does not see."""
        for token in ids:
            if token in self._end_ids:
                self._ended = allows(self.mask(), token)
                fits = self._ended
            else:
                self._mask = None
                fits = 0 <= token < self._size and not self._ended and guarded(self._state.consume_token, token)
            if not fits:
                raise self._fault(f"token {token} does not fit")
            self.length += 1

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` ids."""
        if count <= 0:
            return
        self.length -= count
        self._mask = None
        count -= self._ended
        self._ended = False
        if count and not guarded(self._state.rollback, count):
            raise self._fault("it cannot be taken back")

    def forced(self, most: int) -> list[int]:
        """The ids, at most ``most``, that must come next: one after the other the only one that the mask leaves.

        Nothing is accepted.
        """
        found: list[int] = []
        before = self.length
        while len(found) < most and (token := _only(self.mask())) is not None:
            found.append(token)
            if token in self._end_ids or len(found) == most:
                break
            self.accept([token])
        self.rollback(self.length - before)
        return found

    @property
    def may_end(self) -> bool:
        """Whether the ids so far are a word of the grammar."""
        return guarded(self._state.is_accepting)

    def _fault(self, otherwise: str) -> GrammarFault:
        return GrammarFault(_REASONS.get(guarded(self._state.stop_reason), otherwise))


def allows(mask: bytes, token: int) -> bool:
    """Whether a mask has the bit of a token set."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def _only(mask: bytes) -> int | None:
    """The id of the one bit that is set; None if there are more."""
    number = int.from_bytes(mask, "little")
    return None if number & (number - 1) else number.bit_length() - 1
