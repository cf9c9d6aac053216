"""What the kernels of each weight format really multiply, and the bytes that they read: one table, as data.

A file that stores 4 bits proves nothing about the product: these are the operands of the multiply instructions. Sizes
follow the packed panels of native/src/pack.inc: 64 outputs a panel, inputs padded to whole groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.errors import InvalidInput

__all__ = ["OPERANDS", "Operands", "packed_bytes"]

_PANEL = 64  # outputs side by side


@dataclass(frozen=True)
class Operands:
    """Types of a format's product: packed weights, what the multiplier gets of them, of activations, and the sum.

    `code_bits` a weight, in groups of `group` inputs (0: the whole row) with `group_bytes` of scales and offsets;
    `depth`: inputs are padded to a multiple of it (a group at least).
    """

    stored: str
    weights: str
    activations: str
    sums: str
    code_bits: int
    group: int = 0
    group_bytes: int = 0
    depth: int = 1


def _int4(group: int) -> Operands:
    return Operands("uint4", "uint4 as uint8", "int8", "int32", 4, group, 4, group)


def _int4_wide(group: int) -> Operands:
    return Operands("uint4", "bf16", "bf16", "fp32", 4, group, 4, group)


OPERANDS: dict[str, Operands] = {
    "fp32": Operands("fp32", "fp32", "fp32", "fp32", 32),
    "bf16": Operands("bf16", "bf16", "bf16", "fp32", 16, depth=32),
    "w8g64": Operands("uint8", "uint8", "int8", "int32", 8, 64, 2, 64),
    "w8pc": Operands("uint8", "uint8", "int8", "int32", 8, 0, 4, 64),
    **{f"w4g{size}": _int4(size) for size in (32, 64, 128)},
    **{f"w4a16g{size}": _int4_wide(size) for size in (32, 64, 128)},
}


def packed_bytes(shape: Sequence[int], kind: str) -> int:
    """Bytes of a packed matrix [N, K], which a product with any number of rows reads once.

    Raises InvalidInput for an unknown format.
    """
    if kind not in OPERANDS:
        raise InvalidInput("format", kind, f"known formats: {', '.join(OPERANDS)}")
    o, (outputs, inputs) = OPERANDS[kind], shape
    columns, rows = -(-outputs // _PANEL) * _PANEL, -(-inputs // o.depth) * o.depth
    groups = rows // o.group if o.group else 1
    return columns * (rows * o.code_bits // 8 + groups * o.group_bytes)
