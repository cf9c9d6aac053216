"""Loud channels of int8 activations, made quieter when a model is loaded: SmoothQuant without a step of its own.

    (x / s) (W s)^T = x W^T        s = max(1, rms x / its median)^(1/2), to the nearest power of two

Some channels of a hidden state are tens of times louder than the rest; in a group with one of them, the others keep
few of their 8 bits. A short text runs through the packed model; where a norm feeds 8-bit matrices it takes 1 / s, and
before a down projection the rows of the up projection do; then these matrices are packed again in their place, from the
same file. Rows of a tied embedding get s taken out where they are looked up. Source: Xiao et al., "SmoothQuant", 2023.

Codes that a format keeps as they are stored stay so: nothing here touches 4-bit matrices or quantized checkpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends import native_lib as lib
from octavo.backends.native_records import Lowered, MatrixSpec, NativeOp, VectorSpec, WeightSpec

__all__ = ["MOST_TOKENS", "Factors", "Place", "factors_of", "places"]

Floats = NDArray[np.float32]
FORMATS = ("w8g64", "w8pc")
MOST_TOKENS = 128  # of the text
_LOGIT_ROWS = 32  # of them that reach the output matrix
_LOUDEST = 256.0
_GATED = (lib.EPI_SILU_MUL, lib.EPI_GELU_MUL)


@dataclass(frozen=True)
class Place:
    """Matrices that multiply one value, and what takes 1 / s: their norm, or the second half (the rows) of a pair."""

    value: int
    matrices: tuple[MatrixSpec, ...]
    norm: VectorSpec | None = None
    eps: float = 0.0
    pair: MatrixSpec | None = None


@dataclass(frozen=True)
class Factors:
    """Of matrices by column [K] and by row of the last half [N], of norms [K]."""

    columns: dict[MatrixSpec, Floats] = field(default_factory=dict)
    rows: dict[MatrixSpec, Floats] = field(default_factory=dict)
    norms: dict[VectorSpec, Floats] = field(default_factory=dict)


def places(lowered: Lowered, packable: Callable[[MatrixSpec], bool]) -> list[Place]:
    """Where factors can move, of a program that keeps every value; `packable`: can be packed again from its file."""
    readers: dict[WeightSpec, list[NativeOp]] = {}
    for op in lowered.ops:
        for spec in (*op.weights.values(), *op.extra):
            readers.setdefault(spec, []).append(op)
    reads = Counter(value for op in lowered.ops for value in op.inputs.values())
    makers = {value: op for op in lowered.ops for value in op.outputs}

    def ours(spec: WeightSpec | None) -> bool:
        fits = isinstance(spec, MatrixSpec) and spec.format in FORMATS and packable(spec)
        return fits and spec is not None and sum(op.code != lib.EMBED for op in readers[spec]) == 1

    found = []
    for op in lowered.ops:
        if op.code != lib.LINEAR:
            continue
        matrices = tuple(spec for at in range(op.i[1]) if isinstance(spec := op.weights[at], MatrixSpec))
        norm, maker = op.weights.get(8), makers.get(op.inputs[0])
        if not all(map(ours, matrices)):
            continue
        if isinstance(norm, VectorSpec):
            if readers[norm] == [op]:
                found.append(Place(op.inputs[0], matrices, norm, op.f[0]))
        elif maker is not None and maker.code == lib.LINEAR and maker.i[0] in _GATED and 4 not in maker.weights:
            pair = maker.weights[0]
            if isinstance(pair, MatrixSpec) and ours(pair) and reads[op.inputs[0]] == 1:
                found.append(Place(op.inputs[0], matrices, pair=pair))
    return found


def factors_of(
    found: Sequence[Place], value_of: Callable[[int], Floats], norms: Mapping[VectorSpec, Floats]
) -> Factors:
    """The factors, from what the model computed: values [T, K] by number, before their norm."""
    factors = Factors()
    for place in found:
        x = value_of(place.value)
        if place.norm is not None:
            x = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + np.float32(place.eps)) * norms[place.norm]
        s = loudness(x)
        factors.columns.update(dict.fromkeys(place.matrices, s))
        if place.norm is not None:
            factors.norms[place.norm] = (norms[place.norm] / s).astype(np.float32)
        if place.pair is not None:
            factors.rows[place.pair] = (1 / s).astype(np.float32)
    return factors


def loudness(x: Floats) -> Floats:
    """s [K] of inputs [T, K]."""
    size = np.sqrt(np.square(x).mean(axis=0))
    loud = np.clip(size / max(float(np.median(size)), 1e-30), 1, _LOUDEST)
    return np.exp2(np.rint(np.log2(loud) / 2)).astype(np.float32)


def smooth(model: Any, read: Callable[[str], Any], in_file: Callable[[str], Any], sample: Sequence[int]) -> None:
    """Do so for a `NativeModel` that has its weights: token ids of a text run through it."""
    lowered = model.lower(keep=True)

    def stored(spec: MatrixSpec) -> list[Any]:
        return [in_file(name) for name in (spec.name, spec.up) if name]

    found = places(lowered, lambda spec: all(half is not None for half in stored(spec)))
    if not found:
        return
    ids = list(sample[:MOST_TOKENS])
    program, pool = model.run_once(lowered, ids, range(0, len(ids), -(-len(ids) // _LOGIT_ROWS)))
    norms = {place.norm: np.asarray(read(place.norm.name), np.float32) for place in found if place.norm is not None}
    factors = factors_of(found, program.values, norms)
    del program, pool
    for spec in dict.fromkeys((*factors.columns, *factors.rows)):
        model.pack_scaled(spec, stored(spec), factors.columns.get(spec), factors.rows.get(spec))
    for norm, values in factors.norms.items():
        model.set_vector(norm, values)
