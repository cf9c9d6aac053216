"""Tiny quantized checkpoints, packed by plain loops over single values: what the readers are tested on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.weights.safetensors import write_safetensors

MODULE = "model.layers.0.mlp.up_proj"
NIBBLE_OF_COLUMN = {0: 0, 2: 1, 4: 2, 6: 3, 1: 4, 3: 5, 5: 6, 7: 7}  # AWQ: column of eight -> place in the word


@dataclass(frozen=True)
class Matrix:
    """What is stored: codes [N][K] and zeros [N][G] from 0, scales [N][G], the group of each column."""

    bits: int
    codes: list[list[int]]
    zeros: list[list[int]]
    scales: NDArray[np.float16]
    groups: list[int]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), len(self.groups)

    def values(self) -> list[list[float]]:
        """scale * (code - zero), one value after the other. Exact: 11 bits times 9."""
        return [
            [float(self.scales[n, g]) * (code - self.zeros[n][g]) for code, g in zip(row, self.groups, strict=True)]
            for n, row in enumerate(self.codes)
        ]


def random_matrix(seed: int, bits: int, rows: int, columns: int, group_size: int, *, shuffled: bool = False) -> Matrix:
    rng = np.random.RandomState(seed)
    count = columns // group_size
    groups = [k // group_size for k in range(columns)]
    if shuffled:
        groups = [groups[i] for i in rng.permutation(columns)]
    codes, zeros = (rng.randint(0, 1 << bits, size).tolist() for size in ((rows, columns), (rows, count)))
    return Matrix(bits, codes, zeros, rng.uniform(-2, 2, (rows, count)).astype(np.float16), groups)


def _word(values: list[int], bits: int) -> int:
    """Values into a signed 32-bit word, the first in the lowest bits."""
    word = sum(value << (bits * place) for place, value in enumerate(values))
    return word - (1 << 32) if word >= 1 << 31 else word


def _pack_rows(rows: list[list[int]], bits: int) -> NDArray[np.int32]:
    each = 32 // bits
    padded = [row + [0] * (-len(row) % each) for row in rows]
    return np.array([[_word(row[i : i + each], bits) for i in range(0, len(row), each)] for row in padded], np.int32)


def _columns(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows, strict=True)]


def gptq_tensors(m: Matrix, *, shift: int, with_index: bool) -> dict[str, NDArray[Any]]:
    mask = (1 << m.bits) - 1
    zeros = [[(zero - shift) & mask for zero in row] for row in _columns(m.zeros)]
    tensors: dict[str, NDArray[Any]] = {
        "qweight": np.ascontiguousarray(_pack_rows(m.codes, m.bits).T),  # eight codes of one column of K in a word
        "qzeros": _pack_rows(zeros, m.bits),
        "scales": np.ascontiguousarray(m.scales.T),
    }
    return tensors | ({"g_idx": np.array(m.groups, np.int32)} if with_index else {})


def _awq_words(rows: list[list[int]]) -> NDArray[np.int32]:
    out = []
    for row in rows:
        words = []
        for start in range(0, len(row), 8):
            places = [0] * 8
            for column, place in NIBBLE_OF_COLUMN.items():
                places[place] = row[start + column]
            words.append(_word(places, 4))
        out.append(words)
    return np.array(out, np.int32)


def awq_tensors(m: Matrix) -> dict[str, NDArray[Any]]:
    return {
        "qweight": _awq_words(_columns(m.codes)),
        "qzeros": _awq_words(_columns(m.zeros)),
        "scales": np.ascontiguousarray(m.scales.T),
    }


def packed_tensors(m: Matrix, *, symmetric: bool, with_index: bool = False) -> dict[str, NDArray[Any]]:
    tensors: dict[str, NDArray[Any]] = {
        "weight_packed": _pack_rows(m.codes, m.bits),
        "weight_scale": m.scales,
        "weight_shape": np.array(m.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(_pack_rows(_columns(m.zeros), m.bits).T)
    return tensors | ({"weight_g_idx": np.array(m.groups, np.int32)} if with_index else {})


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def write_folder(folder: Path, tensors: dict[str, NDArray[Any]], quantization: dict[str, Any]) -> Path:
    """A folder that holds one quantized module."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "llama", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", {f"{MODULE}.{name}": value for name, value in tensors.items()})
    return folder
