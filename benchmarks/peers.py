"""The peers that a comparison runs beside us, where they are installed. Nothing is assumed of one that is not.

llama.cpp   LLAMA_BENCH=path of llama-bench, and GGUF files in LLAMA_GGUF_BF16, LLAMA_GGUF_Q8_0, LLAMA_GGUF_Q4_0
OpenVINO    OPENVINO_PYTHON=Python of a venv with openvino-genai, OPENVINO_MODELS=exported folders, with commas between
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["LlamaBench", "OpenVINO", "PeerFailed"]

_TIMEOUT_S = 300


class PeerFailed(Exception):
    """A peer that was named did not run; the message is its own."""


def _json_of(command: list[str], environment: dict[str, str]) -> Any:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, env={**os.environ, **environment}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailed(f"{command[0]}: {error}") from error
    if done.returncode:
        raise PeerFailed(f"{command[0]} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    try:
        return json.loads(done.stdout[done.stdout.index("[" if "[" in done.stdout else "{") :])
    except ValueError as error:
        raise PeerFailed(f"{command[0]} printed no JSON: {done.stdout[-300:]}") from error


class LlamaBench:
    """llama-bench: one stream (128 tokens from an empty context) and prefill, by GGUF type."""

    name = "llama.cpp"
    formats = ("BF16", "Q8_0", "Q4_0")

    def __init__(self, threads: int) -> None:
        self.binary, self.threads = os.environ.get("LLAMA_BENCH", ""), threads
        found = {kind: os.environ.get(f"LLAMA_GGUF_{kind}", "") for kind in self.formats}
        self.files = {kind: path for kind, path in found.items() if path and self.binary}

    def run(self) -> dict[str, float]:
        """`stream KIND` and `prefill N`: tokens a second, one run of each."""
        values: dict[str, float] = {}
        for kind, path in self.files.items():
            command = [self.binary, "-m", path, "-t", str(self.threads), "-p", "512,1024", "-n", "128", "-r", "1"]
            folder = str(Path(self.binary).resolve().parent)
            for test in _json_of([*command, "-o", "json"], {"LD_LIBRARY_PATH": folder}):
                speed = float(test["avg_ts"])
                if test["n_gen"]:
                    values[f"stream {kind}"] = speed
                else:
                    key = f"prefill {test['n_prompt']}"
                    values[key] = max(values.get(key, 0.0), speed)  # its best type
        return values


class OpenVINO:
    """OpenVINO GenAI in its own process: batches of 16 and 64, prefill, the shared prefix. The best of its models."""

    name = "OpenVINO GenAI"

    def __init__(self, threads: int) -> None:
        self.python, self.threads = os.environ.get("OPENVINO_PYTHON", ""), threads
        named = os.environ.get("OPENVINO_MODELS", "").split(",")
        self.files = {path: path for path in named if path and self.python}

    def run(self) -> dict[str, float]:
        """`batch N`, `prefill N`, `stream`: tokens a second; `prefix`: runs a second of the shared prefix."""
        script = str(Path(__file__).with_name("peer_openvino.py"))
        best: dict[str, float] = {}
        for path in self.files:
            for key, value in _json_of([self.python, script, path, str(self.threads)], {}).items():
                best[key] = max(best.get(key, 0.0), float(value))
        return best
