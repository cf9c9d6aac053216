"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from octavo.core.errors import InvalidInput

__all__ = ["StopMatcher"]


class StopMatcher:
    """Finds the first stop string of a text that arrives in pieces, and holds back what may become part of one.

    The match that is complete first wins; of several complete at the same character, the longest (it begins first). So
    a match is decided as soon as it is there, whatever the pieces were. Text before the match is returned; the stop
    string itself only with `include_stop`; nothing of what follows.

    An Aho-Corasick automaton (CACM 18(6), 1975): its state is the longest end of the text that begins a stop string,
    which is exactly what must be held back. O(1) per character, however many stop strings there are.
    """

    def __init__(self, stop_strings: Sequence[str], include_stop: bool = False) -> None:
        """Raises `InvalidInput` for a stop string that is empty or no string."""
        self._stops = _checked(stop_strings)
        self._include = include_stop
        self._trie = _Trie(self._stops)
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, active: bool = True) -> tuple[str, str | None]:
        """(text that may be shown now, the stop string just found or None).

        With `active` false stop strings completed in this piece do not count, though their beginnings do.
        """
        if self.matched is not None:
            return "", None
        if not self._stops:
            return text, None
        known = self._held + text
        for index, character in enumerate(text, len(self._held) + 1):
            self._state = self._trie.step(self._state, character)
            hit = self._trie.hits[self._state]
            if hit >= 0 and active:
                return self._found(known[:index], self._stops[hit])
            if hit >= 0:
                self._state = self._trie.extendable(self._state)
        cut = len(known) - self._trie.depths[self._state]
        self._held = known[cut:]
        return known[:cut], None

    def finish(self) -> str:
        """What was held back and became no stop string. A second call returns nothing."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _found(self, text: str, stop: str) -> tuple[str, str]:
        self.matched, self._held = stop, ""
        return (text if self._include else text[: len(text) - len(stop)]), stop


class _Trie:
    """Per state: `depths`, characters from the root; `hits`, the longest stop string that ends here or -1."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.depths = [0]
        self.hits = [-1]
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        for index, stop in enumerate(stops):
            self._add(index, stop)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)

    def extendable(self, state: int) -> int:
        """The same place in the text, without waiting for what cannot come: the nearest state with a way on."""
        while state and not self._next[state]:
            state = self._fail[state]
        return state

    def _add(self, index: int, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self.depths.append(self.depths[state] + 1)
                self.hits.append(-1)
                self._fail.append(0)
            state = self._next[state][character]
        if self.hits[state] < 0:
            self.hits[state] = index

    def _link(self) -> None:
        """Breadth first: a state's fail is its longest proper end that is a state."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], character)
                if self.hits[child] < 0:
                    self.hits[child] = self.hits[self._fail[child]]
                queue.append(child)


def _checked(stop_strings: Sequence[str]) -> tuple[str, ...]:
    if isinstance(stop_strings, str):
        raise InvalidInput("stop", stop_strings, "must be a list of strings")
    for index, stop in enumerate(stop_strings):
        if not isinstance(stop, str) or not stop:
            raise InvalidInput(f"stop[{index}]", stop, "must be a string that is not empty")
    return tuple(dict.fromkeys(stop_strings))
