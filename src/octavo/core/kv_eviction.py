"""Lossy eviction: which tokens keep their K/V when not all may. Scores come in, kept places go out, ascending.

None of it is ever on by default: what is dropped changes what a model says. A place is an index into what is cached
now, the oldest first. Where scores tie the older place is kept, so that the answer depends on the arguments alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from octavo.core.errors import InvalidInput

__all__ = [
    "H2O",
    "Eviction",
    "SnapKV",
    "StreamingLLM",
    "Voting",
    "heavy_hitters",
    "kept_after_prompt",
    "parse_eviction",
    "pooled",
    "sinks_and_recent",
]

_MOST = 1 << 27  # tokens

Places = tuple[int, ...]


def _check_numbers(policy: object, **most: int) -> None:
    for name, limit in most.items():
        if not 1 <= getattr(policy, name) <= limit:
            raise InvalidInput(f"kv_eviction: {name}", getattr(policy, name), f"give 1 to {limit}")


@dataclass(frozen=True)
class StreamingLLM:
    """What an engine may keep of each sequence: its first tokens and the last ones (`sinks_and_recent`).

    Token p sees the first ``sinks`` and the ``window`` up to itself, so pages between are free, whatever the length.
    """

    sinks: int = 4
    window: int = 1024  # the token itself included

    def __post_init__(self) -> None:
        _check_numbers(self, sinks=64, window=_MOST)


@dataclass(frozen=True)
class SnapKV:
    """What an engine may keep of each prompt once it is complete: see `kept_after_prompt`. Later tokens all stay.

    Whole ``block``s of tokens go, as many as leave ``capacity`` at least: up to block - 1 more stay.
    """

    capacity: int = 1024  # tokens
    window: int = 32  # tokens at the end that say what is looked at
    kernel: int = 5
    block: int = 64  # tokens; a multiple of the page size

    def __post_init__(self) -> None:
        _check_numbers(self, capacity=_MOST, window=min(256, self.capacity), kernel=63, block=4096)
        if self.kernel % 2 == 0:
            raise InvalidInput("kv_eviction: kernel", self.kernel, "give an odd number")

    @property
    def looks(self) -> int:
        """Tokens whose queries are counted."""
        return self.window

    @property
    def every(self) -> int:
        """Tokens from one choice to the next; 0: there is one, when the prompt is complete."""
        return 0

    def dropped(self, num_tokens: int) -> int:
        """How many of so many tokens are forgotten."""
        return max(0, num_tokens - self.capacity) // self.block * self.block

    def kept(self, scores: Sequence[float]) -> Places:
        """Which tokens stay."""
        return kept_after_prompt(scores, len(scores) - self.dropped(len(scores)), self.window, self.kernel)


@dataclass(frozen=True)
class H2O:
    """What an engine may keep of each sequence, chosen after every ``block`` tokens of it: see `heavy_hitters`.

    Whole blocks go, as many as leave heavy + recent tokens at least, so up to twice a block less one more are there.
    """

    heavy: int = 512
    recent: int = 512
    block: int = 64  # tokens; a multiple of the page size

    def __post_init__(self) -> None:
        _check_numbers(self, heavy=_MOST, recent=_MOST, block=4096)

    @property
    def capacity(self) -> int:
        """Tokens that stay at least."""
        return self.heavy + self.recent

    @property
    def window(self) -> int:
        """Tokens at the end that stay whatever is looked at."""
        return self.recent

    @property
    def kernel(self) -> int:
        """Neighbours over which weights are averaged: each stands for itself."""
        return 1

    @property
    def looks(self) -> int:
        """Tokens whose queries are counted at once: those since the last choice."""
        return self.block

    @property
    def every(self) -> int:
        """Tokens from one choice to the next."""
        return self.block

    def dropped(self, num_tokens: int) -> int:
        """How many of so many tokens are forgotten."""
        return max(0, num_tokens - self.capacity) // self.block * self.block

    def kept(self, scores: Sequence[float]) -> Places:
        """Which tokens stay."""
        return heavy_hitters(scores, len(scores) - self.dropped(len(scores)) - self.recent, self.recent)


Voting = SnapKV | H2O  # by attention weights
Eviction = StreamingLLM | SnapKV | H2O
_METHODS: dict[str, type[Eviction]] = {"streaming_llm": StreamingLLM, "snapkv": SnapKV, "h2o": H2O}
_EXAMPLES = "streaming_llm:sinks=4,window=1024, snapkv:capacity=1024,window=32 or h2o:heavy=512,recent=512"


def parse_eviction(text: str) -> Eviction | None:
    """``streaming_llm:sinks=4,window=1024``, ``snapkv:capacity=1024,window=32,kernel=5,block=64``,
    ``h2o:heavy=512,recent=512,block=64`` (numbers as in their classes where not given); empty: None.

    Raises ``InvalidInput``.
    """
    if not text:
        return None
    method, _, rest = text.partition(":")
    if method not in _METHODS:
        raise InvalidInput("kv_eviction", text, f"give {_EXAMPLES}, or nothing")
    names = [item.name for item in fields(_METHODS[method])]
    numbers: dict[str, int] = {}
    for item in rest.split(",") if rest else ():
        name, _, value = item.partition("=")
        if name not in names or name in numbers or not value.isdecimal() or len(value) > 9:
            raise InvalidInput("kv_eviction", item, f"give each number once: {_EXAMPLES}")
        numbers[name] = int(value)
    return _METHODS[method](**numbers)


def sinks_and_recent(count: int, sinks: int, recent: int) -> Places:
    """Of ``count`` cached tokens the first ``sinks`` and the last ``recent``; without sinks a plain window.

    The first tokens take what attention has to spare, whatever they say: a window without them collapses once they are
    gone. Whoever uses this lets the sinks stay as near as the cache is long: positions count within the cache
    (StreamingLLM: Xiao et al., 2023).
    """
    _counts(count=count, sinks=sinks, recent=recent)
    first = max(min(sinks, count), count - recent)
    return (*range(min(sinks, count)), *range(first, count))


def heavy_hitters(scores: Sequence[float], heavy: int, recent: int) -> Places:
    """The last ``recent`` tokens and, of those before them, the ``heavy`` that attention has looked at most.

    ``scores``: of each cached token the attention weight summed over all queries so far (and over the query heads that
    share its key). One that is dropped never comes back (H2O: Zhang et al., 2023).
    """
    _counts(heavy=heavy, recent=recent)
    first = max(0, len(scores) - recent)
    return (*_highest(scores[:first], heavy), *range(first, len(scores)))


def kept_after_prompt(scores: Sequence[float], capacity: int, window: int, kernel: int = 5) -> Places:
    """Of a prompt's tokens at most ``capacity``: the last ``window`` and those that they looked at most.

    ``scores``: of each token the attention weight summed over the queries of the last ``window`` tokens. It is averaged
    over ``kernel`` (odd) neighbours first, so that what stands around a token stays with it. What is decoded later is
    all kept (SnapKV: Li et al., 2024). Raises ``InvalidInput`` for a window above the capacity or an even kernel.
    """
    _counts(capacity=capacity, window=window)
    if window > capacity:
        raise InvalidInput("window", window, f"give at most the capacity, {capacity}")
    if len(scores) <= capacity:
        return tuple(range(len(scores)))
    first = len(scores) - window
    return (*_highest(pooled(scores[:first], kernel), capacity - window), *range(first, len(scores)))


def pooled(scores: Sequence[float], kernel: int) -> list[float]:
    """The mean of the ``kernel`` scores around each; beyond the ends they are 0. Raises ``InvalidInput``."""
    if kernel < 1 or kernel % 2 == 0:
        raise InvalidInput("kernel", kernel, "give an odd number of at least 1")
    reach = kernel // 2
    return [sum(scores[max(0, at - reach) : at + reach + 1]) / kernel for at in range(len(scores))]


def _highest(scores: Sequence[float], most: int) -> list[int]:
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))
    return sorted(order[:most])


def _counts(**given: int) -> None:
    for name, value in given.items():
        if value < 0:
            raise InvalidInput(name, value, "give a whole number of at least 0")
