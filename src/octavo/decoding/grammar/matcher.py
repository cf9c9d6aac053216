"""Where one output stands in its grammar: a fold over its ids, which can be taken back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from octavo.core.errors import OctavoError

__all__ = ["FAULTS", "GrammarFault", "Matcher", "allows", "guarded", "only_one"]

_Result = TypeVar("_Result")
_REASONS = {  # by what the library says
    "Too many items": "it is too ambiguous here",
    "max is": "it is too ambiguous here",
    "too many expressions": "its regular expressions grow too large here",
    "too many states": "its regular expressions grow too large here",
}
_NOTHING = "no token of the model can go on from here"
FAULTS = (_NOTHING, *dict.fromkeys(_REASONS.values()))


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
    cannot be followed, and from then on always. Copies of one state share an automaton, which the library locks: who
    waited for it there would keep all threads waiting, so they wait for ``lock``.
    """

    def __init__(
        self, state: Any, size: int, end_ids: frozenset[int], lock: threading.Lock, mask: bytes | None = None
    ) -> None:
        """``state``: an `LLMatcher` of its own at its beginning; ``mask``: its mask there, if that is known."""
        self._state = state
        self._size, self._end_ids, self._lock = size, end_ids, lock
        self.length = 0  # ids accepted
        self._mask = mask
        self._ended = False

    def mask(self) -> bytes:
        """Which tokens may come next; at least one."""
        if self._ended:
            raise GrammarFault("the output has ended")
        if self._mask is None:
            with self._lock:
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
                fits = self._ended = allows(self.mask(), token)
            else:
                self._mask = None
                fits = 0 <= token < self._size and not self._ended and self._locked(self._state.consume_token, token)
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
        if count and not self._locked(self._state.rollback, count):
            raise self._fault("it cannot be taken back")

    @property
    def may_end(self) -> bool:
        """Whether the ids so far are a word of the grammar."""
        return self._locked(self._state.is_accepting)

    def _locked(self, call: Callable[..., bool], *values: Any) -> bool:
        with self._lock:
            return guarded(call, *values)

    def _fault(self, otherwise: str) -> GrammarFault:
        said = guarded(self._state.get_error)
        return GrammarFault(next((reason for sign, reason in _REASONS.items() if sign in said), otherwise))


def allows(mask: bytes, token: int) -> bool:
    """Whether a mask has the bit of a token set."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)


def only_one(mask: bytes) -> int | None:
    """The id of the one bit that is set; None if there are more."""
    number = int.from_bytes(mask, "little")
    return None if number & (number - 1) else number.bit_length() - 1
