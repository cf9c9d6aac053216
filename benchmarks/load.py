"""What loading costs: seconds by stage and peak resident memory, each model and format in a process of its own.

    python benchmarks/load.py MODEL [MODEL ...] [--formats bf16,w8g64] [--kv-memory 256MiB] [--json FILE]

The second of two processes counts: files are in the page cache then. Memory is counted after a step as large as the
plan allows, with logits of every row, and after every page was written: what is planned is what is used.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["load_record"]

STAGES = ("imports", "files", "tokenizer", "pack", "program")


def load_record(model: str, kind: str, kv_memory: str = "256MiB") -> dict[str, Any]:
    """Seconds of each stage, `ready` (the engine's constructor) and `process` (since the process was started); bytes of
    the plan's parts, `peak` and `interpreter` (resident before anything was loaded). Of the second of two processes."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--child",
        model,
        "--formats",
        kind,
        "--kv-memory",
        kv_memory,
    ]
    for _ in range(2):
        begun = ["--begun", str(time.time())]
        done = subprocess.run(command + begun, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def _child(model: str, kind: str, kv_memory: str, begun: float) -> None:
    begin = time.perf_counter()
    from octavo.engine.llm import LLM
    from octavo.weights import names  # noqa: F401 - NumPy with it

    seconds = {"imports": time.perf_counter() - begin}
    base = _resident("VmRSS")
    _watch(seconds)
    begin = time.perf_counter()
    llm = LLM(model, format=kind, kv_memory=kv_memory, say=lambda line: None)
    seconds |= {"ready": time.perf_counter() - begin, "process": time.time() - begun}
    _use_everything(llm)
    needs, plan = llm.loaded.plan.needs, llm.loaded.plan
    parts = {"weights": needs.weights, "kv": plan.kv, "activations": needs.activations, "logits": needs.workspace}
    memory = {**parts, "plan": plan.total, "peak": _resident("VmHWM"), "interpreter": base}
    print(json.dumps({"model": llm.loaded.parts.name, "format": kind, "seconds": seconds, "bytes": memory}))


def _watch(seconds: dict[str, float]) -> None:
    """Note how long each stage takes."""
    from octavo.backends.native_backend import NativeModel
    from octavo.engine import loader

    def note(owner: Any, name: str, stage: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - begin

        setattr(owner, name, timed)

    note(loader, "_open", "files")
    note(loader, "_tokenizer", "tokenizer")
    note(NativeModel, "load", "pack")
    note(NativeModel, "make_room", "program")


def _use_everything(llm: Any) -> None:
    """A step of all tokens with all logits, and every page written."""
    from octavo.core.params import SamplingParams

    loaded = llm.loaded
    vocab, size = loaded.parts.config.vocab_size, loaded.config.max_prefill_chunk
    count = -(-loaded.config.max_batched_tokens // size)
    prompts = [[(at * 7919 + place * 31) % vocab for place in range(size)] for at in range(count)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True))
    pool = loaded.core.scheduler.kv.store
    loaded.parts.backend.copy_pages(pool, [(0, page) for page in range(1, loaded.plan.num_pages)])


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _show(record: dict[str, Any]) -> str:
    seconds, size = record["seconds"], record["bytes"]
    stages = "  ".join(f"{stage} {seconds.get(stage, 0.0):.2f}" for stage in STAGES)
    whole = f"ready {seconds['ready']:.2f} s, process {seconds['process']:.2f} s"
    parts = " + ".join(f"{name} {size[name] / 1e6:.0f}" for name in ("weights", "kv", "activations", "logits"))
    share = f"peak {size['peak'] / 1e6:.0f} MB = {size['peak'] / size['plan']:.2f} x ({parts})"
    return f"{record['model']:24} {record['format']:9} {whole}  ({stages})\n{'':35}{share}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a pair of lines for each model and format."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--formats", default="bf16,w8g64")
    parser.add_argument("--kv-memory", default="256MiB")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--begun", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child:
        return _child(given.models[0], given.formats, given.kv_memory, given.begun)
    records = []
    for model in given.models:
        for kind in given.formats.split(","):
            records.append(load_record(model, kind, given.kv_memory))
            print(_show(records[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
