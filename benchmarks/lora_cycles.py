"""Loads and unloads adapters over and over while requests run: nothing leaks, nobody gets another one's tokens.

python benchmarks/lora_cycles.py --cycles 1000 [--backend native]

Prints resident memory, open files and threads at the start and in each tenth; ends with 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.params import SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.weights.safetensors import write_safetensors

TINY = str(Path(__file__).resolve().parents[1] / "fixtures" / "tiny_model.json")
PROMPT, PARAMS = [1, 9, 31, 44, 12], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MOST_GROWTH = 8 << 20  # bytes of resident memory from the second tenth to the last


def make_folder(folder: Path, projections: dict[str, tuple[int, ...]], seed: int) -> str:
    """An adapter of rank 4 with normal values."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, (n, k) in projections.items():
        for half, shape in (("A", (4, k)), ("B", (n, 4))):
            values = (rng.normal(size=shape) * 0.3).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values
    folder.mkdir()
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    return str(folder)


def state() -> tuple[int, int, int]:
    """Bytes of resident memory, open files, threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), threading.active_count()


async def ask(engine: AsyncEngine, digest: str) -> tuple[int, ...]:
    """The tokens of one answer."""
    tokens: list[int] = []
    async with aclosing(engine.generate(PROMPT, PARAMS, adapter=digest)) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
    return tuple(tokens)


async def cycle(engine: AsyncEngine, folder: str, known: dict[str, tuple[int, ...]]) -> None:
    """One adapter comes, is asked for and goes while its last request still runs."""
    await engine.load_adapter("it", folder)
    digest = next(each.digest for each in engine.adapters() if each.name == "it")
    asked = [asyncio.ensure_future(ask(engine, each)) for each in ("", digest, digest)]
    await asyncio.sleep(0)
    first = await asked[0]
    await engine.unload_adapter("it")
    for each, got in zip(("", digest, digest), (first, *[await task for task in asked[1:]]), strict=True):
        if known.setdefault(each, got) != got:
            raise SystemExit(f"the tokens of {each or 'the base model'} have changed: {known[each]} became {got}")


async def run(cycles: int, backend: str) -> None:
    """All cycles. Raises SystemExit for what is wrong."""
    config = EngineConfig(model=TINY, backend=backend, max_loras=2, max_lora_rank=8, max_seq_len=64, audit=True)
    with tempfile.TemporaryDirectory() as place:
        async with AsyncEngine.load(config, say=lambda line: None) as engine:
            projections = engine.loaded.parts.model.projections()
            folders = [make_folder(Path(place) / str(seed), projections, seed) for seed in range(7)]
            known: dict[str, tuple[int, ...]] = {}
            seen: list[tuple[int, int, int]] = [state()]
            for number in range(cycles):
                await cycle(engine, folders[number % len(folders)], known)
                if (number + 1) % max(1, cycles // 10) == 0:
                    seen.append(state())
                    size, files, threads = seen[-1]
                    print(f"{number + 1:6d} cycles: {size >> 20} MiB, {files} files, {threads} threads")
            pages: Any = engine.loaded.core.kv.usage().pages
    grown = seen[-1][0] - seen[min(2, len(seen) - 1)][0]
    if grown > MOST_GROWTH or seen[-1][1:] != seen[1][1:] or pages.referenced:
        raise SystemExit(f"something leaks: {grown} bytes, {seen[1]} became {seen[-1]}, {pages}")
    print(f"{cycles} cycles, {len(known)} kinds of answers, each always the same; {grown} bytes more at the end")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--backend", default="reference")
    given = parser.parse_args()
    asyncio.run(run(given.cycles, given.backend))
