"""What adapters cost: the time of a step of 64 rows without any, and with 8 adapters of rank 16 among them, in turns.

python benchmarks/lora.py [--format w8g64] [--rounds 7] [--write]

``all``: every projection is adapted; ``q, v``: those that PEFT takes for Llama by itself. With --write into
benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.engine.config import EngineConfig
from octavo.engine.loader import load_engine
from octavo.weights.lora import CONFIG_NAME, WEIGHTS_NAME
from octavo.weights.safetensors import write_safetensors

ROWS, ADAPTERS, RANK, STEPS = 64, 8, 16, 10
KINDS: Mapping[str, tuple[str, ...]] = {"none": (), "q, v": ("q_proj", "v_proj"), "all": ("_proj",)}
RESULT = Path(__file__).parent / "results" / "lora-smollm2.txt"


def make_folder(folder: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> str:
    """An adapter with normal values."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, (n, k) in shapes.items():
        for half, shape in (("A", (RANK, k)), ("B", (n, RANK))):
            values = (rng.normal(size=shape) * 0.01).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values
    folder.mkdir()
    write_safetensors(folder / WEIGHTS_NAME, tensors)
    (folder / CONFIG_NAME).write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    return str(folder)


class Bench:
    """An engine with all adapters of all kinds loaded."""

    def __init__(self, model: str, fmt: str | None) -> None:
        settings: dict[str, Any] = {"max_loras": ADAPTERS * (len(KINDS) - 1), "max_lora_rank": RANK, "offline": True}
        settings |= {"max_seq_len": 256, "max_running_requests": ROWS, "prefix_cache": False, "format": fmt}
        self.loaded = load_engine(EngineConfig(model=model, backend="native", **settings), say=lambda line: None)
        self.core, self.asked = self.loaded.core, 0
        self.digests = {kind: [self._load(kind, seed) for seed in range(ADAPTERS)] for kind in KINDS if KINDS[kind]}

    def _load(self, kind: str, seed: int) -> str:
        shapes = self.loaded.parts.model.projections()
        adapted = {name: shape for name, shape in shapes.items() if name.endswith(KINDS[kind])}
        with tempfile.TemporaryDirectory() as folder:
            path = make_folder(Path(folder) / "it", adapted, seed)
            read = self.core.adapters.read(path)
        digest: str = self.core.load_adapter(f"{kind[0]}{seed}", path, read).digest
        return digest

    def step_ms(self, kind: str) -> float:
        """The median of some steps in which each of 64 requests decodes a token, in milliseconds."""
        rng = np.random.default_rng(7)
        for number in range(ROWS):
            self._submit([int(token) for token in rng.integers(10, 4000, size=16)], kind, number)
        for _ in range(6):
            self.core.step(0.0)
        times = []
        for _ in range(STEPS):
            begun = time.perf_counter()
            self.core.step(0.0)
            times.append(time.perf_counter() - begun)
        while self.core.has_work:
            self.core.step(0.0)
        return 1e3 * median(times)

    def _submit(self, prompt: list[int], kind: str, number: int) -> None:
        self.asked += 1
        digest = self.digests[kind][number % ADAPTERS] if kind in self.digests else ""
        params = SamplingParams(temperature=0.0, max_tokens=STEPS + 9, ignore_eos=True)
        parts = self.loaded.parts
        self.core.submit(
            Request(
                f"r{self.asked}",
                tuple(prompt),
                params,
                adapter=digest,
                namespace=parts.namespace("", digest),
                eos_token_ids=parts.config.eos_token_ids,
            ),
            0.0,
        )


def measure(bench: Bench, kinds: list[str], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a step, by kind and round."""
    bench.step_ms("none")
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in kinds[:: 1 - 2 * (number % 2)]:
            found[kind].append(bench.step_ms(kind))
    return found


def table(found: Mapping[str, list[float]], fmt: str) -> str:
    """One line for each kind: the medians of a round's step, and of a round's step over that without adapters."""
    lines = []
    for kind, times in found.items():
        over = median(mine / base for mine, base in zip(times, found["none"], strict=True))
        lines.append(f"{fmt:6} {kind:5} {median(times):7.2f} ms  {over:5.3f} of none  (least {min(times):.2f})")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kinds", default="none;q, v;all")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    found = table(measure(Bench(given.model, given.format), given.kinds.split(";"), given.rounds), given.format)
    print(found)
    if given.write:
        RESULT.write_text(f"{given.model}: {ROWS} rows, {ADAPTERS} adapters of rank {RANK}\n{found}\n")


if __name__ == "__main__":
    main()
