"""Rotary frequencies, resolved from the configuration alone: no table depends on the length of a running sequence."""

from __future__ import annotations

import math
import struct

from octavo.backends.ops import RopeTable
from octavo.models.config import RopeConfig

__all__ = ["resolve_rope"]


def resolve_rope(rope: RopeConfig, head_dim: int) -> RopeTable:
    """The table that rotates a whole head; frequencies are exact float32 values.

    Pair i turns by `theta ** (-2 i / head_dim)` radians a position, then scaled by `rope.kind`:
    `linear` divides all by `factor`; `llama3` and `yarn` divide slow pairs, keep fast ones and blend between.
    """
    base = [rope.theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    scaled = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}[rope.kind](rope, base)
    return RopeTable(tuple(map(_float32, scaled)), head_dim, _attention_factor(rope))


def _float32(value: float) -> float:
    """Rounded to float32, so that every backend starts from the same numbers."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _default(rope: RopeConfig, base: list[float]) -> list[float]:
    return base


def _linear(rope: RopeConfig, base: list[float]) -> list[float]:
    """Position interpolation (Chen et al., 2023): positions shrink by `factor`."""
    return [frequency / rope.factor for frequency in base]


def _llama3(rope: RopeConfig, base: list[float]) -> list[float]:
    """Llama 3.1: the turns that a pair makes within the original context decide how much it is slowed."""
    scaled = []
    for frequency in base:
        turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        scaled.append(_blend(frequency, rope.factor, keep))
    return scaled


def _yarn(rope: RopeConfig, base: list[float]) -> list[float]:
    """YaRN (Peng et al., 2023), section 3.2: a ramp over pair indices between `beta_fast` and `beta_slow` turns."""
    first, last = _ramp_pair(rope, rope.beta_fast, len(base)), _ramp_pair(rope, rope.beta_slow, len(base))
    if rope.truncate:
        first, last = float(math.floor(first)), float(math.ceil(last))
    first, last = max(first, 0.0), min(last, 2 * len(base) - 1.0)
    width = (last - first) or 0.001  # a ramp of no width becomes a step
    return [_blend(frequency, rope.factor, 1 - (pair - first) / width) for pair, frequency in enumerate(base)]


def _ramp_pair(rope: RopeConfig, turns: float, pairs: int) -> float:
    """The (fractional) pair that makes `turns` turns within the original context."""
    original = rope.original_max_position_embeddings
    return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(rope.theta)


def _blend(frequency: float, factor: float, keep: float) -> float:
    """`keep` 1 leaves the frequency, 0 divides it by `factor`."""
    keep = min(max(keep, 0.0), 1.0)
    return (1 - keep) * frequency / factor + keep * frequency


def _attention_factor(rope: RopeConfig) -> float:
    """What cosine and sine are multiplied by: YaRN's temperature (section 3.3), else 1."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _temperature(rope.factor, rope.mscale) / _temperature(rope.factor, rope.mscale_all_dim)
    return _temperature(rope.factor, 1.0)


def _temperature(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
