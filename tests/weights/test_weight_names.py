"""GGUF files appear under Hugging Face names, layouts and configuration keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weight_files import ARRAY, STRING, field, gguf, tensors_f32, vocabulary

from octavo.core.errors import InvalidInput
from octavo.weights.config import gguf_config, load_config_dict
from octavo.weights.names import ARCHITECTURES, open_weights, undo_rope_permutation
from octavo.weights.safetensors import write_safetensors
from octavo.weights.tensors import CorruptFile, WeightSource

SIZES = {"embedding_length": 8, "block_count": 2, "attention.head_count": 2, "attention.head_count_kv": 1,
         "feed_forward_length": 12, "context_length": 64}  # fmt: skip
EXPERT_SIZES = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 6}
DENSE = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
ATTENTION = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
QK_NORM = ["self_attn.q_norm", "self_attn.k_norm"]
# What the reference implementation calls the parts of a layer, written down a second time.
LAYERS = {
    "llama": [*ATTENTION, "post_attention_layernorm", *DENSE],
    "qwen2": [*ATTENTION, "post_attention_layernorm", *DENSE],
    "qwen3": [*ATTENTION, *QK_NORM, "post_attention_layernorm", *DENSE],
    "gemma3": [*ATTENTION, *QK_NORM, "post_attention_layernorm", "pre_feedforward_layernorm",
               "post_feedforward_layernorm", *DENSE],
    "qwen3moe": [*ATTENTION, *QK_NORM, "post_attention_layernorm", "mlp.gate",
                 *(f"mlp.experts.{e}.{p}_proj" for e in range(3) for p in ("gate", "up", "down"))],
}  # fmt: skip


def metadata(arch: str, **extra: Any) -> dict[str, Any]:
    sizes = SIZES | (
        {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 6} if arch == "qwen3moe" else {}
    )
    return {"general.architecture": arch} | {f"{arch}.{key}": item for key, item in (sizes | extra).items()}


def gguf_tensors(arch: str) -> dict[str, np.ndarray]:
    """One tensor for every name that the architecture knows, with values all their own."""
    rng = np.random.default_rng(1)
    middles = [*ARCHITECTURES[arch].layer, *ARCHITECTURES[arch].experts]
    arrays = {"token_embd.weight": rng.normal(size=(3, 8)), "output_norm.weight": rng.normal(size=8) + 1}
    for layer in range(2):
        for middle in middles:
            shape = (8,) if middle.endswith("norm") else (3, 6, 8) if middle.endswith("exps") else (8, 8)
            arrays[f"blk.{layer}.{middle}.weight"] = rng.normal(size=shape)
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def write(path: Path, arch: str, arrays: dict[str, np.ndarray], **extra: Any) -> Path:
    fields = [field("general.architecture", STRING, arch)]
    fields += [field(key, 4, item) for key, item in metadata(arch, **extra).items() if isinstance(item, int)]
    fields += vocabulary(["a", "b", "c"], eos_token_id=(4, 2), bos_token_id=(4, 1))
    path.write_bytes(gguf(fields, *tensors_f32(arrays)))
    return path


@pytest.mark.parametrize("arch", LAYERS)
def test_every_tensor_gets_its_hugging_face_name(arch: str, tmp_path: Path) -> None:
    wanted = {f"model.layers.{n}.{part}.weight" for n in range(2) for part in LAYERS[arch]}
    with open_weights(write(tmp_path / "m.gguf", arch, gguf_tensors(arch))) as source:
        assert isinstance(source, WeightSource)
        assert set(source.names()) == wanted | {"model.embed_tokens.weight", "model.norm.weight"}
        for name in source.names():
            assert source.read(name).shape == source.info(name).shape
        assert source.config["model_type"] in ("llama", "qwen2", "qwen3", "gemma3_text", "qwen3_moe")
        assert source.config["tie_word_embeddings"] is True
        assert source.config["eos_token_id"] == [2]
        assert source.metadata["general.architecture"] == arch


@given(heads=st.integers(1, 4), half=st.integers(1, 5), width=st.integers(1, 3))
def test_rope_rows_return_to_halves(heads: int, half: int, width: int) -> None:
    """Rotating the neighbours of GGUF's rows is rotating the halves of ours: row by row."""
    rows = np.arange(heads * 2 * half * width, dtype=np.float32).reshape(-1, width)
    restored = undo_rope_permutation(rows, heads).reshape(heads, 2, half, width)
    paired = rows.reshape(heads, half, 2, width)
    for head in range(heads):
        for i in range(half):
            assert np.array_equal(restored[head, 0, i], paired[head, i, 0])
            assert np.array_equal(restored[head, 1, i], paired[head, i, 1])


def test_only_llama_has_its_q_and_k_reordered(tmp_path: Path) -> None:
    for arch in ("llama", "qwen3"):
        arrays = gguf_tensors(arch)
        with open_weights(write(tmp_path / f"{arch}.gguf", arch, arrays)) as source:
            for part, heads in (("q", 2), ("k", 1)):
                stored = arrays[f"blk.1.attn_{part}.weight"]
                wanted = undo_rope_permutation(stored, heads) if arch == "llama" else stored
                assert np.array_equal(source.read(f"model.layers.1.self_attn.{part}_proj.weight"), wanted)
            assert np.array_equal(source.read("model.layers.1.self_attn.v_proj.weight"), arrays["blk.1.attn_v.weight"])


def test_only_gemma_norms_lose_their_one(tmp_path: Path) -> None:
    for arch, offset in (("gemma3", 1), ("qwen3", 0)):
        arrays = gguf_tensors(arch)
        with open_weights(write(tmp_path / f"{arch}.gguf", arch, arrays)) as source:
            for name, stored in (
                ("model.norm.weight", "output_norm.weight"),
                ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
                ("model.layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight"),
            ):
                assert np.array_equal(source.read(name), arrays[stored] - np.float32(offset))
            assert np.array_equal(source.read("model.embed_tokens.weight"), arrays["token_embd.weight"])


def test_experts_are_slices_of_the_stack(tmp_path: Path) -> None:
    arrays = gguf_tensors("qwen3moe")
    with open_weights(write(tmp_path / "m.gguf", "qwen3moe", arrays)) as source:
        for expert in range(3):
            read = source.read(f"model.layers.1.mlp.experts.{expert}.down_proj.weight")
            assert np.array_equal(read, arrays["blk.1.ffn_down_exps.weight"][expert])
        assert source.config["num_experts"] == 3
        assert source.config["moe_intermediate_size"] == 6


def test_biases_and_an_untied_head_are_seen(tmp_path: Path) -> None:
    arrays = gguf_tensors("qwen2") | {"blk.0.attn_q.bias": np.arange(8, dtype=np.float32)}
    arrays["output.weight"] = np.ones((3, 8), np.float32)
    with open_weights(write(tmp_path / "m.gguf", "qwen2", arrays)) as source:
        assert source.read("model.layers.0.self_attn.q_proj.bias").tolist() == list(range(8))
        assert (source.config["tie_word_embeddings"], source.config["attention_bias"]) == (False, True)
        assert source.read("lm_head.weight").sum() == 24


@pytest.mark.parametrize("name", ["blk.0.ssm_in.weight", "blk.00.attn_q.weight", "v.patch_embd.weight", "blk.0.attn_q"])
def test_a_tensor_that_the_architecture_lacks_is_refused(name: str, tmp_path: Path) -> None:
    arrays = gguf_tensors("llama") | {name: np.ones(8, np.float32)}
    with pytest.raises(CorruptFile, match=name):
        open_weights(write(tmp_path / "m.gguf", "llama", arrays))


def test_rows_that_are_no_heads_are_refused(tmp_path: Path) -> None:
    arrays = gguf_tensors("llama") | {"blk.0.attn_q.weight": np.ones((6, 8), np.float32)}
    with pytest.raises(InvalidInput, match="attn_q"):
        open_weights(write(tmp_path / "m.gguf", "llama", arrays))


def test_a_folder_is_read_under_its_own_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    write_safetensors(tmp_path / "model.safetensors", {"model.norm.weight": np.ones(4, np.float32)})
    with open_weights(tmp_path) as source:
        assert source.names() == ["model.norm.weight"]
        assert source.read("model.norm.weight").tolist() == [1, 1, 1, 1]
        assert source.metadata is None
        assert source.config == {"model_type": "llama", "eos_token_id": [2, 7]} == load_config_dict(tmp_path)
    with pytest.raises(InvalidInput, match="model path"):
        open_weights(tmp_path / "model.bin")


def test_a_model_stored_without_its_head_gets_the_usual_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "tie_word_embeddings": False}))
    arrays = {"embed_tokens.weight": np.eye(4, dtype=np.float32), "norm.weight": np.ones(4, np.float32)}
    write_safetensors(tmp_path / "model.safetensors", arrays)
    with open_weights(tmp_path) as source:
        assert source.names() == ["model.embed_tokens.weight", "model.norm.weight"]
        assert source.info("model.norm.weight").name == "model.norm.weight"
        assert source.read("model.embed_tokens.weight").tolist() == np.eye(4).tolist()
        rows = source.in_file("model.embed_tokens.weight")
        assert rows is not None and rows.shape == (4, 4) and source.stored_bytes("model.norm.weight") == 16
        assert source.config["tie_word_embeddings"] is True
        for read in (source.read, source.in_file, source.stored_bytes):
            with pytest.raises(InvalidInput, match="not among"):
                read("norm.weight")
    write_safetensors(tmp_path / "model.safetensors", {**arrays, "lm_head.weight": np.eye(4, dtype=np.float32)})
    with open_weights(tmp_path) as source:  # names of its own: nothing is made of them
        assert "embed_tokens.weight" in source.names() and source.config["tie_word_embeddings"] is False


def llama3_divisors(factor: float, theta: float, head_dim: int) -> list[float]:
    """The published rule, by wavelengths."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        smooth = (8192 / wavelength - 1) / 3
        middle = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if wavelength < 2048 else factor if wavelength > 8192 else middle)
    return divisors


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_a_table_of_divisors_becomes_llama3_rope(factor: float, tmp_path: Path) -> None:
    size = {"rope.dimension_count": 64, "attention.key_length": 64}
    divisors = np.array(llama3_divisors(factor, 5e5, 64), np.float32)
    meta = metadata("llama", **size) | {"llama.rope.freq_base": 5e5, "llama.vocab_size": 9}
    scaling = gguf_config(meta, [], None, divisors)["rope_scaling"]
    assert scaling == {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 8192}  # fmt: skip
    assert gguf_config(meta, [], None, np.ones(32))["rope_scaling"] is None
    for wrong in (divisors[:-1], divisors[::-1], divisors * 1.01):
        with pytest.raises(InvalidInput, match="rope_freqs"):
            gguf_config(meta, [], None, wrong)


def test_the_configuration_of_a_gemma() -> None:
    meta = metadata("gemma3", block_count=7, **{"attention.sliding_window": 32, "attention.key_length": 16})
    config = gguf_config(meta | {"tokenizer.ggml.tokens": ["a"] * 5}, ["output.weight"])
    assert config["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert (config["sliding_window"], config["head_dim"], config["query_pre_attn_scalar"]) == (32, 16, 16)
    assert (config["rope_theta"], config["rope_local_base_freq"], config["vocab_size"]) == (1e6, 1e4, 5)
    assert (config["hidden_activation"], config["tie_word_embeddings"]) == ("gelu_pytorch_tanh", False)


def test_the_rope_scaling_and_stop_tokens_of_metadata() -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    meta = metadata("qwen2", vocab_size=9, **yarn)
    ids = {"eos": 3, "eot": 4, "eom": 3}
    config = gguf_config(meta | {f"tokenizer.ggml.{key}_token_id": value for key, value in ids.items()}, [])
    assert config["rope_scaling"] == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert config["eos_token_id"] == [3, 4]
    assert config["bos_token_id"] is None
    linear = metadata("qwen2", vocab_size=9, **{"rope.scale_linear": 2.0})
    assert gguf_config(linear, [])["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("key", "item"),
    [
        ("embedding_length", None), ("embedding_length", 0), ("block_count", 4097), ("block_count", -1),
        ("block_count", True), ("attention.head_count", "2"), ("attention.head_count", [2, 1]),
        ("rope.freq_base", float("nan")), ("rope.freq_base", -1.0), ("rope.freq_base", "x"),
        ("attention.layer_norm_rms_epsilon", float("inf")), ("rope.scaling.type", "longrope"),
        ("rope.dimension_count", 2), ("attention.value_length", 8), ("context_length", 1.5),
    ],
)  # fmt: skip
def test_a_bad_key_is_named(key: str, item: Any) -> None:
    meta = metadata("llama", vocab_size=9) | {f"llama.{key}": item}
    with pytest.raises(InvalidInput, match=rf"llama\.{key}"):
        gguf_config(meta, [])


@pytest.mark.parametrize("arch", ["mamba", None, 7, ["llama"]])
def test_an_unknown_architecture_is_named(arch: Any) -> None:
    with pytest.raises(InvalidInput, match=r"general\.architecture.*supported are llama"):
        gguf_config({"general.architecture": arch}, [])


def test_a_value_for_each_layer_must_be_the_same(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    fields = [field("general.architecture", STRING, "llama")]
    fields += [field(f"llama.{k}", 4, v) for k, v in SIZES.items() if k != "attention.head_count_kv"]
    fields.append(field("llama.attention.head_count_kv", ARRAY, (5, [1, 1])))
    path.write_bytes(gguf([*fields, *vocabulary(["a", "b", "c"])], *tensors_f32(gguf_tensors("llama"))))
    with open_weights(path) as source:
        assert source.config["num_key_value_heads"] == 1
