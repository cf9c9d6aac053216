"""The whole of `octavo quantize`: one pass over the model, matrix by matrix, from a source to a folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.capture import Program, capture
from octavo.core.errors import InvalidInput
from octavo.models.config import ModelConfig
from octavo.models.decoder import Decoder
from octavo.models.registry import build_model
from octavo.weights.quant.gptq import feedback_of, gptq, hessian_of
from octavo.weights.quant.integer import IntegerWeight
from octavo.weights.quant.outputs import Spec, TensorFile, copy_companions, parts_of, plan_parts, write_config
from octavo.weights.quant.rounding import quantize_matrix
from octavo.weights.quant.scaling import awq_scales, even_scales, smooth_scales
from octavo.weights.quant.tapping import LazyWeights, SharedInput, hidden_states, shared_inputs
from octavo.weights.quant.targets import METHODS, Target
from octavo.weights.safetensors import SINGLE_NAME

__all__ = ["MatrixReport", "Plan", "QuantizeJob", "Source"]

Floats = NDArray[np.float32]
Source = Any  # what open_weights gives
Tick = Callable[[str], None]
_MOST_EXPERTS = 16  # matrices that the search for factors of a mixture looks at


@dataclass(frozen=True)
class Plan:
    """What to make of a model. `alpha` is SmoothQuant's: how much of the difficulty moves into the weights."""

    target: Target
    method: str = "rtn"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidInput("method", self.method, f"known methods: {', '.join(METHODS)}")
        if not (isinstance(self.alpha, float) and 0 < self.alpha < 1):
            raise InvalidInput("alpha", self.alpha, "give a number between 0 and 1")

    @property
    def scales(self) -> bool:
        """Whether factors move between activations and weights."""
        return self.method in ("awq", "smoothquant")

    @property
    def needs_inputs(self) -> bool:
        """Whether a calibration text has to be run."""
        return self.method != "rtn"


@dataclass(frozen=True)
class MatrixReport:
    """One matrix: relative error |W - W'| / |W| (Frobenius) and, where inputs were seen, of its outputs."""

    name: str
    weight_error: float
    output_error: float | None
    bytes_before: int
    bytes_after: int


@dataclass
class QuantizeJob:
    """A source becomes a folder. `run` does it once; `reports` says how each matrix fared."""

    source: Source
    plan: Plan
    folder: Path
    tick: Tick = lambda name: None
    reports: list[MatrixReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model: Decoder = build_model(ModelConfig.from_dict(self.source.config))
        self.shapes = self.model.weight_shapes()
        self.program: Program = capture(self.model.forward, self.shapes)
        self.inputs = shared_inputs(self.program)
        self.names = tuple(name for shared in self.inputs for name in shared.names)
        self._shared = {name: shared for shared in self.inputs for name in shared.names}
        self._effective: dict[str, Floats] = {}  # what the rest of the pass multiplies by, until it is asked for
        self._held: dict[str, IntegerWeight] = {}  # rows that another matrix's factors may still change
        self._kept: dict[str, Floats] = {}  # norms and routers with factors folded in
        self._factors: dict[SharedInput, Floats] = {}  # of inputs whose matrices come one at a time
        self._plain = {shared.plain: shared for shared in self.inputs if shared.plain}
        self._waiting = {shared.rows for shared in self.inputs if shared.rows and self.plan.scales}

    # ---- the pass

    def run(self, calibration: Sequence[Sequence[int]]) -> None:
        """Quantize and write. `calibration`: token sequences, for methods that look at inputs.

        Raises InvalidInput when the folder holds something, or a method lacks its text.
        """
        if self.folder.exists() and any(self.folder.iterdir()):
            raise InvalidInput("out", str(self.folder), "is not empty: name a new folder")
        if self.plan.needs_inputs and not any(calibration):
            raise InvalidInput("calibration", "no tokens", f"method {self.plan.method} needs a text")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = TensorFile(self.folder / SINGLE_NAME, self._specs())
        try:
            if self.plan.needs_inputs:
                weights = LazyWeights(self.shapes, self._read)
                hidden_states(self.model, self.program, calibration, weights, self._hook)
            self._rest()
            self.file.finish()
        finally:
            self.file.close()
        ignored = ["lm_head"] + (["re:.*mlp[.]gate$"] if self.model.config.num_experts else [])
        write_config(self.folder, self.source.config, self.plan.target, self.plan.method, ignored)

    def companions(self, path: Path) -> None:
        """The tokenizer and what else lies beside the weights of the model at `path`."""
        copy_companions(path, self.folder, self.source.metadata)

    @property
    def bytes_before(self) -> int:
        """Bytes of the source's tensors."""
        return sum(self.source.stored_bytes(name) for name in self.shapes)

    def _specs(self) -> dict[str, Spec]:
        specs: dict[str, Spec] = {}
        for name, shape in self.shapes.items():
            if name in self._shared:
                specs |= plan_parts(name, shape, self.plan.target)
            else:
                specs[name] = (self._plain_type(name), tuple(shape))
        return specs

    def _plain_type(self, name: str) -> str:
        """How a tensor that stays is stored: as before, or bfloat16 (matrices) where it was quantized."""
        stored: str = self.source.info(name).dtype
        if len(self.shapes[name]) == 1 or (name in self._plain and self.plan.scales):
            return "F32"
        return stored if stored in ("F32", "F16", "BF16") else "BF16"

    def _read(self, name: str) -> Floats:
        values: Floats = self.model.prepare(name, self.source.read(name))
        return values

    def _hook(self, name: str, x: Floats) -> tuple[Floats, Floats]:
        if name in self._plain and self.plan.scales:
            self._scale_experts(self._plain[name], x)
        if name not in self._shared:
            return x, self._read(name)
        if name not in self._effective:
            shared = self._shared[name]
            self._quantize(shared, (name,) if shared.plain else shared.names, x)
        return x, self._effective.pop(name)

    def _rest(self) -> None:
        """What no token reached (all of it for round to nearest), what was held back, and the plain tensors."""
        done = {report.name for report in self.reports}
        for name in self.names:
            if name not in done:
                factors = self._factors.get(self._shared[name], np.float32(1))
                weight = quantize_matrix(self._read(name) * factors, self.plan.target)
                self._effective[name] = weight.dequantize() / factors
                self._finish(name, self._read(name), weight, None)
                del self._effective[name]
        for name, weight in self._held.items():
            self._emit(name, weight)
        for name in self.shapes:
            if name not in self._shared:
                self.file.write(name, self._kept.get(name, self.source.read(name)))
                self.tick(name)

    # ---- matrices

    def _quantize(self, shared: SharedInput, names: Sequence[str], x: Floats) -> None:
        matrices = {name: self._read(name) for name in names}
        scales = self._factors.get(shared)
        if scales is None:
            scales = self._scales(shared, x, list(matrices.values()))
        feedback = feedback_of(hessian_of(x)) if self.plan.method == "gptq" else None
        for name, matrix in matrices.items():
            if feedback is not None:
                weight = gptq(matrix, feedback, self.plan.target)
            else:
                weights = None if self.plan.method != "awq" else np.square(x / scales).mean(axis=0)
                weight = quantize_matrix(matrix * scales, self.plan.target, weights=weights)
            self._effective[name] = weight.dequantize() / scales
            self._finish(name, matrix, weight, x)
        if shared.norm and not shared.plain:
            self._fold_norm(shared.norm, scales)
        if shared.rows in self._held:
            self._fold_rows(shared, scales)

    def _scales(self, shared: SharedInput, x: Floats, matrices: list[Floats]) -> Floats:
        """The factor of each channel; ones where nothing can absorb them."""
        absorbed = shared.norm or shared.rows in self._held
        if self.plan.method == "awq" and absorbed:
            return awq_scales(x, matrices, self.plan.target, shared.tied)
        if self.plan.method == "smoothquant" and absorbed:
            return even_scales(smooth_scales(x, matrices, self.plan.alpha, shared.tied))
        return np.ones(x.shape[1], np.float32)

    def _scale_experts(self, shared: SharedInput, x: Floats) -> None:
        """The factors that all experts of a layer share, before the first of them sees its rows."""
        some = shared.names[:: -(-len(shared.names) // _MOST_EXPERTS)]
        scales = self._scales(shared, x, [self._read(name) for name in some])
        self._factors[shared] = scales
        self._fold_norm(shared.norm, scales)
        self._kept[shared.plain] = self.source.read(shared.plain) * scales

    def _fold_norm(self, name: str, scales: Floats) -> None:
        self._kept[name] = self._read(name) / scales - np.float32(self.model.config.norm_offset)

    def _fold_rows(self, shared: SharedInput, scales: Floats) -> None:
        held = self._held.pop(shared.rows)
        scaled = held.scales / shared.fold(scales)[:, None]
        self._emit(shared.rows, IntegerWeight(held.bits, held.codes, scaled, held.zeros, held.groups))

    def _finish(self, name: str, matrix: Floats, weight: IntegerWeight, x: Floats | None) -> None:
        effective = self._effective.get(name)
        error = (weight.dequantize() if effective is None else effective) - matrix
        specs = plan_parts(name, matrix.shape, self.plan.target).values()
        report = MatrixReport(
            name=name,
            weight_error=_relative(error, matrix),
            output_error=None if x is None else _relative(x @ error.T, x @ matrix.T),
            bytes_before=self.source.stored_bytes(name),
            bytes_after=sum(math.prod(shape) * _SIZES[kind] for kind, shape in specs),
        )
        self.reports.append(report)
        if name in self._waiting and x is not None:
            self._held[name] = weight
        else:
            self._emit(name, weight)
        self.tick(name)

    def _emit(self, name: str, weight: IntegerWeight) -> None:
        for part, values in parts_of(name, weight, self.plan.target).items():
            self.file.write(part, values)


_SIZES = {"I8": 1, "F16": 2, "I32": 4, "F32": 4, "I64": 8}


def _relative(error: Floats, of: Floats) -> float:
    size = float(np.linalg.norm(of))
    return float(np.linalg.norm(error)) / size if size else 0.0
