"""The peers' files of our models. Runs in their export venv (torch, transformers, gguf), with nothing of ours.

    peer_models.py hf SMOLLM2.gguf DIR            SmolLM2's weights and tokenizer as a Hugging Face folder
    peer_models.py shape SHAPE_DIR HF_DIR DIR     a folder of shapes.py with the tokenizer of HF_DIR, for the exporter
    peer_models.py gguf SHAPE_DIR SMOLLM2.gguf OUT.gguf     the same weights as a BF16 GGUF with SmolLM2's tokenizer

The weights of shapes are random: rows of queries and keys stay in the order of the folder, whatever llama.cpp makes of
it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}


def to_hf(source: Path, folder: Path) -> None:
    """A GGUF file as bf16 safetensors, configuration and tokenizer."""
    import torch
    from tokenizers.decoders import ByteLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    # what goes by the architecture alone makes a Code Llama tokenizer of it, to which " hello" is four tokens
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.backend_tokenizer.decoder = ByteLevel()
    tokenizer.backend_tokenizer.model.byte_fallback = False
    options: dict[str, Any] = {"gguf_file": source.name, "dtype": torch.bfloat16}
    try:
        from transformers import GgufConfig

        options["quantization_config"] = GgufConfig(dequantize=True)
    except ImportError:
        pass  # an older version, which always dequantizes
    model = AutoModelForCausalLM.from_pretrained(source.parent, **options)
    for name in ("quantization_config", "_pre_quantization_dtype"):  # of the file that it came from; else not saved
        if hasattr(model.config, name):
            delattr(model.config, name)
    model.hf_quantizer, model.is_quantized = None, False
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def to_shape(shape: Path, tokenizer: Path, folder: Path) -> None:
    """Links to the weights, beside a tokenizer that the exporter knows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).exists():
            os.symlink((shape / name).resolve(), folder / name)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, folder)


def to_gguf(shape: Path, tokenizer: Path, out: Path) -> None:
    """Configuration, tokenizer and weights of a shape."""
    import gguf

    config = json.loads((shape / "config.json").read_text())
    kind = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(out, kind)
    _write_config(writer, config)
    _write_tokenizer(writer, gguf.GGUFReader(tokenizer), config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], config["num_hidden_layers"])
    with open(shape / "model.safetensors", "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        raw = np.fromfile(shape / "model.safetensors", np.uint8, last - first, offset=8 + size + first)
        known = names.get_name(name, try_suffixes=(".weight",))
        if len(entry["shape"]) == 1:
            writer.add_tensor(known, (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
        else:
            rows = raw.reshape(entry["shape"][0], -1)
            writer.add_tensor(known, rows, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _write_tokenizer(writer: Any, reader: Any, vocab_size: int) -> None:
    """The vocabulary, filled up with tokens that no text has."""

    def found(key: str, otherwise: Any = None) -> Any:
        field = reader.fields.get(f"tokenizer.ggml.{key}")
        return otherwise if field is None else field.contents()

    tokens, types = list(found("tokens")), list(found("token_type"))
    unused = 5  # the type of a token that is not used
    types += [unused] * (vocab_size - len(tokens))
    tokens += [f"<unused {at}>" for at in range(len(tokens), vocab_size)]
    writer.add_tokenizer_model(found("model"))
    writer.add_tokenizer_pre(found("pre", "default"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(found("merges"))
    writer.add_bos_token_id(found("bos_token_id", 1))
    writer.add_eos_token_id(found("eos_token_id", 2))
    writer.add_add_bos_token(False)


def main() -> None:
    """As the first argument says."""
    what, *given = sys.argv[1:]
    {"hf": to_hf, "shape": to_shape, "gguf": to_gguf}[what](*map(Path, given))


if __name__ == "__main__":
    main()
