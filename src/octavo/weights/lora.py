"""LoRA adapters as PEFT writes them: a folder with `adapter_config.json` and `adapter_model.safetensors`.

Nothing in it is trusted: every name, type and size is held against the model before a value is read, and whatever would
change the output in a way that is not implemented is refused by its name. Source: Hu et al., "LoRA", 2021; the scale of
`use_rslora` is Kalajdzievski's, 2023.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvalidInput
from octavo.weights.jsonfile import read_json
from octavo.weights.safetensors import SafetensorsFile

__all__ = ["CONFIG_NAME", "MAX_RANK", "WEIGHTS_NAME", "Adapter", "Factors", "read_adapter"]

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 512
_MAX_CONFIG = 1 << 20
_DTYPES = ("F32", "F16", "BF16")
_TENSOR = re.compile(r"base_model\.model\.([\w.]{1,256}?)\.lora_([AB])(?:\.default)?\.weight")
_MODULE = re.compile(r"[\w.]{1,256}")
_PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # that leave the base model as it is
# Fields that say where the values come from, or repeat what the tensors say.
_HARMLESS = frozenset(
    (
        *("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "peft_version"),
        *("lora_dropout", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config"),
        *("eva_config", "corda_config", "lora_ga_config", "runtime_config", "qalora_group_size", "ensure_weight_tying"),
    )
)
_KNOWN = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern"),
        *("bias", "init_lora_weights"),
    )
)

Floats = NDArray[np.float32]
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Factors:
    """What an adapter adds to one projection: scale * (x A^T) B^T."""

    a: Floats  # [r, K]
    b: Floats  # [N, r]
    scale: float


@dataclass(frozen=True)
class Adapter:
    """An adapter's factors by projection; `digest` is of their values, whatever files they were in."""

    factors: Mapping[str, Factors]
    rank: int  # the largest
    digest: str


def read_adapter(folder: str | os.PathLike[str], projections: Shapes, max_rank: int = MAX_RANK) -> Adapter:
    """The adapter in a folder, for a model with these projections (name -> `[N, K]`).

    Raises `InvalidInput` naming the field: for files that are not there or broken (`CorruptFile`), for what is not
    implemented (DoRA, biases, whole modules), for targets or shapes that the model has not, for ranks above `max_rank`.
    """
    place = Path(folder)
    config = _checked(read_json(place / CONFIG_NAME, _MAX_CONFIG))
    with SafetensorsFile(place / WEIGHTS_NAME) as file:
        found = _pairs(file, config, projections, max_rank)
        factors = {name: _factors(file, config, name, pair) for name, pair in sorted(found.items())}
    return Adapter(factors, max(len(each.a) for each in factors.values()), _digest(factors))


def _checked(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration, if all that it asks for is implemented."""
    if config.get("peft_type") != "LORA":
        raise _refused("peft_type", config.get("peft_type"), "only LORA adapters are served")
    if config.get("bias", "none") not in ("none", None):
        raise _refused("bias", config["bias"], "adapters that train biases are not served; train with bias='none'")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        remedy = "such an adapter belongs to a changed base model; convert it to plain LoRA when saving it"
        raise _refused("init_lora_weights", config["init_lora_weights"], remedy)
    for name, value in config.items():
        asks = value not in (None, False, "", [], {})
        if asks and name not in _KNOWN and name not in _HARMLESS:
            raise _refused(name, value, "this is not implemented for adapters; train without it")
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise _refused("r", rank, f"must be a whole number from 1 to {MAX_RANK}")
    _number("lora_alpha", alpha)
    if type(config.get("use_rslora", False)) is not bool:
        raise _refused("use_rslora", config["use_rslora"], "must be true or false")
    for name in ("rank_pattern", "alpha_pattern"):
        _check_pattern(name, config.get(name) or {})
    return config


def _check_pattern(field: str, pattern: Any) -> None:
    if not isinstance(pattern, dict) or len(pattern) > 1 << 14:
        raise _refused(field, type(pattern).__name__, "must map modules to numbers")
    for module, value in pattern.items():
        if not _MODULE.fullmatch(module):  # PEFT takes regular expressions; those of a file are not run here
            raise _refused(field, module, "name modules by their plain names, without a regular expression")
        _number(field, value)


def _number(field: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e6:
        raise _refused(field, value, "must be a finite number of at most a million")
    return float(value)


def _pairs(
    file: SafetensorsFile, config: Mapping[str, Any], projections: Shapes, max_rank: int
) -> dict[str, dict[str, str]]:
    """Projection -> {"A": tensor, "B": tensor}, all of them checked against the model."""
    found: dict[str, dict[str, str]] = {}
    for tensor in file.names():
        match = _TENSOR.fullmatch(tensor)
        if match is None:
            raise _refused("tensor", tensor, "only lora_A and lora_B of linear projections are served")
        pair = found.setdefault(match[1], {})
        if match[2] in pair:
            raise _refused("tensor", tensor, "this factor is there twice")
        pair[match[2]] = tensor
    if not found:
        raise _refused("tensors", 0, "it holds no factor")
    for name, pair in found.items():
        _check_target(name, config.get("target_modules"), projections)
        _check_pair(file, config, name, pair, projections[name], max_rank)
    return found


def _check_target(name: str, targets: Any, projections: Shapes) -> None:
    if name not in projections:
        kinds = ", ".join(dict.fromkeys(known.rpartition(".")[2] for known in projections))
        raise _refused("target_modules", name, f"this model has no such projection; adapters may change its {kinds}")
    if isinstance(targets, list) and not any(name == t or name.endswith(f".{t}") for t in targets):
        raise _refused("target_modules", name, "the file has a factor of it, and the configuration does not name it")


def _check_pair(
    file: SafetensorsFile,
    config: Mapping[str, Any],
    name: str,
    pair: Mapping[str, str],
    shape: tuple[int, ...],
    max_rank: int,
) -> None:
    if len(pair) != 2:
        raise _refused("tensor", name, "it must have both lora_A and lora_B")
    a, b = (file.info(pair[half]) for half in "AB")
    rank = int(_matched(config.get("rank_pattern"), name, config["r"]))
    if rank > max_rank:
        raise _refused("r", rank, f"there is room for ranks up to {max_rank}; start with a larger --max-lora-rank")
    for info, wanted in ((a, (rank, shape[1])), (b, (shape[0], rank))):
        if info.shape != wanted:
            raise _refused(f"tensor {info.name}", list(info.shape), f"must have the shape {list(wanted)}")
        if info.dtype not in _DTYPES:
            raise _refused(f"tensor {info.name}", info.dtype, f"must be of {', '.join(_DTYPES)}")


def _matched(pattern: Any, name: str, default: float) -> float:
    """What a pattern says of a projection: its first module that the name ends with."""
    for module, value in (pattern or {}).items():
        if name == module or name.endswith(f".{module}"):
            return float(value)
    return default


def _factors(file: SafetensorsFile, config: Mapping[str, Any], name: str, pair: Mapping[str, str]) -> Factors:
    a, b = (file.read(pair[half]) for half in "AB")
    for half, values in zip("AB", (a, b), strict=True):
        if not np.isfinite(values).all():
            raise _refused(f"tensor {pair[half]}", "not finite", "every value must be a finite number")
    alpha = _matched(config.get("alpha_pattern"), name, config.get("lora_alpha", 8))
    rank = len(a)
    return Factors(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _digest(factors: Mapping[str, Factors]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, each in factors.items():
        digest.update(f"{name} {each.a.shape} {each.b.shape} {each.scale!r}\n".encode())
        digest.update(np.ascontiguousarray(each.a, "<f4").data)
        digest.update(np.ascontiguousarray(each.b, "<f4").data)
    return digest.hexdigest()


def _refused(field: str, value: object, remedy: str) -> InvalidInput:
    return InvalidInput(f"adapter: {field}", value, remedy)
