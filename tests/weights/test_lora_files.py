"""PEFT folders: what is read, how it is scaled, and everything that is refused by its name."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.weights.lora import CONFIG_NAME, WEIGHTS_NAME, read_adapter
from octavo.weights.safetensors import SafetensorsFile, write_safetensors

PROJECTIONS = {
    f"model.layers.{layer}.{name}": shape
    for layer in range(2)
    for name, shape in (("self_attn.q_proj", (12, 8)), ("self_attn.v_proj", (4, 8)), ("mlp.down_proj", (8, 20)))
}
FIRST = "model.layers.0.self_attn.q_proj"


def tensors_of(folder: str) -> dict[str, np.ndarray]:
    with SafetensorsFile(Path(folder) / WEIGHTS_NAME) as file:
        return {name: file.read(name) for name in file.names()}


def change(folder: str, **config: object) -> str:
    """The folder with other values in its configuration."""
    path = Path(folder) / CONFIG_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def with_tensors(folder: str, tensors: dict[str, np.ndarray]) -> str:
    write_safetensors(Path(folder) / WEIGHTS_NAME, tensors)
    return folder


def test_factors_are_those_of_the_file(adapter_folder):
    folder = adapter_folder(PROJECTIONS, 1, rank=3, alpha=6)
    found, stored = read_adapter(folder, PROJECTIONS), tensors_of(folder)
    assert (set(found.factors), found.rank) == (set(PROJECTIONS), 3)
    for name, each in found.factors.items():
        assert np.array_equal(each.a, stored[f"base_model.model.{name}.lora_A.weight"])
        assert np.array_equal(each.b, stored[f"base_model.model.{name}.lora_B.weight"])
        assert each.scale == 2.0


def test_scales(adapter_folder):
    folder = adapter_folder(PROJECTIONS, 1, rank=4, alpha=6, alpha_pattern={"down_proj": 10, "0.self_attn.q_proj": 1})
    scales = {name: each.scale for name, each in read_adapter(folder, PROJECTIONS).factors.items()}
    assert scales[FIRST] == 1 / 4
    assert scales["model.layers.1.self_attn.q_proj"] == 6 / 4
    assert scales["model.layers.1.mlp.down_proj"] == 10 / 4
    change(folder, use_rslora=True)
    assert read_adapter(folder, PROJECTIONS).factors[FIRST].scale == 1 / math.sqrt(4)


def test_a_rank_of_its_own_for_a_module(adapter_folder):
    folder = adapter_folder(PROJECTIONS, 1, rank=4, rank_pattern={"q_proj": 2})
    tensors = tensors_of(folder)
    with pytest.raises(InvalidInput, match=r"q_proj.*shape"):
        read_adapter(folder, PROJECTIONS)
    narrow = {n: (t[:2] if "A" in n else t[:, :2]) if "q_proj" in n else t for n, t in tensors.items()}
    found = read_adapter(with_tensors(folder, narrow), PROJECTIONS)
    assert (len(found.factors[FIRST].a), found.rank) == (2, 4)


def test_the_digest_is_of_the_content(adapter_folder):
    folder = adapter_folder(PROJECTIONS, 1)
    first, tensors = read_adapter(folder, PROJECTIONS).digest, tensors_of(folder)
    change(folder, base_model_name_or_path="elsewhere", lora_dropout=0.1, inference_mode=True)
    assert read_adapter(with_tensors(folder, dict(reversed(tensors.items()))), PROJECTIONS).digest == first
    name = next(iter(tensors))
    moved = {**tensors, name: tensors[name] + np.float32(1e-3)}
    assert read_adapter(with_tensors(folder, moved), PROJECTIONS).digest != first
    with_tensors(folder, tensors)
    assert read_adapter(change(folder, lora_alpha=9), PROJECTIONS).digest != first


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"peft_type": "IA3"}, "peft_type"), ({"bias": "all"}, "bias"), ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_bias": True}, "lora_bias"), ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"), ({"trainable_token_indices": [1]}, "trainable_token"),
        ({"target_parameters": ["x"]}, "target_parameters"), ({"something_new": 3}, "something_new"),
        ({"r": 0}, ": r"), ({"r": 1 << 40}, ": r"), ({"r": True}, ": r"), ({"r": None}, ": r"), ({"r": 5}, "shape"),
        ({"lora_alpha": "8"}, "lora_alpha"), ({"lora_alpha": 1e300}, "lora_alpha"), ({"use_rslora": 1}, "use_rslora"),
        ({"rank_pattern": {"(a+)+b": 4}}, "rank_pattern"), ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern"),
        ({"alpha_pattern": [1]}, "alpha_pattern"), ({"target_modules": ["k_proj"]}, "target_modules"),
    ],
)  # fmt: skip
def test_what_a_configuration_may_not_ask_for(adapter_folder, config, field):
    folder = adapter_folder(PROJECTIONS, 1)
    with pytest.raises(InvalidInput, match=field):
        read_adapter(change(folder, **config), PROJECTIONS)


def test_tensors_that_have_no_place(adapter_folder):
    folder = adapter_folder(PROJECTIONS, 1)
    tensors = tensors_of(folder)
    a, b = f"base_model.model.{FIRST}.lora_A.weight", f"base_model.model.{FIRST}.lora_B.weight"
    elsewhere = {name.replace("q_proj", "z_proj"): tensors[name] for name in (a, b)}
    broken = {
        "no such projection": {**tensors, **elsewhere},
        "only lora_A and lora_B": {**tensors, f"base_model.model.{FIRST}.lora_magnitude_vector": tensors[a]},
        "both lora_A and lora_B": {name: values for name, values in tensors.items() if name != b},
        "twice": {**tensors, a.replace(".weight", ".default.weight"): tensors[a]},
        "shape": {**tensors, a: np.ascontiguousarray(tensors[a].T)},
        "must be of": {**tensors, a: tensors[a].astype(np.float64)},
        "finite": {**tensors, b: tensors[b] * np.float32(np.inf)},
        "no factor": {},
    }  # fmt: skip
    for remedy, given_tensors in broken.items():
        with pytest.raises(InvalidInput, match=remedy):
            read_adapter(with_tensors(folder, given_tensors), PROJECTIONS)


def test_a_rank_that_there_is_no_room_for(adapter_folder):
    folder = adapter_folder(PROJECTIONS, 1, rank=8)
    assert read_adapter(folder, PROJECTIONS, max_rank=8).rank == 8
    with pytest.raises(InvalidInput, match="--max-lora-rank"):
        read_adapter(folder, PROJECTIONS, max_rank=7)


def test_files_that_are_not_there(adapter_folder, tmp_path):
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        folder = Path(adapter_folder(PROJECTIONS, 1))
        (folder / name).unlink()
        with pytest.raises(InvalidInput, match="cannot be opened"):
            read_adapter(folder, PROJECTIONS)
    with pytest.raises(InvalidInput):
        read_adapter(tmp_path / "nowhere", PROJECTIONS)


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_are_refused_or_read_as_what_they_say(adapter_folder, data):
    """Some bytes of either file changed: never another exception, never a factor of another shape."""
    folder = Path(adapter_folder(PROJECTIONS, 1))
    path = folder / data.draw(st.sampled_from([WEIGHTS_NAME, CONFIG_NAME]))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, min(len(raw), 2000) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    try:
        found = read_adapter(folder, PROJECTIONS)
    except InvalidInput:
        return
    for name, each in found.factors.items():
        n, k = PROJECTIONS[name]
        assert (each.a.shape[1], each.b.shape[0], len(each.a)) == (k, n, each.b.shape[1])
