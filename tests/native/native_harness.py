"""Tiny checkpoints on the native backend, and their logits in any batch, chunk, page size and number of threads."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Sequence

import numpy as np
from model_harness import DATA, Array, Loaded, batches, forward
from tiny_checkpoints import CASES, VOCAB, make_weights

from octavo.backends.native_backend import NativeBackend
from octavo.backends.native_lib import library
from octavo.backends.native_program import StepLimits
from octavo.core.kv_eviction import Eviction
from octavo.engine.eviction import forgetful
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model

GOLDENS = json.loads((DATA / "tiny.json").read_text())["cases"]
LOGITS = np.load(DATA / "tiny.npz")
ISAS: tuple[str, ...] = tuple(library().octavo_isas().decode().split())
# every weight format with the KV type it is served with, and the other KV types once
PAIRS = (
    *(("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "int8"), ("w8g64", "bf16"), ("w8g64", "int8"), ("w8pc", "int8")),
    *(("w4g32", "int8"), ("w4g64", "fp32"), ("w4g128", "bf16"), ("w4a16g32", "bf16")),
)


@functools.cache
def weights_of(name: str) -> dict[str, Array]:
    """The checkpoint of a case."""
    return dict(make_weights(name))


def compiled(
    name: str,
    kind: str = "fp32",
    kv_dtype: str = "fp32",
    isa: str = "",
    threads: int = 1,
    eviction: Eviction | None = None,
) -> Loaded:
    """A case on a native backend of its own."""
    backend = NativeBackend(isa, threads)
    config = forgetful(ModelConfig.from_dict(CASES[name]), eviction)
    model = backend.compile(build_model(config), format=kind, kv_dtype=kv_dtype)
    weights = weights_of(name)
    model.limits = StepLimits(max_tokens=2048)
    model.load(lambda weight: model.prepare(weight, weights[weight]))
    return Loaded(backend, model, {})


def run(
    loaded: Loaded, sequences: Sequence[Sequence[int]], chunks: Sequence[Sequence[int]], page_size: int = 16
) -> list[Array]:
    """Logits of all positions of all sequences; sequence s steps by `chunks[s]`."""
    rows: list[list[Array]] = [[] for _ in sequences]
    for batch, owners in batches(loaded, sequences, chunks, page_size, seed=len(sequences)):
        for owner, row in zip(owners, np.array(forward(loaded, batch)), strict=True):
            rows[owner].append(row)
    return [np.stack(each) for each in rows]


def prompt(name: str, length: int) -> list[int]:
    """Token ids that a name stands for."""
    return [int(i) for i in np.random.RandomState(zlib.crc32(name.encode())).randint(0, VOCAB, length)]
