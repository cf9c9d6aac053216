"""`quantization_config` of a config.json, checked: what is not understood is refused by name, never guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.models.keys import ConfigKeys

__all__ = ["QuantSettings", "read_settings"]

_CT_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
_MAX_GROUP = 1 << 20


@dataclass(frozen=True)
class Scheme:
    """How the matrices of one group of modules are stored."""

    bits: int
    kind: str = "int"  # int or float
    symmetric: bool = True
    strategy: str = "group"  # one of _STRATEGIES
    group_size: int = 0  # columns that share a scale; 0: the whole row
    block: tuple[int, int] = (0, 0)  # rows and columns that share a scale (strategy block)


@dataclass(frozen=True)
class QuantSettings:
    """`method` is gptq, awq, compressed-tensors or fp8. `zero_shift` is what GPTQ's first version left out of zeros."""

    method: str
    schemes: tuple[Scheme, ...]
    zero_shift: int = 0


def read_settings(config: Mapping[str, Any]) -> QuantSettings:
    """The settings of a `quantization_config`. Raises InvalidInput naming the key that is not supported."""
    keys = ConfigKeys(config, "quantization_config.")
    method = keys.text("quant_method", "")
    readers = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "fp8": _fp8}
    if method not in readers:
        raise keys.error("quant_method", f"supported are {', '.join(readers)}")
    return readers[method](keys)


def _integer_scheme(keys: ConfigKeys, bits: str, size: str, symmetric: bool) -> Scheme:
    width = keys.size(bits, 8)
    if width not in (4, 8):
        raise keys.error(bits, "supported are 4 and 8")
    return Scheme(width, symmetric=symmetric, group_size=_group_size(keys, size))


def _group_size(keys: ConfigKeys, key: str) -> int:
    """-1, null: the whole row, as 0."""
    return 0 if keys.get(key) == -1 else keys.size(key, _MAX_GROUP, 0)


def _refuse_set(keys: ConfigKeys, *names: str) -> None:
    for name in names:
        if keys.get(name):
            raise keys.error(name, "is not supported: it changes how single modules are stored or run")


def _gptq(keys: ConfigKeys) -> QuantSettings:
    _refuse_set(keys, "dynamic", "is_marlin_format", "use_hadamard")
    form = keys.text("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise keys.error("checkpoint_format", "supported are gptq and gptq_v2")
    scheme = _integer_scheme(keys, "bits", "group_size", keys.flag("sym", True))
    return QuantSettings("gptq", (scheme,), zero_shift=1 if form == "gptq" else 0)


def _awq(keys: ConfigKeys) -> QuantSettings:
    if keys.text("version", "gemm").lower() != "gemm":
        raise keys.error("version", "only the gemm layout is supported: convert the checkpoint")
    bits, size = ("bits" if keys.has("bits") else "w_bit"), ("group_size" if keys.has("group_size") else "q_group_size")
    if keys.size(bits, 8) != 4:
        raise keys.error(bits, "AWQ checkpoints have 4 bits")
    return QuantSettings("awq", (_integer_scheme(keys, bits, size, not keys.flag("zero_point", True)),))


def _compressed(keys: ConfigKeys) -> QuantSettings:
    form = keys.text("format", "pack-quantized")
    if form not in (*_CT_FORMATS, "mixed-precision"):
        raise keys.error("format", f"supported are {', '.join(_CT_FORMATS)}")
    sparsity = keys.group("sparsity_config")
    if sparsity is not None and sparsity.text("format", "dense") != "dense":
        raise sparsity.error("format", "sparse checkpoints are not supported")
    transform = keys.group("transform_config")
    if transform is not None and transform.get("config_groups"):
        raise keys.error("transform_config", "checkpoints whose weights are rotated are not supported")
    groups = keys.group("config_groups")
    if groups is None or not groups.values:
        raise keys.error("config_groups", "is missing")
    schemes = [_compressed_scheme(groups, name) for name in groups.values]
    return QuantSettings("compressed-tensors", tuple(dict.fromkeys(schemes)))


def _compressed_scheme(groups: ConfigKeys, name: str) -> Scheme:
    group = groups.group(name)
    weights = group.group("weights") if group is not None else None
    if weights is None:
        raise groups.error(name, "must hold weights")
    bits, kind = weights.size("num_bits", 8), weights.text("type", "int")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise weights.error("num_bits", f"of type {kind} is not supported: int 4, int 8 and float 8 are")
    size = _group_size(weights, "group_size")
    strategy = weights.text("strategy", "group" if size else "channel")
    if strategy not in _STRATEGIES:
        raise weights.error("strategy", f"supported are {', '.join(_STRATEGIES)}")
    if strategy == "group" and not size:
        raise weights.error("group_size", "strategy group needs it")
    block = _block(weights, "block_structure") if strategy == "block" else (0, 0)
    return Scheme(bits, kind, weights.flag("symmetric", True), strategy, size if strategy == "group" else 0, block)


def _block(keys: ConfigKeys, key: str) -> tuple[int, int]:
    value = keys.get(key)
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size <= _MAX_GROUP for size in sizes):
        raise keys.error(key, "give two positive integers: rows and columns of a block")
    return sizes[0], sizes[1]


def _fp8(keys: ConfigKeys) -> QuantSettings:
    if keys.text("fmt", "e4m3") != "e4m3":
        raise keys.error("fmt", "only e4m3 is supported")
    if keys.get("weight_block_size") is None:
        return QuantSettings("fp8", (Scheme(8, "float", strategy="tensor"),))
    return QuantSettings("fp8", (Scheme(8, "float", strategy="block", block=_block(keys, "weight_block_size")),))
