"""The formats that `octavo quantize` writes, and those that run what others wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.backends.quantization import QuantConfig
from octavo.core.errors import InvalidInput
from octavo.weights.quant.settings import Scheme

__all__ = ["METHODS", "TARGETS", "Target", "find_target", "own_format"]

METHODS = ("rtn", "gptq", "awq", "smoothquant")


@dataclass(frozen=True)
class Target:
    """Codes of `bits`, one scale (and zero, unless symmetric) for `group_size` columns of a row.

    `name` is the native format that runs it; `activation_bits` is what its kernel makes of activations.
    """

    name: str
    bits: int
    group_size: int  # 0: the whole row
    symmetric: bool
    activation_bits: int  # 8 or 16

    @property
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    @property
    def offset(self) -> int:
        """The zero of a symmetric group."""
        return 1 << (self.bits - 1)

    @property
    def half_scales(self) -> bool:
        """Scales of groups are stored as float16, as kernels keep them; those of whole rows as float32."""
        return self.group_size > 0

    def num_groups(self, columns: int) -> int:
        """Scales in a row of so many columns; the last group may be shorter."""
        return -(-columns // self.group_size) if self.group_size else 1

    def definition(self) -> QuantConfig:
        """The same grid in the standard-library quantizer. Raises InvalidInput for a whole row, which it lacks."""
        return QuantConfig(self.bits, self.group_size, self.symmetric)


TARGETS: dict[str, Target] = {
    "w8pc": Target("w8pc", 8, 0, True, 8),
    "w8g64": Target("w8g64", 8, 64, True, 8),
    **{f"w4g{size}": Target(f"w4g{size}", 4, size, False, 8) for size in (32, 64, 128)},
    **{f"w4a16g{size}": Target(f"w4a16g{size}", 4, size, False, 16) for size in (32, 64, 128)},
}


def find_target(name: str) -> Target:
    """A target by name. Raises InvalidInput for an unknown one."""
    if name not in TARGETS:
        raise InvalidInput("to", name, f"known formats: {', '.join(TARGETS)}")
    return TARGETS[name]


def own_format(schemes: Sequence[Scheme], config: Mapping[str, Any]) -> str:
    """The native format that runs a quantized checkpoint as it is stored, or "" where there is none.

    `octavo_quantization` of the configuration names it; else 4 bits run beside bf16 activations, for which they were
    made, in the largest group that divides the stored one, 8 bits by row as `w8pc`, by groups of 64s as `w8g64`.
    """
    written = config.get("octavo_quantization")
    if isinstance(written, Mapping) and written.get("format") in TARGETS:
        return str(written["format"])
    found = {_scheme_format(scheme) for scheme in schemes}
    return found.pop() if len(found) == 1 else ""


def _scheme_format(scheme: Scheme) -> str:
    size = scheme.group_size
    if scheme.kind != "int" or scheme.strategy not in ("group", "channel", "tensor"):
        return ""
    if scheme.bits == 8:
        return "w8g64" if size and size % 64 == 0 else "" if size else "w8pc"
    fitting = [own for own in (128, 64, 32) if size % own == 0]  # 0, the whole row, is in any groups
    return f"w4a16g{fitting[0]}" if fitting else ""
