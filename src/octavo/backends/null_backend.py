"""The null model: no weights, no arithmetic; the next token is a keyed hash of all that came before it.

`octavo serve MODEL --backend null` has a model's tokenizer, its limits and all of the engine, and nothing to compute:
what is left is what the engine and its server cost, and whoever asks knows every token that must come back
(`null_tokens`). A page holds for each position the hash of the prefix that ends there. A position's hash is made of the
hash before it and of the one half way back, both read from pages, so a page that is stale or somebody else's changes
the tokens. Of the sampling parameters it knows temperature 0 or not, and the seed.

The environment variable OCTAVO_NULL_STEP_MS has each step take that long.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from octavo.backends.host_pages import HostPages, swap_in, swap_out
from octavo.backends.ops import ForwardBatch, SamplingRow
from octavo.backends.reference import ReferenceBackend
from octavo.core.batch import TokenLogprobs
from octavo.core.draft_tree import path_of
from octavo.core.errors import InvariantBroken
from octavo.core.kv_groups import KVGroup

__all__ = ["NullBackend", "null_tokens"]

_ALL = (1 << 64) - 1
_START = 0x6F637461766F0001


class NullPool:
    """Pages of hashes. Groups share page ids; the hashes are kept in those of the first one."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.hashes = array("Q", bytes(8 * num_pages * page_size))  # [page, offset]; 0: nothing was written

    @property
    def stored_bytes(self) -> int:
        """Bytes of one page."""
        return 8 * self.page_size

    def copy_page(self, src: int, dst: int) -> None:
        """All of page `src` to page `dst`."""
        size = self.page_size
        self.hashes[dst * size : dst * size + size] = self.hashes[src * size : src * size + size]

    def save_page(self, page: int, out: memoryview) -> None:
        """The page as bytes."""
        out[:] = self.hashes[page * self.page_size : (page + 1) * self.page_size].tobytes()

    def load_page(self, page: int, data: memoryview) -> None:
        """Make the page hold what `save_page` wrote."""
        self.hashes[page * self.page_size : (page + 1) * self.page_size] = array("Q", bytes(data))

    def forget(self, page: int) -> None:
        """The page is free: whoever reads it now is found out."""
        self.hashes[page * self.page_size : (page + 1) * self.page_size] = array("Q", bytes(self.stored_bytes))


class NullModel:
    """A model as the engine sees it, of which only the shape is there."""

    weight_format = "none"

    def __init__(self, model: Any, step_seconds: float) -> None:
        self._model, self._step_seconds = model, step_seconds
        self._half_way = not model.kv_groups()[0].window  # a window may have given that page up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Those of the model."""
        groups: tuple[KVGroup, ...] = self._model.kv_groups()
        return groups

    def weight_bytes(self) -> int:
        """None are kept."""
        return 0

    def step_bytes(self, scheduling: Any, page_size: int) -> tuple[int, int]:
        """Bytes of activations and logits."""
        return 0, 0

    def load(self, *sources: Any) -> None:
        """Nothing is read."""

    def describe(self) -> str:
        """A line for the operator."""
        return "null: NO MODEL RUNS; tokens are hashes of what came before, for measuring all the rest"

    def forward(self, backend: Any, weights: Any, batch: ForwardBatch) -> list[int]:
        """The hash at each of ``batch.logit_rows``; those of all tokens go into the pages. Raises InvariantBroken."""
        begun = time.monotonic()
        found: list[int] = []
        for row, silent in enumerate(batch.slot_mapping):
            self._add_row(batch, row, silent, found)
        if self._step_seconds:
            time.sleep(max(0.0, begun + self._step_seconds - time.monotonic()))
        return [found[at] for at in batch.logit_rows]

    def forward_states(
        self, backend: Any, weights: Any, batch: ForwardBatch, rows: Sequence[int]
    ) -> tuple[list[int], list[list[float]]]:
        """`forward`, and of some token rows states that are made of their hashes."""
        every = self.forward(backend, weights, replace(batch, logit_rows=range(len(batch.token_ids))))
        size = self._model.config.hidden_size
        states = [[_mixed(every[row], 0, i) / 2.0**64 - 0.5 for i in range(size)] for row in rows]
        return [every[at] for at in batch.logit_rows], states

    def _add_row(self, batch: ForwardBatch, row: int, silent: bool, found: list[int]) -> None:
        size, hashes, pages = batch.kv.page_size, batch.kv.hashes, batch.page_table[0][row]
        start, stop = batch.cu_seqlens_q[row], batch.cu_seqlens_q[row + 1]
        first = batch.positions[start]
        if batch.parent_rows and batch.parent_rows[row]:
            self._add_tree(batch, row, found)
            return
        own = _START if not first else hashes[pages[(first - 1) // size] * size + (first - 1) % size]
        for position, token in enumerate(batch.token_ids[start:stop], first):
            half = position // 2 if self._half_way else position - 1
            back = hashes[pages[half // size] * size + half % size] if 0 <= half < position else 0
            own = self._checked(batch, row, position, (own, back, token))
            at = pages[position // size] * size + position % size
            if not silent:
                hashes[at] = own
            elif hashes[at] != own:
                raise InvariantBroken(f"position {position} of {batch.request_ids[row]} is held wrongly")
            found.append(own)

    def _add_tree(self, batch: ForwardBatch, row: int, found: list[int]) -> None:
        """Rows of a tree lie in slots one after the other, whatever their positions."""
        size, hashes, pages = batch.kv.page_size, batch.kv.hashes, batch.page_table[0][row]
        start, parents = batch.cu_seqlens_q[row], batch.parent_rows[row]
        first = batch.positions[start]
        for number in range(len(parents)):
            slots = [*range(first), *(first + each for each in path_of(parents, number))]  # by position
            *before, at = [pages[slot // size] * size + slot % size for slot in slots]
            position = len(before)
            half = position // 2 if self._half_way else position - 1
            own = hashes[before[-1]] if before else _START
            back = hashes[before[half]] if 0 <= half < position else 0
            hashes[at] = self._checked(batch, row, position, (own, back, batch.token_ids[start + number]))
            found.append(hashes[at])

    def _checked(self, batch: ForwardBatch, row: int, position: int, of: tuple[int, int, int]) -> int:
        own, back, _ = of
        if not own or (position and self._half_way and not back):
            raise InvariantBroken(f"position {position} of {batch.request_ids[row]} reads what was never written")
        return _mixed(*of)


class NullBackend:
    """Runs the null model. Its methods are what the engine calls of a backend, without the ops."""

    name = "null"

    def __init__(self, isa: str = "", threads: int = 0) -> None:
        self._choose: Callable[[int], int] = lambda drawn: drawn

    def weight(self, name: str, values: Any) -> None:
        """Nothing is kept."""

    def compile(self, model: Any, *, format: str = "auto", kv_dtype: str = "auto", adapters: Any = None) -> NullModel:
        """The null model of a model's shape."""
        self._choose = _chooser(model.config.vocab_size, tuple(model.config.eos_token_ids))
        return NullModel(model, float(os.environ.get("OCTAVO_NULL_STEP_MS", "0")) / 1e3)

    def allocate_kv(self, num_pages: int, page_size: int, groups: Sequence[Any]) -> NullPool:
        """An empty page pool."""
        return NullPool(num_pages, page_size)

    def batch(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        query_lens: Sequence[int],
        page_table: Sequence[Sequence[Sequence[int]]],
        kv: NullPool,
        *,
        logit_rows: Sequence[int],
        no_write: Sequence[bool],
        request_ids: Sequence[str],
        parent_rows: Sequence[Sequence[int]] = (),
    ) -> ForwardBatch:
        """A step; in ``slot_mapping``, by row, whether it writes nothing."""
        starts = [0]
        for length in query_lens:
            starts.append(starts[-1] + length)
        batch = ForwardBatch(token_ids, positions, starts, (), page_table, no_write, logit_rows, kv)
        return replace(batch, request_ids=tuple(request_ids), parent_rows=parent_rows)

    def copy_pages(self, kv: NullPool, pairs: Sequence[tuple[int, int]]) -> None:
        """Page source to page target, for each (source, target)."""
        for source, target in pairs:
            kv.copy_page(source, target)

    def move_slots(self, kv: NullPool, moves: Sequence[tuple[int, int]]) -> None:
        """Slot source to slot target, in order."""
        for source, target in moves:
            kv.hashes[target] = kv.hashes[source]

    def swap_out(self, kv: NullPool, host: HostPages, pairs: Sequence[tuple[int, int]]) -> None:
        """Page source into host page target, for each pair."""
        swap_out(kv, host, pairs)

    def swap_in(self, kv: NullPool, host: HostPages, pairs: Sequence[tuple[int, int]]) -> None:
        """Host page source into page target, for each pair. Raises CorruptPages, changing nothing, for bad ones."""
        swap_in(kv, host, pairs)

    def select_rows(self, logits: Sequence[int], batch: ForwardBatch) -> list[int]:
        """Some of the hashes."""
        return [logits[at] for at in batch.logit_rows]

    pool = ReferenceBackend.pool

    def process_logits(self, logits: Sequence[int], rows: Sequence[SamplingRow]) -> Sequence[int]:
        """As they are."""
        return logits

    def sample(self, logits: Sequence[int], rows: Sequence[SamplingRow]) -> list[int]:
        """One id per hash, of those that a grammar allows."""
        return [self._chosen(_drawn(own, row), row.grammar_mask) for own, row in zip(logits, rows, strict=True)]

    def _chosen(self, drawn: int, mask: bytes | None) -> int:
        return self._choose(drawn) if mask is None else _allowed(drawn, mask)

    def logprobs(
        self, logits: Sequence[int], ids: Sequence[int], k: Sequence[int], chosen: Sequence[Sequence[int]]
    ) -> list[TokenLogprobs]:
        """Everything is certain."""
        return [TokenLogprobs(token, 0.0, 1) for token in ids]


def null_tokens(
    prompt: Sequence[int], vocab_size: int, eos_ids: Collection[int], seed: int | None = None
) -> Iterator[int]:
    """What a model of full attention and this vocabulary answers, without end; no seed: at temperature 0."""
    choose, hashes = _chooser(vocab_size, tuple(eos_ids)), [_START]
    for token in prompt:
        hashes.append(_following(hashes, token))
    while True:
        token = choose(hashes[-1] if seed is None else _mixed(hashes[-1], seed & _ALL, 0))
        yield token
        hashes.append(_following(hashes, token))


def _following(hashes: Sequence[int], token: int) -> int:
    """``hashes[p + 1]`` is that of position p; the first one stands before all."""
    position = len(hashes) - 1
    return _mixed(hashes[-1], hashes[position // 2 + 1] if position else 0, token)


def _mixed(own: int, back: int, token: int) -> int:
    """64 bits, never 0."""
    x = (own * 0x9E3779B97F4A7C15 + back * 0xD1B54A32D192ED03 + token + 1) & _ALL
    x = ((x ^ x >> 31) * 0xBF58476D1CE4E5B9) & _ALL
    return x ^ x >> 29 or 1


def _drawn(own: int, row: SamplingRow) -> int:
    return own if row.params.greedy else _mixed(own, row.seed & _ALL, row.choice)


def _allowed(drawn: int, mask: bytes) -> int:
    """Of the ids that a mask allows, the one that a hash falls on."""
    left = drawn % int.from_bytes(mask, "little").bit_count()
    for at, byte in enumerate(mask):
        if left < byte.bit_count():
            return 8 * at + [bit for bit in range(8) if byte >> bit & 1][left]
        left -= byte.bit_count()
    raise InvariantBroken("a mask allows nothing")


@lru_cache(4)
def _chooser(vocab_size: int, eos_ids: tuple[int, ...]) -> Callable[[int], int]:
    """From a hash to a token that ends nothing."""
    kept = [token for token in range(vocab_size) if token not in eos_ids]
    return lambda own: kept[own % len(kept)]
