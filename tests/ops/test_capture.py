"""Captured programs: replay equals eager bit for bit; looking at data is refused; differences are found."""

from __future__ import annotations

import random
from typing import Any

import pytest
from op_cases import matrix

from octavo.backends import BACKENDS, create_backend
from octavo.backends.capture import Program, capture, first_difference
from octavo.backends.ops import RopeTable
from octavo.core.errors import InvalidInput
from octavo.core.kv_groups import KVGroup

ROPE = RopeTable((1.0, 0.1), 4)
SHAPES = {
    "embed": (11, 8), "norm": (8,), "q": (8, 8), "k": (4, 8), "v": (4, 8), "o": (8, 8), "qn": (4,),
    "router": (3, 8), "g0": (6, 8), "g1": (6, 8), "g2": (6, 8), "u0": (6, 8), "u1": (6, 8), "u2": (6, 8),
    "d0": (8, 6), "d1": (8, 6), "d2": (8, 6), "gate": (6, 8), "up": (6, 8), "down": (8, 6),
}  # fmt: skip


def forward(ops: Any, w: Any, batch: Any) -> Any:
    """One layer with every tensor op in use."""
    x = ops.scale(ops.embed(batch.token_ids, w["embed"]), 2.0)
    y, x = ops.rms_norm(x, w["norm"], 1e-5)
    q, k, v = (ops.linear(y, w[name]) for name in "qkv")
    q = ops.qk_norm(q, w["qn"], 1e-5, head_dim=4)
    q, k = ops.rope(q, k, batch, rope=ROPE, head_dim=4)
    ops.write_kv(k, v, batch, layer=0)
    y = ops.linear(ops.attention(q, batch, layer=0, scale=0.5, window=3, head_dim=4), w["o"])
    y, x = ops.rms_norm(x, w["norm"], 1e-5, residual=y)
    experts = [[w[f"{kind}{i}"] for i in range(3)] for kind in "gud"]
    x = ops.add(x, ops.moe(y, w["router"], *experts, top_k=2, normalize=True))
    hidden = ops.gated_activation(ops.linear(y, w["gate"]), ops.linear(y, w["up"]), kind="gelu_tanh")
    x = ops.layer_norm(ops.add(x, ops.linear(hidden, w["down"])), w["norm"], None, 1e-5)
    return ops.logits(ops.select_rows(x, batch), w["embed"], soft_cap=5.0)


def values() -> dict[str, Any]:
    rng = random.Random(6)
    return {n: matrix(rng, *s) if len(s) == 2 else matrix(rng, 1, *s)[0] for n, s in SHAPES.items()}


def side(name: str, weights: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any], Any]:
    """A backend, its weights, and a ragged batch of two sequences over a fresh pool."""
    backend = create_backend(name)
    handles = {n: backend.weight(n, v) for n, v in (weights or values()).items()}
    pool = backend.allocate_kv(6, 2, (KVGroup((0,), num_kv_heads=1, k_dim=4, v_dim=4),))
    batch = backend.batch([1, 2, 3, 4, 10], [0, 1, 2, 3, 0], [4, 1], [[[5, 0], [2]]], pool, logit_rows=[4, 3, 0])
    return backend, handles, batch


def program() -> Program:
    return capture(forward, SHAPES)


@pytest.mark.parametrize("name", BACKENDS)
def test_replay_equals_eager_bit_for_bit(name: str) -> None:
    backend, weights, batch = side(name)
    eager = backend.to_lists(forward(backend, weights, batch))
    backend, weights, batch = side(name)
    replayed = backend.to_lists(program().replay(backend, weights, batch))
    assert replayed == eager
    assert len(eager) == 3 and len(eager[0]) == 11


def test_shapes_are_inferred_as_they_turn_out() -> None:
    backend, weights, batch = side("numpy")
    sizes = {"T": 5, "S": 2, "R": 3}
    for record, outputs in program().steps(backend, weights, batch):
        for dims, output in zip(record.dims, outputs, strict=True):
            assert tuple(sizes.get(d, d) for d in dims) == output.shape, record


def test_values_are_freed_after_their_last_use_and_only_then() -> None:
    records = program().records
    alive: set[int] = set()
    peak = 0
    for record in records:
        used = {operand.index for _, operand in record.operands if type(operand).__name__ == "Value"}
        assert used <= alive
        alive |= set(record.outputs)
        peak = max(peak, len(alive))
        alive -= set(record.frees)
    assert alive == {program().output}
    assert peak == 6  # at the rope: x, v, and q and k before and after


def test_backends_agree_on_the_whole_program() -> None:
    assert first_difference(program(), side("reference"), side("numpy"), 1e-5) is None


@pytest.mark.parametrize("op", ["scale", "linear", "rope", "attention", "moe", "logits"])
def test_the_first_op_that_differs_is_named(op: str) -> None:
    broken, weights, batch = side("numpy")
    honest = getattr(broken, op)

    def corrupted(*args: Any, **kwargs: Any) -> Any:
        result = honest(*args, **kwargs)
        (result[1] if isinstance(result, tuple) else result)[0, 0] += 0.01
        return result

    setattr(broken, op, corrupted)
    found = first_difference(program(), side("reference"), (broken, weights, batch), 1e-5)
    first = next(record for record in program().records if record.op == op)
    assert found is not None and (found.op, found.index) == (op, first.index)
    assert 1e-3 < found.error < 0.011
    assert f"op {first.index} ({op})" in str(found)


def test_a_wrong_weight_is_named() -> None:
    wrong = values()
    wrong["up"][2][3] += 0.5
    found = first_difference(program(), side("reference"), side("numpy", wrong), 1e-4)
    assert found is not None and found.weights == ("up",)


def test_write_kv_that_writes_elsewhere_shows_at_the_attention() -> None:
    broken, weights, batch = side("numpy")
    broken.write_kv = lambda *args, **kwargs: None
    found = first_difference(program(), side("reference"), (broken, weights, batch))
    assert found is not None and found.op == "attention"


@pytest.mark.parametrize(
    "look",
    [bool, int, float, len, list, lambda x: x[0], lambda x: x == 1, lambda x: x > 0, lambda x: 3 in x],
)
def test_looking_at_data_is_refused(look: Any) -> None:
    def nosy(ops: Any, w: Any, batch: Any) -> Any:
        look(ops.embed(batch.token_ids, w["embed"]))

    with pytest.raises(InvalidInput, match=r"symbolic \[T, 8\] of op 0 \(embed\).*depend on data"):
        capture(nosy, SHAPES)


def test_shapes_that_disagree_are_refused_with_the_op_and_the_input() -> None:
    with pytest.raises(InvalidInput, match=r"op 1 \(linear\) weight.*K = 8"):
        capture(lambda ops, w, b: ops.linear(ops.embed(b.token_ids, w["embed"]), w["down"]), SHAPES)
    with pytest.raises(InvalidInput, match=r"op 1 \(linear\) weight.*expected \[N, K\]"):
        capture(lambda ops, w, b: ops.linear(ops.embed(b.token_ids, w["embed"]), w["norm"]), SHAPES)


def test_mutable_attributes_foreign_inputs_and_foreign_results_are_refused() -> None:
    with pytest.raises(InvalidInput, match="kept by value"):
        capture(lambda ops, w, b: ops.scale(ops.embed(b.token_ids, w["embed"]), [2.0]), SHAPES)
    with pytest.raises(InvalidInput, match="an input is a symbolic value"):
        capture(lambda ops, w, b: ops.embed([1, 2], w["embed"]), SHAPES)
    with pytest.raises(InvalidInput, match="return the value of an op"):
        capture(lambda ops, w, b: None, SHAPES)
    with pytest.raises(AttributeError, match="sample"):
        capture(lambda ops, w, b: ops.sample(b), SHAPES)


def test_a_missing_weight_is_named_before_anything_runs() -> None:
    backend, weights, batch = side("reference")
    del weights["up"]
    backend.access_log = []
    with pytest.raises(InvalidInput, match="'up'"):
        program().replay(backend, weights, batch)
    assert backend.access_log == []


def test_describe_reads_like_a_program() -> None:
    lines = program().describe().splitlines()
    assert lines[0].split() == ["0", "embed(batch.token_ids,", "embed)", "->", "%0", "[T,", "8]"]
    assert any("moe(" in line and "gate=[3 weights]" in line and "top_k=2" in line for line in lines)
    assert lines[-1] == f"result: %{program().output}"
