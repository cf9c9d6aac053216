"""The real files of the store, as far as the readers go."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as oracle

from octavo.weights.gguf import GgufFile
from octavo.weights.names import open_weights
from octavo.weights.store import DEFAULT_MODEL, ModelStore

pytestmark = pytest.mark.weights
WANTED = {
    DEFAULT_MODEL: {"hidden_size": 576, "num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64,
                    "rope_theta": 1e5, "rms_norm_eps": 1e-5, "vocab_size": 49152, "eos_token_id": [2]},
    "gemma-3-270m": {"hidden_size": 640, "num_hidden_layers": 18, "num_key_value_heads": 1, "head_dim": 256,
                     "rope_theta": 1e6, "rms_norm_eps": 1e-6, "vocab_size": 262144, "sliding_window": 512},
}  # fmt: skip


@pytest.mark.parametrize("name", WANTED)
def test_configuration_and_shapes(name: str) -> None:
    with open_weights(ModelStore().resolve(name).path) as source:
        assert WANTED[name].items() <= source.config.items()
        assert len(source.metadata["tokenizer.ggml.tokens"]) == source.config["vocab_size"]
        hidden, layers = source.config["hidden_size"], source.config["num_hidden_layers"]
        assert source.info("model.embed_tokens.weight").shape == (source.config["vocab_size"], hidden)
        queries = source.config["num_attention_heads"] * source.config["head_dim"]
        assert source.read(f"model.layers.{layers - 1}.self_attn.q_proj.weight").shape == (queries, hidden)
        norm = source.read("model.norm.weight")
        assert norm.shape == (hidden,)
        assert np.isfinite(norm).all()


@pytest.mark.parametrize("name", WANTED)
def test_one_tensor_of_each_type_has_the_oracles_bits(name: str) -> None:
    with GgufFile(ModelStore().resolve(name).path) as file:
        first = {file.info(tensor).dtype: tensor for tensor in file.names() if tensor.startswith("blk.")}
        assert set(first) >= ({"F32", "Q4_1"} if name == DEFAULT_MODEL else {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"})
        for dtype, tensor in first.items():
            wanted = oracle(np.array(file.raw(tensor)), GGMLQuantizationType[dtype])
            assert np.array_equal(file.read(tensor).ravel(), wanted.ravel())
