"""A quantized checkpoint folder as a source of float32 weights, and of codes where it has such."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.backends.native_codes import keeps_codes
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model
from octavo.weights.names import FolderWeights
from octavo.weights.quant.integer import GroupCodes
from octavo.weights.quant.layouts import SUFFIXES, StoredMatrix, find_matrices
from octavo.weights.quant.settings import read_settings
from octavo.weights.quant.targets import own_format
from octavo.weights.tensors import CorruptFile, FileRows, TensorInfo

__all__ = ["QuantizedFolder"]

_STORED = ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL", "F8_E4M3", "F8_E5M2")  # never values as such


class QuantizedFolder(FolderWeights):
    """GPTQ, AWQ, compressed-tensors and FP8 folders under the names of the plain checkpoint.

    `config` lacks `quantization_config`, which was read. Raises InvalidInput for a setting that is not supported,
    `CorruptFile` for tensors that do not fit each other.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        try:
            self.settings = read_settings(self.config.pop("quantization_config"))
            self._matrices = find_matrices(Path(folder), self._infos, self._files, self.settings)
            self._infos = self._logical(Path(folder), dict(self._infos))
        except BaseException:
            self.close()
            raise

    def _logical(self, folder: Path, stored: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The plain checkpoint's tensors: parts of a matrix give way to the matrix."""
        infos: dict[str, TensorInfo] = {}
        for name, info in stored.items():
            module, _, last = name.rpartition(".")
            matrix = self._matrices.get(module)
            if matrix is not None and (last == "weight" or last in SUFFIXES):
                infos[f"{module}.weight"] = TensorInfo(f"{module}.weight", matrix.shape, matrix.label)
            elif last in SUFFIXES:
                continue  # scales of activations and of the cache
            elif info.dtype in _STORED:
                raise CorruptFile(folder, f"tensor {name!r}: dtype", info.dtype, "has no scales beside it")
            else:
                infos[name] = info
        return self._without_empty_biases(infos)

    def _without_empty_biases(self, infos: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
        """GPTQ writers give every module a bias, all zero where the model has none: those are left out."""
        extra = [f"{module}.bias" for module in self._matrices if f"{module}.bias" in infos]
        if extra:
            expected = build_model(ModelConfig.from_dict(self.config)).weight_shapes()
            extra = [name for name in extra if name not in expected and not self._files.read(name).any()]
        return {name: info for name, info in infos.items() if name not in extra}

    def _matrix(self, name: str) -> StoredMatrix | None:
        module, _, last = name.rpartition(".")
        return self._matrices.get(module) if last == "weight" else None

    def read(self, name: str) -> NDArray[np.float32]:
        """The values as a new float32 array of `info(name).shape`; quantized ones are exact, rounded once."""
        self.info(name)
        matrix = self._matrix(name)
        return self._files.read(name) if matrix is None else matrix.floats()

    def own_format(self) -> str:
        """The native format that keeps this checkpoint's codes, or ""."""
        kind = own_format(self.settings.schemes, self.config)
        first = self.codes(f"{next(iter(self._matrices))}.weight") if kind and self._matrices else None
        return kind if first is not None and keeps_codes(kind, first) else ""

    def codes(self, name: str) -> GroupCodes | None:
        """Codes, scales and offsets of a matrix that give its values, or None where it is not stored so."""
        self.info(name)
        matrix = self._matrix(name)
        if matrix is None or not matrix.is_integer:
            return None
        return matrix.integers().group_codes()

    def in_file(self, name: str) -> FileRows | None:
        """A plain matrix as it lies in its file; None for a quantized one, whose parts lie apart."""
        return super().in_file(name) if self._matrix(name) is None else None

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file, scales and zeros included."""
        matrix = self._matrix(name)
        if matrix is None:
            return super().stored_bytes(name)
        return sum(self._files.stored_bytes(f"{matrix.module}.{suffix}") for suffix in matrix.infos)
