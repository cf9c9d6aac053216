"""`octavo inspect --diff` with the native backend: agreement, and the name of the op that is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_models import GEMMA, LLAMA, MOE, write_model

from octavo.backends import native_lib as lib
from octavo.backends.capture import capture, difference_from
from octavo.backends.native_backend import NativeBackend, NativeModel
from octavo.backends.native_records import Lowered, NativeOp
from octavo.backends.numpy_backend import NumpyBackend
from octavo.cli.inspect import diff_backends, run_diff
from octavo.core.errors import InvalidInput
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model
from octavo.weights.names import open_weights

TINY = str(Path(__file__).parents[2] / "fixtures" / "tiny_model.json")
IDS = [3, 41, 5, 9, 26, 53, 58, 9, 7, 9, 32, 38]


def compared(folder: Path, lowered_by: Any = None) -> Any:
    """The first op of a small model that differs between the native backend and numpy."""
    with open_weights(folder) as source:
        model = build_model(ModelConfig.from_dict(source.config))
        native = NativeBackend(threads=1).compile(model, format="fp32")
        native.load(lambda name: model.prepare(name, source.read(name)))
        numpy = NumpyBackend()
        names = model.weight_shapes()
        weights = {name: numpy.weight(name, model.prepare(name, source.read(name))) for name in names}
    lowered = native.lower(keep=True)
    if lowered_by is not None:
        lowered_by(lowered)
    program, _pool = native.run_once(lowered, IDS, [len(IDS) - 1])
    known = {value: program.values(buffer).tolist() for value, buffer in lowered.shown.items()}
    groups = model.kv_groups()
    pool = numpy.allocate_kv(len(groups), 16, groups)
    batch = numpy.batch(IDS, list(range(len(IDS))), [len(IDS)], [[[g]] for g in range(len(groups))], pool)
    captured = capture(model.forward, names)
    assert len(known) >= 0.3 * len(captured.records) and captured.output in known
    return difference_from(captured, known, (numpy, weights, batch))


def ops_of(lowered: Lowered, code: int) -> list[NativeOp]:
    return [op for op in lowered.ops if op.code == code]


@pytest.mark.parametrize("config", [LLAMA, GEMMA, MOE], ids=["llama", "gemma", "moe"])
def test_all_that_a_native_step_computes_is_what_numpy_computes(tmp_path: Path, config: Any) -> None:
    assert compared(write_model(tmp_path / "model", config)) is None


def other_activation(lowered: Lowered) -> None:
    op = [op for op in ops_of(lowered, lib.LINEAR) if op.i[0] == lib.EPI_SILU_MUL][1]
    op.i = (lib.EPI_GELU_MUL, 1)


def colder_attention(lowered: Lowered) -> None:
    op = ops_of(lowered, lib.ATTENTION)[1]
    op.f = (1.5 * op.f[0], op.f[1])


def no_residual(lowered: Lowered) -> None:
    op = next(op for op in ops_of(lowered, lib.LINEAR) if op.i[0] == lib.EPI_ADD)
    op.i, op.inputs = (lib.EPI_STORE, 1), {0: op.inputs[0]}


@pytest.mark.parametrize(
    ("broken", "op", "layer"),
    [(other_activation, "gated_activation", 1), (colder_attention, "attention", 1), (no_residual, "rms_norm", 0)],
)
def test_the_broken_op_is_named(tmp_path: Path, broken: Any, op: str, layer: int) -> None:
    folder = write_model(tmp_path / "model", LLAMA)
    found = compared(folder, broken)
    with open_weights(folder) as source:
        model = build_model(ModelConfig.from_dict(source.config))
    records = [record for record in capture(model.forward, model.weight_shapes()).records if record.op == op]
    where = 2 * layer + 1 if op == "rms_norm" else layer  # a residual joins in the norm behind it
    assert found is not None and (found.op, found.index) == (op, records[where].index)


def test_the_command_names_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for other in ("numpy", "reference"):
        run_diff(TINY, f"native,{other}", "abc", "")
        assert f"native and {other} agree in all " in capsys.readouterr().out
    honest = NativeModel.lower

    def corrupted(self: NativeModel, keep: bool = False) -> Lowered:
        lowered = honest(self, keep)
        other_activation(lowered)
        return lowered

    monkeypatch.setattr(NativeModel, "lower", corrupted)
    found, _ = diff_backends(TINY, "numpy", "native", "abc", "")
    assert found.op == "gated_activation" and "differs by" in str(found)
    with pytest.raises(InvalidInput, match="give two of"):
        run_diff(TINY, "native,native", "abc", "")
