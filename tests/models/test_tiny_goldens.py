"""Every architecture against `transformers`: logits of all positions of tiny random checkpoints, through the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_harness import DATA, all_logits, load
from tiny_checkpoints import CASES, digest, make_weights

from octavo.weights.safetensors import write_safetensors

GOLDENS: dict[str, Any] = json.loads((DATA / "tiny.json").read_text())["cases"]
LOGITS = np.load(DATA / "tiny.npz")
TOLERANCE = 1e-4


def write_folder(folder: Path, name: str, shards: int) -> Path:
    """The case as a checkpoint folder, in one file or several with an index."""
    weights = dict(make_weights(name))
    assert digest(weights) == GOLDENS[name]["weights_crc"], "the generator no longer gives the weights of the goldens"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GOLDENS[name]["config"]))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", weights)
        return folder
    places = {}
    for shard in range(shards):
        part = {weight: weights[weight] for weight in list(weights)[shard::shards]}
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / file, part)
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_the_goldens_are_of_these_configurations() -> None:
    assert {name: golden["config"] for name, golden in GOLDENS.items()} == CASES


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """All positions in one pass; in chunks of 5 with pages of 4; two sequences in one batch; from a sharded folder."""
    ids, want = GOLDENS[name]["token_ids"], LOGITS[name]
    loaded = load(write_folder(tmp_path / "single", name, 1), "numpy")
    assert close(all_logits(loaded, [ids])[0], want)
    assert close(all_logits(loaded, [ids], chunk=5, page_size=4)[0], want)
    shorter, whole = all_logits(loaded, [ids[:-3], ids], chunk=7, page_size=8)
    assert close(whole, want) and close(shorter, want[:-3])
    sharded = load(write_folder(tmp_path / "sharded", name, 3), "numpy")
    assert np.array_equal(all_logits(sharded, [ids])[0], all_logits(loaded, [ids])[0])


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers_on_the_reference(name: str, tmp_path: Path) -> None:
    ids = GOLDENS[name]["token_ids"]
    loaded = load(write_folder(tmp_path / "model", name, 1), "reference")
    whole = all_logits(loaded, [ids])[0]
    assert close(whole, LOGITS[name])
    chunks = all_logits(loaded, [ids, ids[:9]], chunk=10, page_size=4)[0]
    assert np.array_equal(whole, chunks), "the reference promises the same bits in any batch, chunk and page size"


def close(got: np.ndarray, want: np.ndarray) -> bool:
    """Within the tolerance, everywhere."""
    return got.shape == want.shape and float(np.abs(got - want).max()) <= TOLERANCE
