"""Fixtures: a whole tiny model in one JSON file, read with the standard library alone."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.engine.schema import validate
from octavo.tokenizers.simple import SimpleTokenizer


@dataclass(frozen=True)
class Fixture:
    """A parsed fixture. ``config`` has Hugging Face keys; ``weights`` nested lists of floats by checkpoint name."""

    name: str
    config: Mapping[str, Any]
    weights: Mapping[str, list[Any]]
    tokenizer: SimpleTokenizer
    scenario: Mapping[str, Any]
    golden: Mapping[str, Mapping[str, Any]]
    weights_seed: int


def seeded_units(name: str, shape: Sequence[int], seed: int, gemma: bool) -> list[int]:
    """One seeded tensor as multiples of the fixture's unit: the draw of scripts/make_tiny_fixture.py."""
    rng = random.Random(f"{seed}:{name}")
    if len(shape) == 1:
        centre, spread = (1024 if "post_" in name else 0) if gemma else 1024, 256
    else:
        outer = "embed" in name or "lm_head" in name
        centre, spread = 0, (200 if gemma else 700) if outer else 560
    return [centre + math.floor(rng.random() * (2 * spread + 1)) - spread for _ in range(math.prod(shape))]


def load_fixture(path: str | Path, weight_shapes: Mapping[str, Sequence[int]] | None = None) -> Fixture:
    """Read and check a fixture. Seeded weights need ``weight_shapes`` (or the model's, built from its configuration).

    Raises ``InvalidInput`` naming the field that does not fit the schema.
    """
    data = _read_json(Path(path))
    validate(data, "fixture")
    return Fixture(
        name=data["name"],
        config=data["model"],
        weights=_weights(data, weight_shapes),
        tokenizer=SimpleTokenizer.from_dict(data["tokenizer"]),
        scenario=data["scenario"],
        golden=data["golden"]["requests"],
        weights_seed=data["weights"]["seed"],
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidInput("fixture", str(path), "no such file; fixtures/tiny_model.json is one") from error
    except ValueError as error:
        raise InvalidInput("fixture", str(path), f"not JSON: {error}") from error


def _weights(data: Mapping[str, Any], shapes: Mapping[str, Sequence[int]] | None) -> dict[str, list[Any]]:
    spec, unit = data["weights"], data["weights"]["unit"]
    if spec["kind"] == "stored":
        stored = spec.get("tensors", {})
        return {name: _nested(t["units"], t["shape"], unit, name) for name, t in stored.items()}
    if shapes is None:
        shapes = model_weight_shapes(data["model"])
    gemma = str(data["model"]["model_type"]).startswith("gemma3")
    return {
        name: _nested(seeded_units(name, shape, spec["seed"], gemma), shape, unit, name)
        for name, shape in shapes.items()
    }


def model_weight_shapes(config: Mapping[str, Any]) -> Mapping[str, Sequence[int]]:
    """Checkpoint names and shapes of the model that ``config`` (Hugging Face keys) describes."""
    from octavo.models.config import ModelConfig
    from octavo.models.registry import build_model

    shapes: Mapping[str, Sequence[int]] = build_model(ModelConfig.from_dict(dict(config))).weight_shapes()
    return shapes


def _nested(units: Sequence[int], shape: Sequence[int], unit: float, name: str) -> list[Any]:
    if math.prod(shape) != len(units) or len(shape) > 2:
        raise InvalidInput(f"weights.tensors.{name}", list(shape), f"the shape must hold its {len(units)} values")
    values = [value * unit for value in units]
    if len(shape) == 1:
        return values
    return [values[row * shape[1] : (row + 1) * shape[1]] for row in range(shape[0])]
