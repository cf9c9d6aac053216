"""Every architecture as a captured program: the same bits as when it runs eagerly, the same values on both backends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from model_harness import Loaded, batches, chunked, forward
from tiny_checkpoints import CASES, make_weights, prompt

from octavo.backends import create_backend
from octavo.backends.capture import capture, first_difference
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model

SHORT = [name for name in CASES if not name.endswith("long")]


def on(name: str, backend: str) -> Loaded:
    model, ops = build_model(ModelConfig.from_dict(CASES[name])), create_backend(backend)
    return Loaded(ops, model, {w: ops.weight(w, model.prepare(w, values)) for w, values in make_weights(name)})


def steps(loaded: Loaded, name: str) -> list[Any]:
    """Two sequences in chunks of 10: prefill, then a mixed step, each side with pages of its own."""
    sequences = [prompt(name)[:13], prompt(name)[5:16]]
    return [batch for batch, _ in batches(loaded, sequences, [chunked(13, 10), chunked(11, 10)], page_size=4)]


@pytest.mark.parametrize("name", SHORT)
def test_replay_equals_eager(name: str) -> None:
    loaded = on(name, "numpy")
    program = capture(loaded.model.forward, loaded.model.weight_shapes())
    eager = [np.array(forward(loaded, batch)) for batch in steps(loaded, name)]
    replayed = [np.array(program.replay(loaded.ops, loaded.weights, batch)) for batch in steps(loaded, name)]
    assert len(eager) == 2
    assert all(np.array_equal(a, b) for a, b in zip(eager, replayed, strict=True))


@pytest.mark.parametrize("name", SHORT)
def test_every_declared_weight_is_read(name: str) -> None:
    model = build_model(ModelConfig.from_dict(CASES[name]))
    assert set(capture(model.forward, model.weight_shapes()).weights()) == set(model.weight_shapes())


@pytest.mark.parametrize("name", SHORT)
def test_backends_agree_on_every_op(name: str) -> None:
    sides = [on(name, backend) for backend in ("numpy", "reference")]
    program = capture(sides[0].model.forward, sides[0].model.weight_shapes())
    for pair in zip(*(steps(side, name) for side in sides), strict=True):
        a, b = ((side.ops, side.weights, batch) for side, batch in zip(sides, pair, strict=True))
        assert first_difference(program, a, b) is None
