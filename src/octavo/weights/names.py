"""From GGUF's tensor names and layouts to the Hugging Face ones, as data, and `open_weights`.

Three layouts differ, and the loader presents the Hugging Face one of each:
- `llama`: GGUF stores the rows of q and k so that rope rotates neighbours; HF rotates halves. Rows are put back.
- `gemma3`: GGUF's norm weights hold `1 + w`; HF stores `w` and the model adds the one. It is subtracted.
- `qwen3moe`: GGUF stacks experts, `[experts, out, in]`; HF has one tensor for each expert.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.native_codes import PACKED_TYPES
from octavo.core.errors import InvalidInput
from octavo.weights.gguf import GgufFile
from octavo.weights.quant.integer import GroupCodes
from octavo.weights.safetensors import SafetensorsFile, ShardedSafetensors, open_safetensors
from octavo.weights.tensors import CorruptFile, FileRows, TensorInfo, WeightFile

__all__ = ["ARCHITECTURES", "FolderWeights", "GgufWeights", "open_weights", "undo_rope_permutation"]

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_DENSE = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORM = {"ffn_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
# Tables that the configuration carries (`gguf_config.py`), not weights of a layer.
_IGNORED = frozenset({"rope_freqs.weight"})
_MAX_EXPERTS = 4096


@dataclass(frozen=True)
class Architecture:
    """How one GGUF architecture maps. `layer` maps the middle of `blk.N.<middle>.weight`."""

    layer: dict[str, str]
    experts: dict[str, str]
    permuted: frozenset[str] = frozenset()  # middles whose rows are reordered for interleaved rope
    norm_offset: float = 0.0  # what GGUF has added to every norm weight


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_ATTENTION | _DENSE | _POST_NORM, {}, permuted=frozenset({"attn_q", "attn_k"})),
    "qwen2": Architecture(_ATTENTION | _DENSE | _POST_NORM, {}),
    "qwen3": Architecture(_ATTENTION | _DENSE | _POST_NORM | _QK_NORM, {}),
    "qwen3moe": Architecture(_ATTENTION | _POST_NORM | _QK_NORM | {"ffn_gate_inp": "mlp.gate"}, _EXPERTS),
    "gemma3": Architecture(_ATTENTION | _DENSE | _SANDWICH_NORMS | _QK_NORM, {}, norm_offset=1.0),
}


@dataclass(frozen=True)
class _Origin:
    """Where a weight lies in the file: all of tensor `name`, or one of `share` equal slices; heads to put back."""

    name: str
    share: int = 1
    heads: int = 0
    index: int = 0  # of the slice


_MODEL = "model."
_LAYER_NAME = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)")
Values = NDArray[np.float32]


def undo_rope_permutation(rows: Values, num_heads: int) -> Values:
    """`[heads * D, ...]` with pairs side by side to `[heads * D, ...]` with halves apart.

    In a head of D rows, row `2i + j` becomes row `j * D/2 + i` (i < D/2, j < 2).
    """
    paired = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


class GgufWeights(WeightFile):
    """A GGUF file under Hugging Face names and layouts. `config` has HF-style keys, `metadata` is the file's own."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        from octavo.weights.gguf_config import gguf_config

        self._file = GgufFile(path)
        try:
            self.metadata = self._file.metadata
            rows = self._file._infos.get("token_embd.weight")
            freqs = self._file.read("rope_freqs.weight") if "rope_freqs.weight" in self._file._infos else None
            self.config = gguf_config(self.metadata, self._file.names(), rows.shape[0] if rows else None, freqs)
            self._readers: dict[str, Callable[[], Values]] = {}
            self._sources: dict[str, _Origin] = {}
            self._map_all(Path(path), ARCHITECTURES[self.metadata["general.architecture"]])
        except BaseException:
            self._file.close()
            raise

    def _map_all(self, path: Path, arch: Architecture) -> None:
        for name in self._file.names():
            if name in _IGNORED:
                continue
            layer = _LAYER_NAME.fullmatch(name)
            if layer and layer[2] in arch.experts and layer[3] == "weight":
                self._map_experts(path, name, f"model.layers.{layer[1]}.mlp.experts", arch.experts[layer[2]])
            elif layer and layer[2] in arch.layer:
                self._map_layer(name, layer, arch)
            elif name in _TOP:
                offset = arch.norm_offset if name == "output_norm.weight" else 0.0
                self._add(_TOP[name], self._file.info(name), self._plain(name, offset))
            else:
                architecture = self.metadata["general.architecture"]
                raise CorruptFile(path, "tensor name", name, f"architecture {architecture!r} has no such tensor")

    def _map_layer(self, name: str, layer: re.Match[str], arch: Architecture) -> None:
        number, middle, ending = layer.groups()
        offset = arch.norm_offset if middle.endswith("norm") else 0.0
        reader, heads = self._plain(name, offset), 0
        if middle in arch.permuted:
            which = "num_attention_heads" if middle == "attn_q" else "num_key_value_heads"
            reader, heads = self._unpermuted(name, self.config[which]), self.config[which]
        full_name = f"model.layers.{number}.{arch.layer[middle]}.{ending}"
        self._add(full_name, self._file.info(name), reader)
        self._sources[full_name] = _Origin(name, heads=heads)

    def _map_experts(self, path: Path, name: str, prefix: str, projection: str) -> None:
        info = self._file.info(name)
        if len(info.shape) != 3 or info.shape[0] > _MAX_EXPERTS:
            raise CorruptFile(path, f"tensor {name!r}: shape", info.shape, "must be [experts, out, in]")
        each = TensorInfo(name, info.shape[1:], info.dtype)
        for expert in range(info.shape[0]):
            self._add(f"{prefix}.{expert}.{projection}.weight", each, self._slice(name, expert))
            self._sources[f"{prefix}.{expert}.{projection}.weight"] = _Origin(name, info.shape[0], index=expert)

    def _add(self, name: str, stored: TensorInfo, reader: Callable[[], Values]) -> None:
        self._infos[name] = TensorInfo(name, stored.shape, stored.dtype)
        self._readers[name] = reader
        self._sources[name] = _Origin(stored.name)

    def _plain(self, name: str, offset: float) -> Callable[[], Values]:
        def read() -> Values:
            values = self._file.read(name)
            if offset:
                values -= np.float32(offset)
            return values

        return read

    def _unpermuted(self, name: str, num_heads: int) -> Callable[[], Values]:
        rows = self._file.info(name).shape[0]
        if rows % (2 * num_heads):
            raise InvalidInput(f"tensor {name!r}: rows", rows, f"must be {num_heads} heads of an even size")
        return lambda: undo_rope_permutation(self._file.read(name), num_heads)

    def _slice(self, name: str, expert: int) -> Callable[[], Values]:
        return lambda: self._file.read_slice(name, expert)

    def read(self, name: str) -> Values:
        """The values as a new float32 array of `info(name).shape`, in the Hugging Face layout."""
        self.info(name)
        return self._readers[name]()

    def codes(self, name: str) -> GroupCodes | None:
        """Codes, scales and offsets of a matrix that give its values (Q4_0, Q4_1, Q8_0), or None."""
        from octavo.weights.quant.gguf_codes import gguf_codes

        info, heads = self.info(name), self._sources[name].heads
        found = gguf_codes(self._raw(name), info) if len(info.shape) == 2 else None
        return found.reordered(lambda rows: undo_rope_permutation(rows, heads)) if found and heads else found

    def in_file(self, name: str) -> FileRows | None:
        """A matrix as it lies in the file; None for a type that native packing does not read."""
        info, origin = self.info(name), self._sources[name]
        number = self._file.type_number(origin.name)
        if len(info.shape) != 2 or number not in PACKED_TYPES:
            return None
        return FileRows(info.shape, number, self._raw(name), origin.heads)

    def _raw(self, name: str) -> NDArray[np.uint8]:
        origin = self._sources[name]
        return self._file.raw_slice(origin.name, origin.index) if origin.share > 1 else self._file.raw(origin.name)

    def own_format(self) -> str:
        """The native format of a quantized checkpoint; "": types differ from tensor to tensor."""
        return ""

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in the file."""
        self.info(name)
        origin = self._sources[name]
        return self._file.stored_bytes(origin.name) // origin.share

    def close(self) -> None:
        """Unmap the file."""
        self._file.close()


class FolderWeights(WeightFile):
    """A Hugging Face folder: `config.json` beside safetensors. `metadata` is None: there is no GGUF.

    A model that was stored without its head, as embedding models are, has names without `model.`: they get it here.
    """

    metadata: Any

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        from octavo.weights.config import load_config_dict

        self.config = load_config_dict(folder)
        self._files: SafetensorsFile | ShardedSafetensors = open_safetensors(folder)
        self._infos, self._prefix = self._files._infos, ""
        headless = "embed_tokens.weight" in self._infos and "lm_head.weight" not in self._infos
        if headless and self.config.get("quantization_config") is None:
            self._prefix = _MODEL
            self._infos = {_MODEL + name: replace(info, name=_MODEL + name) for name, info in self._infos.items()}
            self.config["tie_word_embeddings"] = True  # whatever it says: there is no other head
        self.metadata = None

    def _stored(self, name: str) -> str:
        """The name in the file."""
        self.info(name)
        return name.removeprefix(self._prefix)

    def read(self, name: str) -> Values:
        """The values as a new float32 array of `info(name).shape`."""
        return self._files.read(self._stored(name))

    def codes(self, name: str) -> GroupCodes | None:
        """Codes of a quantized matrix; here there is none."""
        self.info(name)
        return None

    def in_file(self, name: str) -> FileRows | None:
        """A matrix as it lies in its file; None for a type that native packing does not read."""
        return self._files.in_file(self._stored(name))

    def own_format(self) -> str:
        """The native format of a quantized checkpoint; "": this one is not."""
        return ""

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in its file."""
        return self._files.stored_bytes(self._stored(name))

    def close(self) -> None:
        """Unmap every file."""
        self._files.close()


def _open_folder(folder: Path) -> FolderWeights:
    source = FolderWeights(folder)
    if source.config.get("quantization_config") is None:
        return source
    source.close()
    from octavo.weights.quant.folder import QuantizedFolder

    return QuantizedFolder(folder)


def open_weights(path: str | os.PathLike[str]) -> GgufWeights | FolderWeights:
    """A `.gguf` file or a Hugging Face folder, plain or quantized, under HF tensor names.

    The source also has `config` (HF-style keys, for `ModelConfig.from_dict`) and `metadata` (the GGUF key-values, or
    None for a folder). `InvalidInput` when there is no such model or it is of a kind we do not read.
    """
    place = Path(path)
    if place.is_dir():
        return _open_folder(place)
    if place.suffix != ".gguf":
        raise InvalidInput("model path", str(path), "give a folder with config.json and safetensors, or a .gguf file")
    return GgufWeights(place)
