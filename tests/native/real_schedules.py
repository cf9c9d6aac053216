"""Schedules of SmolLM2 (see schedules.py): thirty real layers, so few tokens and few steps each."""

from __future__ import annotations

import gc
import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence

from schedules import WHAT_HAPPENS, Checkpoint, Script, Stage

from octavo.core.params import SamplingParams
from octavo.weights.names import open_weights
from octavo.weights.store import ModelStore

SCHEDULES = int(os.environ.get("OCTAVO_SCHEDULES", "200"))
EVERY = max(2, SCHEDULES // 20)
_rng = random.Random(5)
_BASE = [_rng.randrange(4, 49152) for _ in range(80)]
PROMPTS = [tuple(_BASE[:n]) for n in (1, 17, 33, 66)]
PROMPTS += [tuple(_BASE[:n] + _BASE[-m:]) for n, m in ((16, 9), (34, 5))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2),  # room for a tree of drafts
    SamplingParams(temperature=0.8, max_tokens=2, seed=11, logprobs=0),
    SamplingParams(temperature=1.3, top_k=9, top_p=0.9, max_tokens=2, seed=7, presence_penalty=0.5, logprobs=1),
    SamplingParams(temperature=1.0, n=2, max_tokens=2, seed=5, min_p=0.02, logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=1, logprobs=1),
]
SCRIPT = Script(PROMPTS, PARAMS, max_seq_len=72, requests=(2, 4), chunks=(17, 40, 64), budgets=(40, 80))
# for slower instruction sets: no prompt that fills a page of 64
SHORT = Script(
    [prompt for prompt in PROMPTS if len(prompt) < 36], PARAMS, 40, requests=(2, 3), chunks=(9, 17), budgets=(24,)
)


def read_smollm2(layers: int = 30) -> Checkpoint:
    """The model of the store, as float32; or its first layers alone."""
    with open_weights(ModelStore().resolve("smollm2-135m-instruct").path) as source:
        return Checkpoint("smollm2", {**source.config, "num_hidden_layers": layers}, source.read)


def play(
    checkpoint: Checkpoint,
    kind: str,
    isa: str,
    counts: Mapping[str, int],
    threads: Sequence[int],
    few: int,
    script: Script = SCRIPT,
) -> None:
    """Schedules of one format on one instruction set: so many for each KV type, with the numbers of threads in turn.

    Fails where requests differ from themselves alone on the fewest of these threads, or where something never happened,
    in as many schedules more either.
    """
    gc.collect()  # the engines of the format before
    packed = {count: checkpoint.load(kind, isa, count) for count in sorted({*threads})}
    seen: Counter[str] = Counter()
    for kv_dtype, count in counts.items():
        parts = {number: checkpoint.parts(model, kv_dtype) for number, model in packed.items()}
        stage = Stage(script, parts, seen)
        for number in range(count):
            stage.play(random.Random(f"{isa} {kind} {kv_dtype} {number}"), threads[number % len(threads)], few)
    rare = ("trees", "copies") if few else ()  # few answers may all be too short for a tree, or share no page in part
    happens = [what for what in WHAT_HAPPENS if what not in rare]
    wanted, more = sum(counts.values()), 0
    while 10 <= wanted > more and not all(seen[what] for what in happens):
        stage.play(random.Random(f"{isa} {kind} more {more}"), threads[0], few)
        more += 1
    assert seen["schedules"] == wanted + more
    assert wanted < 10 or all(seen[what] for what in happens), seen
