"""What llama.cpp's formats lose on a text, by its own tools: KL divergence against the same file as float32.

Its quantizer turns the model's GGUF file into F32 (the values that it stores), and into Q8_0 and Q4_0; its perplexity
tool writes the logits of the first and compares the others with them. It splits the text into chunks and counts the
positions of the second half of each.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PeerLoss", "PeerText", "Tools"]

_TIMEOUT_S = 600
_KL = re.compile(r"Mean\s+KLD:\s+([-0-9.naif]+)\s+±\s+([-0-9.naif]+)")
_PERPLEXITY = re.compile(r"(?:Mean PPL\(Q\)\s*:|Final estimate: PPL =)\s+([0-9.]+)")


@dataclass(frozen=True)
class PeerLoss:
    """Mean KL divergence in nats, its standard error, and the perplexity."""

    kl: float
    error: float
    perplexity: float


@dataclass(frozen=True)
class PeerText:
    """The text as the peer cut it: chunks of token ids, and the perplexity of the float32 weights."""

    chunks: list[list[int]]
    perplexity: float


class Tools:
    """llama-quantize and llama-perplexity in one folder; files that they make go into `work`."""

    def __init__(self, folder: Path, work: Path, chunks: int, say: Callable[[str], None]) -> None:
        self.folder, self.work, self.chunks, self.say = folder, work, chunks, say
        self.threads = os.cpu_count() or 1

    def quantize(self, source: Path, kind: str) -> Path:
        """A GGUF file in another type."""
        target = self.work / f"{kind}.gguf"
        self.say(f"llama.cpp: making {kind}")
        self._run("llama-quantize", ["--allow-requantize", str(source), str(target), kind, str(self.threads)])
        return target

    def base(self, model: Path, text: Path, window: int) -> PeerText:
        """Keep the logits of a text's first chunks, which `loss` compares with."""
        self.say("llama.cpp: logits of its float32 weights")
        told = self._perplexity(model, text, window, [])
        return PeerText(_chunks(self.work / "base.kld"), float(_found(_PERPLEXITY, told)[0]))

    def loss(self, model: Path, text: Path, window: int) -> PeerLoss:
        """Another file of the model on the same text."""
        self.say(f"llama.cpp: {model.stem}")
        told = self._perplexity(model, text, window, ["--kl-divergence"])
        kl, error = map(float, _found(_KL, told))
        return PeerLoss(kl, error, float(_found(_PERPLEXITY, told)[0]))

    def _perplexity(self, model: Path, text: Path, window: int, more: Sequence[str]) -> str:
        sizes = ["-c", str(window), "-b", str(window), "-t", str(self.threads), "--chunks", str(self.chunks)]
        base = ["--kl-divergence-base", str(self.work / "base.kld")]
        return self._run("llama-perplexity", ["-m", str(model), "-f", str(text), *sizes, *base, *more])

    def _run(self, tool: str, arguments: Sequence[str]) -> str:
        done = subprocess.run(
            [str(self.folder / tool), *arguments],
            capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S,
            env={**os.environ, "LD_LIBRARY_PATH": str(self.folder)},
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{tool} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return done.stdout + done.stderr


def _found(pattern: re.Pattern[str], told: str) -> tuple[str, ...]:
    match = pattern.search(told)
    if match is None:
        raise SystemExit(f"the peer's tool did not say {pattern.pattern}: {told.strip()[-300:]}")
    return match.groups()


def _chunks(path: Path) -> list[list[int]]:
    """Tokens of a file of logits: magic, window, vocabulary, chunks (int32 each), then the tokens."""
    with open(path, "rb") as file:
        magic, window, _, count = struct.unpack("<8siii", file.read(20))
        if magic != b"_logits_":
            raise SystemExit(f"{path.name} holds no logits")
        tokens = array("i")
        tokens.frombytes(file.read(4 * window * count))
    return [tokens[at * window : (at + 1) * window].tolist() for at in range(count)]
