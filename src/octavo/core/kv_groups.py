"""KV groups: which layers share a page, what they store per token, and which past tokens they can still see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.errors import InvalidInput
from octavo.core.kv_eviction import Voting

__all__ = ["DTYPE_BYTES", "KVGroup", "make_kv_groups"]

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
KINDS = ("attention", "latent", "state")


@dataclass(frozen=True)
class KVGroup:
    """Layers whose K/V lie in one page: a page of the group holds `page_size` tokens of all its layers.

    All groups of a model have equal page bytes, so one allocator serves them: a group with fewer layers than the
    others counts `padded_layers` empty ones.
    """

    layers: tuple[int, ...]
    kind: str = "attention"
    num_kv_heads: int = 1
    k_dim: int = 1  # per head
    v_dim: int = 1  # per head
    window: int = 0  # position p sees (p - window, p]; 0: everything
    sinks: int = 0  # with a window: the first `sinks` tokens stay visible
    dtype: str = "fp32"
    padded_layers: int = 0
    kept: int = 0  # of a complete prompt, at least: the rest is forgotten in steps of `forgets` tokens; 0: all stays
    forgets: int = 1
    looks: int = 0  # tokens at its end that say what stays
    every: int = 0  # not only then: of all that there is after so many tokens, and so many more

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInput("kind", self.kind, f"give one of {', '.join(KINDS)}")
        if self.dtype not in DTYPE_BYTES:
            raise InvalidInput("dtype", self.dtype, f"give one of {', '.join(DTYPE_BYTES)}")
        if not self.layers:
            raise InvalidInput("layers", self.layers, "give at least one layer")
        for field, least in (("num_kv_heads", 1), ("k_dim", 1), ("v_dim", 0), ("window", 0), ("sinks", 0)):
            if getattr(self, field) < least:
                raise InvalidInput(field, getattr(self, field), f"give an integer >= {least}")
        if self.padded_layers < 0:
            raise InvalidInput("padded_layers", self.padded_layers, "give an integer >= 0")

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of `page_size` tokens, padded layers included."""
        per_token = self.num_kv_heads * (self.k_dim + self.v_dim) * DTYPE_BYTES[self.dtype]
        return (len(self.layers) + self.padded_layers) * per_token * page_size

    def most_columns(self, num_tokens: int, page_size: int, max_chunk: int | None) -> int:
        """Columns of so many tokens that hold a page at once, at most, if no step computes more than ``max_chunk``."""
        columns = -(-num_tokens // page_size)
        if self.kept and num_tokens >= self.kept + self.forgets:  # what stays is copied before the rest is free
            held = -(-(self.kept + 3 * self.forgets) // page_size) if self.every else columns
            return min(columns, held) + self.kept_columns(page_size)
        if self.window == 0 or max_chunk is None:
            return columns
        return min(columns, -(-self.sinks // page_size) + (self.window + max_chunk + page_size - 2) // page_size + 1)

    def kept_columns(self, page_size: int) -> int:
        """Columns that hold what stays when something is forgotten, at most."""
        return -(-(self.kept + self.forgets - 1) // page_size)

    def needed_columns(self, num_tokens: int, page_size: int) -> tuple[int, int]:
        """Columns of the page table that positions >= num_tokens - 1 may still read: [0, sinks) and [first, ...).

        Returns (number of sink columns, first). Without a window: (0, 0), that is, everything. One token more than the
        next position's window is kept, so that the last token can be computed again.
        """
        if self.window == 0 or num_tokens <= self.window:
            return 0, 0
        first = (num_tokens - self.window) // page_size
        return min(-(-self.sinks // page_size), first), first


def make_kv_groups(
    layer_windows: Sequence[int],
    num_kv_heads: int = 1,
    k_dim: int = 1,
    v_dim: int = 1,
    dtype: str = "fp32",
    sinks: int = 0,
    voting: Voting | None = None,
) -> tuple[KVGroup, ...]:
    """Group layers of equal window (0: global) into groups of equal layer count, with the least padding.

    Of the layer counts with the least padding the largest is taken: 15 windowed and 3 global layers make 6 groups of 3.
    Groups are ordered by their first layer. ``sinks``: first tokens that windowed layers keep. ``voting``: what
    stays of all.
    Raises `InvalidInput` without layers or for a negative window.
    """
    if not layer_windows:
        raise InvalidInput("layer_windows", layer_windows, "give one window per layer")
    by_window: dict[int, list[int]] = {}
    for layer, window in enumerate(layer_windows):
        by_window.setdefault(window, []).append(layer)
    sizes = [len(layers) for layers in by_window.values()]
    size = min(range(1, max(sizes) + 1), key=lambda s: (sum(-n % s for n in sizes), -s))
    groups = [
        KVGroup(
            layers=tuple(layers[start : start + size]),
            num_kv_heads=num_kv_heads,
            k_dim=k_dim,
            v_dim=v_dim,
            window=window,
            sinks=sinks if window else 0,
            dtype=dtype,
            kept=voting.capacity if voting else 0,
            forgets=voting.block if voting else 1,
            looks=voting.looks if voting else 0,
            every=voting.every if voting else 0,
            padded_layers=max(0, size - len(layers[start : start + size])),
        )
        for window, layers in by_window.items()
        for start in range(0, len(layers), size)
    ]
    return tuple(sorted(groups, key=lambda group: group.layers[0]))
