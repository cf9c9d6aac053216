"""Writes a quantized model folder: safetensors in the layout of compressed-tensors, config.json, tokenizer files.

The header is known before the first matrix is, so tensors go to their places as they are made: none is kept.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvalidInput
from octavo.weights.quant.integer import IntegerWeight, pack_words
from octavo.weights.quant.targets import Target

__all__ = ["TensorFile", "copy_companions", "parts_of", "plan_parts", "quantization_config", "write_config"]

Spec = tuple[str, tuple[int, ...]]  # stored type, shape

_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "I32": 4, "I64": 8}
_KINDS = {"F32": "<f4", "F16": "<f2", "I8": "i1", "I32": "<i4", "I64": "<i8"}
_COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
    *("LICENSE", "LICENSE.txt", "NOTICE"),
)
_SIMPLE = {"output_activations": None}


class TensorFile:
    """A safetensors file whose tensors are written in any order, each once. It has its name only when it is whole."""

    def __init__(self, path: Path, specs: Mapping[str, Spec]) -> None:
        self.path, self.specs = path, dict(specs)
        self._offsets: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, (kind, shape) in self.specs.items():
            size = math.prod(shape) * _BYTES[kind]
            header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [end, end + size]}
            self._offsets[name], end = end, end + size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start, self._left = 8 + len(text), set(self.specs)
        self.size = self._start + end
        self._part = path.with_name(path.name + ".part")
        self._file = open(self._part, "wb")  # noqa: SIM115 (closed by finish or close)
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, values: NDArray[Any]) -> None:
        """One tensor. Raises InvalidInput for a name or shape that was not announced."""
        kind, shape = self.specs.get(name, ("", ()))
        if not kind or values.shape != shape or name not in self._left:
            raise InvalidInput(f"tensor {name!r}", list(values.shape), f"was announced as {list(shape)}, once")
        self._left.remove(name)
        self._file.seek(self._start + self._offsets[name])
        stored = _to_bf16(values) if kind == "BF16" else np.ascontiguousarray(values, _KINDS[kind])
        self._file.write(stored.tobytes())

    def finish(self) -> None:
        """Give the file its name. Raises InvalidInput when a tensor is missing."""
        if self._left:
            raise InvalidInput("tensors", sorted(self._left)[0], f"{len(self._left)} were announced and never written")
        self._file.close()
        os.replace(self._part, self.path)

    def close(self) -> None:
        """Leave no half file behind."""
        self._file.close()
        self._part.unlink(missing_ok=True)


def _to_bf16(values: NDArray[Any]) -> NDArray[np.uint16]:
    """Nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype("<u2")


def plan_parts(name: str, shape: Sequence[int], target: Target) -> dict[str, Spec]:
    """The tensors of a quantized matrix `[N, K]` called `name` (`....weight`)."""
    module, (rows, columns) = name.removesuffix(".weight"), shape
    groups, per_word = target.num_groups(columns), 32 // target.bits
    if not target.group_size:
        return {name: ("I8", (rows, columns)), f"{module}.weight_scale": ("F32", (rows, 1))}
    specs: dict[str, Spec] = {
        f"{module}.weight_packed": ("I32", (rows, -(-columns // per_word))),
        f"{module}.weight_scale": ("F16", (rows, groups)),
        f"{module}.weight_shape": ("I64", (2,)),
    }
    if not target.symmetric:
        specs[f"{module}.weight_zero_point"] = ("I32", (-(-rows // per_word), groups))
    return specs


def parts_of(name: str, weight: IntegerWeight, target: Target) -> dict[str, NDArray[Any]]:
    """The values of `plan_parts`. Codes and zeros count from 0, as compressed-tensors stores signed ones."""
    module = name.removesuffix(".weight")
    if not target.group_size:
        return {name: (weight.codes ^ 128).view(np.int8), f"{module}.weight_scale": weight.scales}
    parts: dict[str, NDArray[Any]] = {
        f"{module}.weight_packed": pack_words(weight.codes, target.bits),
        f"{module}.weight_scale": weight.scales,
        f"{module}.weight_shape": np.array(weight.codes.shape, np.int64),
    }
    if not target.symmetric:
        zeros = np.ascontiguousarray(weight.zeros.T.astype(np.uint8))
        parts[f"{module}.weight_zero_point"] = pack_words(zeros, target.bits).T
    return parts


def quantization_config(target: Target, ignored: Sequence[str]) -> dict[str, Any]:
    """What compressed-tensors wants to know. `ignored`: modules (or `re:` patterns) that stay as they were."""
    channel = not target.group_size
    weights = {
        "num_bits": target.bits,
        "type": "int",
        "symmetric": target.symmetric,
        "strategy": "channel" if channel else "group",
        "group_size": None if channel else target.group_size,
        "dynamic": False,
    }
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs if channel else None} | _SIMPLE
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if channel else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
    }


def write_config(folder: Path, config: Mapping[str, Any], target: Target, method: str, ignored: Sequence[str]) -> None:
    """`config.json`: the model's own keys, how it is quantized, and the format that it was made for."""
    value = {
        **config,
        "quantization_config": quantization_config(target, ignored),
        "octavo_quantization": {"format": target.name, "method": method},
    }
    (folder / "config.json").write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def copy_companions(source: Path, folder: Path, metadata: Mapping[str, Any] | None) -> None:
    """Tokenizer, chat template and licence: files of a folder, or made from GGUF metadata."""
    if metadata is None:
        for name in _COMPANIONS:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return
    from octavo.tokenizers.gguf import load_metadata

    tokenizer = load_metadata(metadata)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    traits = tokenizer.traits
    settings = {
        "bos_token": None if traits.bos_id is None else tokenizer.id_to_token(traits.bos_id),
        "eos_token": tokenizer.id_to_token(traits.eos_ids[0]) if traits.eos_ids else None,
        "chat_template": traits.chat_template,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    kept = {key: value for key, value in settings.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
