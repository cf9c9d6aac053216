"""Making quantized weights: grids against the standard-library definition, methods against what they promise."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import GEMMA, LLAMA, MOE, texts, write_model

from octavo.backends.quantization import dequantize, quantize
from octavo.core.errors import InvalidInput
from octavo.weights.names import open_weights
from octavo.weights.quant.gptq import feedback_of, gptq, hessian_of
from octavo.weights.quant.job import Plan, QuantizeJob
from octavo.weights.quant.measure import Comparison, compare, round_inputs
from octavo.weights.quant.outputs import TensorFile
from octavo.weights.quant.rounding import quantize_matrix
from octavo.weights.quant.scaling import awq_scales, smooth_scales
from octavo.weights.quant.tapping import LazyWeights, SharedInput, hidden_states, shared_inputs
from octavo.weights.quant.targets import TARGETS, Target, find_target
from octavo.weights.safetensors import open_safetensors

quick = settings(max_examples=25, deadline=None)
W4 = Target("w4g16", 4, 16, False, 8)
grids = st.builds(
    lambda bits, size, symmetric: Target("", bits, size, symmetric, 8),
    st.sampled_from([4, 8]),
    st.sampled_from([16, 32, 64, 128]),
    st.booleans(),
)
values = st.floats(-(2.0**40), 2.0**40, width=32) | st.sampled_from([0.0, -0.0, 1e-45, -1e-38, 3e38, 0.5])


def matrices(draw: Any) -> np.ndarray:
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    return np.array(draw(st.lists(st.lists(values, min_size=columns, max_size=columns), min_size=rows, max_size=rows)), np.float32)  # fmt: skip  # noqa: E501


# ---- rounding


@quick
@given(st.data(), grids)
def test_round_to_nearest_is_the_definition(data: st.DataObject, target: Target) -> None:
    matrix = matrices(data.draw)
    expected, found = quantize(matrix.tolist(), target.definition()), quantize_matrix(matrix, target, half=False)
    assert found.scales.tolist() == [list(row) for row in expected.scales]
    assert found.codes.tolist() == [list(expected._codes(i)) for i in range(len(matrix))]
    assert found.zeros.tolist() == [list(expected._zeros(i)) for i in range(len(matrix))]
    np.testing.assert_array_equal(found.dequantize(), np.array(dequantize(expected), np.float32))


@quick
@given(st.integers(0, 2**32 - 1), grids, st.floats(1e-6, 1e3))
def test_half_scales_cover_the_range(seed: int, target: Target, size: float) -> None:
    matrix = (np.random.RandomState(seed).standard_normal((3, 40)) * size).astype(np.float32)
    found = quantize_matrix(matrix, target, half=True)
    assert np.array_equal(found.scales.astype(np.float16).astype(np.float32), found.scales)
    bound = found.scales[:, found.groups] / 2 * (1 + 1e-6)
    assert (np.abs(found.dequantize() - matrix) <= bound + 1e-12).all()


def test_searched_grids_are_never_worse() -> None:
    rng = np.random.RandomState(0)
    matrix = rng.standard_t(2, (20, 64)).astype(np.float32)
    weights = rng.uniform(0, 1, 64).astype(np.float32)
    plain, searched = quantize_matrix(matrix, W4), quantize_matrix(matrix, W4, weights=weights)
    losses = [(np.square(q.dequantize() - matrix) * weights).sum(axis=1) for q in (plain, searched)]
    assert (losses[1] <= losses[0] * (1 + 1e-5)).all() and losses[1].sum() < 0.95 * losses[0].sum()


# ---- gptq


def _inputs(seed: int, rows: int, columns: int) -> np.ndarray:
    """Inputs whose channels depend on each other, some far larger than the rest."""
    rng = np.random.RandomState(seed)
    mixed = rng.standard_normal((rows, columns // 2)) @ rng.standard_normal((columns // 2, columns))
    return ((mixed + 0.1 * rng.standard_normal((rows, columns))) * rng.uniform(0.1, 3, columns)).astype(np.float32)


def _slow_gptq(matrix: np.ndarray, hessian: np.ndarray, target: Target) -> np.ndarray:
    """One column after the other, no blocks, in float64: what remains of the Hessian is inverted anew each time."""
    work, out = matrix.astype(np.float64), np.empty_like(matrix)
    damped = hessian + 0.01 * np.mean(np.diag(hessian)) * np.eye(len(hessian))
    grid = None
    for k in range(work.shape[1]):
        if k % target.group_size == 0:
            part = work[:, k : k + target.group_size].astype(np.float32)
            grid = quantize_matrix(part, dataclasses.replace(target, group_size=0), half=True)
        assert grid is not None
        codes = np.clip(np.rint(work[:, k] / grid.scales[:, 0]) + grid.zeros[:, 0], 0, target.levels)
        out[:, k] = grid.scales[:, 0] * (codes - grid.zeros[:, 0])
        left = np.linalg.inv(damped[k:, k:])
        work[:, k:] -= np.outer((work[:, k] - out[:, k]) / left[0, 0], left[0])
    return out


@pytest.mark.parametrize(("size", "columns"), [(16, 96), (32, 80), (128, 144)])
def test_gptq_is_the_slow_definition(size: int, columns: int) -> None:
    rng, target = np.random.RandomState(3), dataclasses.replace(W4, group_size=size)
    matrix = rng.standard_normal((12, columns)).astype(np.float32)
    hessian = hessian_of(_inputs(1, 300, columns))
    fast, slow = gptq(matrix, feedback_of(hessian), target).dequantize(), _slow_gptq(matrix, hessian, target)
    off = np.abs(fast - slow) > 1e-3  # a tie may fall either way, and what follows then differs
    assert off.mean() < 0.02


@pytest.mark.parametrize("name", list(TARGETS))
def test_gptq_beats_rounding_where_inputs_depend_on_each_other(name: str) -> None:
    x, matrix = _inputs(5, 256, 128), np.random.RandomState(4).standard_normal((24, 128)).astype(np.float32)
    target = TARGETS[name]
    errors = [
        np.linalg.norm(x @ (q.dequantize() - matrix).T)
        for q in (quantize_matrix(matrix, target), gptq(matrix, feedback_of(hessian_of(x)), target))
    ]
    assert errors[1] < 0.8 * errors[0]


def test_gptq_with_dead_and_too_few_inputs() -> None:
    x = _inputs(5, 8, 64)  # rank 8
    x[:, 10] = 0
    matrix = np.random.RandomState(4).standard_normal((6, 64)).astype(np.float32)
    found = gptq(matrix, feedback_of(hessian_of(x)), W4).dequantize()
    assert np.isfinite(found).all() and (found[:, 10] == 0).all()
    with pytest.raises(InvalidInput, match="calibration"):
        feedback_of(np.full((64, 64), np.inf))


# ---- scaling


def test_awq_takes_the_exponent_of_least_error() -> None:
    x = np.random.RandomState(1).standard_normal((64, 64)).astype(np.float32)
    x[:, ::16] *= 60
    matrix = np.random.RandomState(2).standard_normal((32, 64)).astype(np.float32)
    scales = awq_scales(x, [matrix], W4)
    assert scales[::16].min() > scales[1::16].max()
    errors = [
        np.linalg.norm(x @ (quantize_matrix(matrix * s, W4).dequantize() / s - matrix).T)
        for s in (np.float32(1), scales)
    ]
    assert errors[1] < 0.7 * errors[0]


def test_smoothquant_shares_the_difficulty() -> None:
    x = np.random.RandomState(1).standard_normal((64, 64)).astype(np.float32)
    x[:, 5] *= 100
    x[:, 6] = 0
    matrix = np.random.RandomState(2).standard_normal((32, 64)).astype(np.float32)
    scales = smooth_scales(x, [matrix], 0.5)
    most = np.abs(x / scales).max(axis=0), np.abs(matrix * scales).max(axis=0)
    live = np.arange(64) != 6
    np.testing.assert_allclose(most[0][live], most[1][live], rtol=1e-4)  # at one half both sides are equal
    assert scales[6] == 1


@quick
@given(st.integers(0, 2**32 - 1), st.sampled_from(["w8pc", "w8g64", "w4g32", "w4a16g32"]))
def test_rounded_inputs(seed: int, name: str) -> None:
    target = TARGETS[name]
    x = np.random.RandomState(seed).standard_normal((3, 100)).astype(np.float32)
    x[1] = 0
    found = round_inputs(x, target)
    size = target.group_size or 100
    for start in range(0, 100, size):
        most = np.abs(x[:, start : start + size]).max(axis=1, keepdims=True)
        bound = most / 254 * 1.0001 if target.activation_bits == 8 else 0 * most
        assert (np.abs(found - x)[:, start : start + size] <= bound).all()


# ---- the whole


class Made:
    """A model quantized into a folder, and how far it is from its source."""

    def __init__(self, folder: Path, config: dict[str, Any], to: str, method: str) -> None:
        self.out = folder / f"{to}-{method}"
        with open_weights(write_model(folder / "source", config)) as source:
            self.job = QuantizeJob(source, Plan(find_target(to), method), self.out)
            self.job.run(texts(1, 4, 64))
            with open_weights(self.out) as after:
                self.after = {name: after.read(name) for name in after.names()}
                self.codes = {name: after.codes(name) for name in after.names()}
                self.result = self._compare(source, after)

    def _compare(self, source: Any, after: Any) -> Comparison:
        job = self.job

        def reader(weights: Any) -> Any:
            return lambda name: job.model.prepare(name, weights.read(name))

        return compare(
            job.model, job.program, texts(2, 2, 40), reader(source), reader(after), job.plan.target, job.names
        )


@pytest.mark.parametrize("config", [LLAMA, GEMMA, MOE], ids=["llama", "gemma3", "moe"])
@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "smoothquant"])
def test_every_method_on_every_kind_of_model(tmp_path: Path, config: dict[str, Any], method: str) -> None:
    made = Made(tmp_path, config, "w4a16g32", method)
    assert {report.name for report in made.job.reports} == set(made.job.names) and made.job.names
    assert set(made.after) == set(made.job.shapes)
    assert 0 < made.result.kl_mean < 1.2 and made.result.perplexity_after < 2 * made.result.perplexity_before
    assert all(0.01 < report.weight_error < (0.5 if method != "awq" else 2) for report in made.job.reports)
    if method == "gptq":
        errors = [report.output_error for report in made.job.reports]
        assert all(error is None or error < 0.2 for error in errors)


def test_eight_bits_lose_almost_nothing_and_files_say_what_they_are(tmp_path: Path) -> None:
    for to in ("w8pc", "w8g64"):
        made = Made(tmp_path / to, LLAMA, to, "rtn")
        assert made.result.kl_mean < 0.1 and max(report.weight_error for report in made.job.reports) < 0.01
        assert all(made.codes[name] is not None for name in made.job.names)  # packs without loss
        config = json.loads((made.out / "config.json").read_text())
        assert config["octavo_quantization"] == {"format": to, "method": "rtn"}
        quantization = config["quantization_config"]
        assert quantization["format"] == ("int-quantized" if to == "w8pc" else "pack-quantized")
        assert (quantization["config_groups"]["group_0"]["input_activations"] is None) == (to == "w8g64")
        planned = sum(report.bytes_after for report in made.job.reports)
        with open_safetensors(made.out) as file:
            stored = sum(file.stored_bytes(name) for name in file.names() if ".weight" in name and "norm" not in name)
            assert stored == planned + file.stored_bytes("model.embed_tokens.weight")


def test_smoothing_helps_int8_activations(tmp_path: Path) -> None:
    plain, smooth = (Made(tmp_path / method, LLAMA, "w8pc", method).result.kl_mean for method in ("rtn", "smoothquant"))
    assert smooth < 0.7 * plain


@pytest.mark.parametrize("method", ["awq", "smoothquant"])
@pytest.mark.parametrize(
    ("config", "absorbed"),
    [(LLAMA, 8), (GEMMA | {"num_key_value_heads": 4}, 8), (MOE, 6 + 2 * 4)],
    ids=["llama", "gemma3", "moe"],
)
def test_factors_that_moved_change_nothing_by_themselves(
    tmp_path: Path, config: dict[str, Any], absorbed: int, method: str
) -> None:
    """With codes so fine that rounding vanishes, the folded model is the model: norms, rows, routers took factors."""
    made = Made(tmp_path, config, "w8g64", method)
    assert len([s for s in made.job.inputs if s.norm or s.rows]) == absorbed
    with open_weights(tmp_path / "source") as source:
        moved = [name for name in made.after if made.after[name].ndim == 1 or name.endswith("mlp.gate.weight")]
        changed = [name for name in moved if not np.allclose(made.after[name], source.read(name), rtol=1e-4)]
        held = made.after["model.layers.0.self_attn.v_proj.weight"]
        ratios = held / source.read("model.layers.0.self_attn.v_proj.weight")
    second = "pre_feedforward_layernorm" if "sliding_window" in config else "post_attention_layernorm"
    expected = {"input_layernorm.weight", f"{second}.weight"} | ({"mlp.gate.weight"} if config is MOE else set())
    assert {name.split(".", 3)[3] for name in changed} == expected
    assert np.median(np.abs(ratios), axis=1).std() > 0.01  # rows of values took factors, too
    assert made.result.kl_mean < 0.03


def test_channels_that_one_row_makes_share_a_factor() -> None:
    shared = SharedInput(("o",), rows="v", heads=(2, 3))
    values = np.arange(12, dtype=np.float32)  # two key-value heads, two query heads each, of size 3
    assert shared.fold(values).tolist() == [3, 4, 5, 9, 10, 11]
    assert shared.tied(values).tolist() == [3, 4, 5, 3, 4, 5, 9, 10, 11, 9, 10, 11]
    assert SharedInput(("down",), rows="up").fold(values).tolist() == values.tolist()


def test_inputs_that_matrices_share() -> None:
    from octavo.backends.capture import capture
    from octavo.models.config import ModelConfig
    from octavo.models.registry import build_model

    model = build_model(ModelConfig.from_dict(LLAMA))
    first = shared_inputs(capture(model.forward, model.weight_shapes()))[:4]
    p = "model.layers.0."
    assert [len(s.names) for s in first] == [3, 1, 2, 1]
    assert first[0].norm == f"{p}input_layernorm.weight" and first[2].norm == f"{p}post_attention_layernorm.weight"
    assert (first[1].rows, first[1].heads) == (f"{p}self_attn.v_proj.weight", (2, 16))
    assert (first[3].rows, first[3].heads) == (f"{p}mlp.up_proj.weight", (1, 1))


def test_tapping_sees_what_the_model_computes(tmp_path: Path) -> None:
    from octavo.backends import create_backend

    with open_weights(write_model(tmp_path, LLAMA)) as source:
        job = QuantizeJob(source, Plan(W4), tmp_path / "out")
        seen: list[str] = []

        def hook(name: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            seen.append(name)
            assert x.shape == (50, job.shapes[name][1])
            return x, source.read(name)

        tokens = texts(3, 2, 25)
        states = hidden_states(job.model, job.program, tokens, LazyWeights(job.shapes, source.read), hook)
        ops = create_backend("numpy")
        weights = {name: ops.weight(name, source.read(name)) for name in job.shapes}
        kv = ops.allocate_kv(4, 16, job.model.kv_groups())
        batch = ops.batch(tokens[1], range(25), [25], [[[2, 1]]], kv)
        expected = job.model.hidden(ops, weights, batch)
    assert seen == list(job.names)
    np.testing.assert_allclose(states[25:], expected, rtol=1e-4, atol=1e-4)


def test_refusals(tmp_path: Path) -> None:
    with open_weights(write_model(tmp_path, LLAMA)) as source:
        with pytest.raises(InvalidInput, match="not empty"):
            QuantizeJob(source, Plan(W4), tmp_path).run([])
        with pytest.raises(InvalidInput, match="needs a text"):
            QuantizeJob(source, Plan(W4, "gptq"), tmp_path / "out").run([[]])
    for wrong in ({"method": "magic"}, {"alpha": 1.5}, {"alpha": float("nan")}):
        with pytest.raises(InvalidInput, match=next(iter(wrong))):
            Plan(W4, **wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="w4g32"):
        find_target("w5")


def test_a_half_written_file_has_no_name(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "x.safetensors", {"a": ("F16", (2,)), "b": ("BF16", (2, 1))})
    file.write("b", np.array([[1.00390625], [-3.0]], np.float32))  # halfway between two bfloat16: to the even one
    for name, wrong in (("b", np.zeros((2, 1))), ("a", np.zeros(3)), ("c", np.zeros(2))):
        with pytest.raises(InvalidInput, match="announced"):
            file.write(name, wrong)
    with pytest.raises(InvalidInput, match="never written"):
        file.finish()
    file.write("a", np.array([0.5, 2]))
    file.finish()
    file.close()
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
    with open_safetensors(tmp_path / "x.safetensors") as read:
        assert read.read("a").tolist() == [0.5, 2] and read.read("b").tolist() == [[1.0], [-3.0]]
    TensorFile(tmp_path / "y.safetensors", {"a": ("F16", (2,))}).close()
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
