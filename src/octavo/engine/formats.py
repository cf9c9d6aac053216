"""What `--format auto` stands for on the native backend: decided once, before anything is packed, and said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.backends.native_formats import AUTO_FORMATS, FormatPlan
from octavo.backends.operand_types import packed_bytes
from octavo.engine.memory import show_size

__all__ = ["choose_format", "packed_size", "resolve_auto"]

_SHARE = 0.75  # of the memory budget that weights may take


def choose_format(own: str, shapes: Mapping[str, Sequence[int]], budget: int | None) -> tuple[str, str]:
    """A format, and why. `own`: the checkpoint's (or ""); `budget`: bytes that the engine may take (None: unknown).

    The table is `native_formats.AUTO_FORMATS`: the first whose weights take at most three quarters of the budget, and
    the last where none does (the memory plan then says what is missing).
    """
    if own:
        return own, "as the checkpoint is stored"
    for kind in AUTO_FORMATS:
        size = packed_size(shapes, kind)
        if budget is None or size <= budget * _SHARE:
            return kind, f"{show_size(size)} of weights" + ("" if budget is None else f" fit {show_size(budget)}")
    return AUTO_FORMATS[-1], "the smallest; memory is short"


def packed_size(shapes: Mapping[str, Sequence[int]], kind: str) -> int:
    """Bytes of all weights, packed: a model's `weight_shapes`, the format of its linear layers."""
    plan = FormatPlan(kind)
    return sum(_bytes(name, shape, plan) for name, shape in shapes.items())


def _bytes(name: str, shape: Sequence[int], plan: FormatPlan) -> int:
    if len(shape) != 2:
        return 4 * shape[0]
    return packed_bytes(shape, plan(name, "head" if "embed_tokens" in name or "lm_head" in name else "linear"))


def resolve_auto(own: str, model: Any, budget: int | None) -> tuple[str, str]:
    """`choose_format` for a model: its format, and the line that says so."""
    kind, why = choose_format(own, model.weight_shapes(), budget)
    return kind, f"format auto: {kind} ({why})"
