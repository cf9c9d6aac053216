"""What `--format auto` stands for on the native backend: a table, read once before anything is packed, and said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.backends.native_formats import AUTO_SHARE, AUTO_TABLE, FormatPlan
from octavo.backends.native_lib import chosen_isa
from octavo.backends.operand_types import packed_bytes
from octavo.engine.memory import show_size, total_memory

__all__ = ["choose_format", "packed_size", "resolve_auto"]


def choose_format(own: str, shapes: Mapping[str, Sequence[int]], isa: str, memory: int | None) -> tuple[str, str]:
    """A format, and why. `own`: the checkpoint's (or ""); `isa`: the kernel table; `memory`: bytes that the machine has
    (None: unknown), whatever is in use: the same machine gives the same answer every time.

    The table is `native_formats.AUTO_TABLE`: the first format whose weights take at most half of the memory, and the
    last where none does (the memory plan then says what is missing).
    """
    if own:
        return own, "as the checkpoint is stored"
    formats = AUTO_TABLE.get(isa, AUTO_TABLE["generic"])
    for kind in formats:
        size = packed_size(shapes, kind)
        if memory is None or size <= memory * AUTO_SHARE:
            beside = "" if memory is None else f" in half of {show_size(memory)}"
            return kind, f"{isa}, {show_size(size)} of weights{beside}"
    return formats[-1], f"{isa}, the smallest; memory is short"


def packed_size(shapes: Mapping[str, Sequence[int]], kind: str) -> int:
    """Bytes of all weights, packed: a model's `weight_shapes`, the format of its linear layers."""
    plan = FormatPlan(kind)
    return sum(_bytes(name, shape, plan) for name, shape in shapes.items())


def _bytes(name: str, shape: Sequence[int], plan: FormatPlan) -> int:
    if len(shape) != 2:
        return 4 * shape[0]
    return packed_bytes(shape, plan(name, "head" if "embed_tokens" in name or "lm_head" in name else "linear"))


def resolve_auto(own: str, model: Any) -> tuple[str, str]:
    """`choose_format` for a model on this machine: its format, and the line that says so."""
    kind, why = choose_format(own, model.weight_shapes(), chosen_isa(), total_memory())
    return kind, f"format auto: {kind} ({why})"
