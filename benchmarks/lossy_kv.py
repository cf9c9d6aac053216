"""What a model loses when its KV cache forgets: windows, sinks, heavy hitters, compressed prompts, few bits.

    python benchmarks/lossy_kv.py [--only window,h2o,snapkv,kivi] [--json FILE]

The text is the standard library's own help (`pydoc_data.topics`), in fp32 on the numpy backend, fed in chunks; after
each chunk every layer and kv head drops what its policy (`octavo.core.kv_eviction`) does not keep. A chunk sees itself
and what was kept before it. Perplexity counts the same tokens in every row of a table.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.numpy_backend import NumpyBackend
from octavo.backends.ops import ForwardBatch, RopeTable
from octavo.core.kv_eviction import heavy_hitters, kept_after_prompt, sinks_and_recent
from octavo.engine.config import EngineConfig
from octavo.engine.loader import load_parts

Floats = NDArray[np.float32]
Keep = Callable[[Sequence[float]], Sequence[int]]  # scores of what a head has cached -> places that stay
Groups = Callable[[Floats], Floats]  # K or V [kv heads, n, D] -> the same after quantization

SINKS = 4
SEEN = 32  # tokens at the end of a prompt that say what is looked at
SECTIONS = ("window", "h2o", "snapkv", "kivi")
TOPICS = ("specialnames", "compound", "types", "formatstrings", "string-methods", "typesseq")


@dataclass
class HeadCache:
    """One layer: keys (rotated at their positions) and values [kv heads, n, D], and of each what looked at it."""

    keys: Floats
    values: Floats
    positions: NDArray[np.int64]  # [kv heads, n]
    scores: Floats  # [kv heads, n] attention weight summed over queries and the query heads of the group

    def take(self, places: NDArray[np.int64]) -> None:
        """Keep these places [kv heads, m]."""
        whole = places[..., None]
        self.keys = np.take_along_axis(self.keys, whole, 1)
        self.values = np.take_along_axis(self.values, whole, 1)
        self.positions = np.take_along_axis(self.positions, places, 1)
        self.scores = np.take_along_axis(self.scores, places, 1)


class ForgetfulBackend(NumpyBackend):
    """The numpy backend with a KV cache of its own, which forgets; one sequence."""

    def __init__(self, sinks: int = 0, keys: Groups | None = None, values: Groups | None = None) -> None:
        """``sinks``: the first tokens stay as near as the cache is long. ``keys``, ``values``: lose bits in a chunk."""
        self.sinks, self.store_keys, self.store_values = sinks, keys, values
        self.layers: dict[int, HeadCache] = {}
        self.turn: Callable[[int], Floats] | None = None

    def rope(
        self, q: Floats, k: Floats, batch: ForwardBatch, *, rope: RopeTable, head_dim: int
    ) -> tuple[Floats, Floats]:
        """As always; `turn` gives the queries as they are some positions nearer to the beginning."""

        def turn(nearer: int) -> Floats:
            moved = replace(batch, positions=batch.positions - nearer, cache={})
            return NumpyBackend.rope(self, q, k, moved, rope=rope, head_dim=head_dim)[0]

        self.turn = turn
        return super().rope(q, k, batch, rope=rope, head_dim=head_dim)

    def write_kv(self, k: Floats, v: Floats, batch: ForwardBatch, *, layer: int) -> None:
        """Append to what the layer has."""
        heads = self.kv_heads
        new_k, new_v = (each.reshape(len(each), heads, -1).transpose(1, 0, 2) for each in (k, v))
        positions = np.broadcast_to(batch.positions, (heads, len(k)))
        fresh = HeadCache(new_k, new_v, positions, np.zeros((heads, len(k)), np.float32))
        held = self.layers.get(layer, fresh)
        if held is not fresh:
            fresh = HeadCache(*(np.concatenate(pair, 1) for pair in zip(*map(_parts, (held, fresh)), strict=True)))
        self.layers[layer] = fresh

    def attention(
        self, q: Floats, batch: ForwardBatch, *, layer: int, scale: float, head_dim: int, **rest: Any
    ) -> Floats:
        """Over what is cached; each key's score grows by the weight that it got."""
        held, rows = self.layers[layer], len(q)
        logits = _logits(q, held.keys, head_dim)
        dropped = int(batch.positions[0]) + rows - held.keys.shape[1]
        if self.sinks and dropped > 0 and self.turn is not None:  # the sinks are as near as the cache is long
            logits[..., : self.sinks] = _logits(self.turn(dropped), held.keys[:, : self.sinks], head_dim)
        hidden = held.positions[:, None, None] > batch.positions[:, None]
        logits = np.where(hidden, -np.inf, logits * np.float32(scale))
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)  # [kv heads, group, T, n]
        held.scores = held.scores + weights.sum(axis=(1, 2))
        seen = weights @ held.values[:, None]
        return np.ascontiguousarray(seen.transpose(2, 0, 1, 3)).reshape(rows, -1)

    def end_chunk(self, keep: Keep | None, size: int) -> None:
        """Lose bits of the last ``size`` tokens, and all that ``keep`` does not name."""
        for held in self.layers.values():
            for name, lose in (("keys", self.store_keys), ("values", self.store_values)):
                if lose is not None:
                    part = getattr(held, name)
                    setattr(held, name, np.concatenate([part[:, :-size], lose(part[:, -size:])], 1))
            if keep is not None:
                held.take(np.array([keep(scores.tolist()) for scores in held.scores], np.int64))

    def forget_scores(self) -> None:
        """Nobody has looked at anything."""
        for held in self.layers.values():
            held.scores = np.zeros_like(held.scores)

    kv_heads = 1


def _parts(cache: HeadCache) -> tuple[Any, ...]:
    return cache.keys, cache.values, cache.positions, cache.scores


def _logits(q: Floats, keys: Floats, head_dim: int) -> Floats:
    """[T, heads * D] with [kv heads, n, D] -> [kv heads, group, T, n]."""
    shaped = q.reshape(len(q), len(keys), -1, head_dim).transpose(1, 2, 0, 3)
    product: Floats = shaped @ keys[:, None].swapaxes(2, 3)
    return product


class Reader:
    """The model, fed chunk by chunk."""

    def __init__(self, model: str) -> None:
        self.parts = load_parts(EngineConfig(model=model, backend="numpy"))
        ForgetfulBackend.kv_heads = self.parts.config.num_kv_heads

    def read(self, backend: ForgetfulBackend, ids: Sequence[int], start: int, *, every_row: bool = True) -> Floats:
        """Logits of tokens that stand from ``start`` on: [T, V], or those of the last."""
        rows = np.arange(len(ids)) if every_row else np.array([len(ids) - 1])
        empty: Any = ()
        positions = np.arange(start, start + len(ids))
        batch = ForwardBatch(np.asarray(ids), positions, empty, empty, empty, empty, rows, None)
        logits: Floats = self.parts.model.forward(backend, self.parts.weights, batch)
        return logits

    def losses(
        self, backend: ForgetfulBackend, ids: Sequence[int], chunk: int, keep: Keep | None
    ) -> NDArray[np.float64]:
        """-log p of tokens 1 .. n - 1."""
        found = []
        for start in range(0, len(ids) - 1, chunk):
            part = ids[start : start + chunk]
            found.append(_loss(self.read(backend, part, start), ids[start + 1 : start + 1 + len(part)]))
            backend.end_chunk(keep, len(part))
        return np.concatenate(found)


def _loss(logits: Floats, nexts: Sequence[int]) -> NDArray[np.float64]:
    wide = logits[: len(nexts)].astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    loss: NDArray[np.float64] = np.log(np.exp(wide).sum(axis=1)) - wide[np.arange(len(nexts)), nexts]
    return loss


def _perplexity(losses: NDArray[np.float64]) -> float:
    return round(float(np.exp(losses.mean())), 3)


# ---- what is measured


def window(reader: Reader, ids: Sequence[int], *, cache: int = 256, length: int = 4096) -> dict[str, Any]:
    """A window with and without sinks, far past the window: perplexity of each 512 tokens."""
    rows = {}
    for name, sinks in (("all", -1), (f"last {cache}", 0), (f"4 first + last {cache - 4}", 4)):
        keep = None if sinks < 0 else partial(_by_count, partial(sinks_and_recent, sinks=sinks, recent=cache - sinks))
        losses = reader.losses(ForgetfulBackend(max(sinks, 0)), ids[: length + 1], 32, keep)
        rows[name] = [_perplexity(losses[at : at + 512]) for at in range(0, length, 512)]
        print("window", name, rows[name], file=sys.stderr, flush=True)
    return {"cache": cache, "tokens": length, "perplexity of each 512 tokens": rows}


def _by_count(keep: Callable[[int], Sequence[int]], scores: Sequence[float]) -> Sequence[int]:
    return keep(len(scores))


def h2o(reader: Reader, ids: Sequence[int], *, length: int = 2048) -> dict[str, Any]:
    """A fifth of the tokens: half of it the heavy hitters, against all of it the most recent."""
    budget = length // 5
    half = budget // 2
    kept: dict[str, tuple[int, Keep | None]] = {
        "all": (0, None),
        f"last {budget}": (0, partial(_by_count, partial(sinks_and_recent, sinks=0, recent=budget))),
        f"4 first + last {budget - 4}": (4, partial(_by_count, partial(sinks_and_recent, sinks=4, recent=budget - 4))),
        f"{budget - half} heavy + last {half}": (0, partial(heavy_hitters, heavy=budget - half, recent=half)),
    }
    rows = {}
    for name, (sinks, keep) in kept.items():
        losses = reader.losses(ForgetfulBackend(sinks), ids[: length + 1], 32, keep)
        rows[name] = _perplexity(losses[budget:])  # before that everything is kept
        print("h2o", name, rows[name], file=sys.stderr, flush=True)
    return {"budget": budget, "tokens": length, "perplexity past the budget": rows}


def snapkv(reader: Reader, text: str, *, prompts: int = 8, length: int = 1024) -> dict[str, Any]:
    """A number hidden in a prompt of which little is kept: -log p of the number, and how often it is said."""
    kept = {"all": (0, _all)}
    for capacity in (length // 8, length // 4):
        kept |= _compressed(capacity)
    found: dict[str, list[tuple[float, bool]]] = {name: [] for name in kept}
    for number in range(prompts):
        prompt, answer = _needle(reader, text, number, length)
        prompted = _prompted(reader, prompt)
        for name, (sinks, keep) in kept.items():
            found[name].append(_answered(reader, prompted, len(prompt), answer, keep, sinks))
        print("snapkv", {name: each[-1] for name, each in found.items()}, file=sys.stderr, flush=True)
    rows = {
        name: {"nats a token": _mean(each, 0), "said": sum(said for _, said in each)} for name, each in found.items()
    }
    return {"prompt tokens": length, "prompts": prompts, "answers": rows}


def _all(scores: Sequence[float]) -> Sequence[int]:
    return range(len(scores))


def _mean(answers: Sequence[tuple[float, bool]], at: int) -> float:
    return round(float(np.mean([answer[at] for answer in answers])), 3)


def _compressed(capacity: int) -> dict[str, tuple[int, Keep]]:
    """Ways to keep so many tokens of a prompt, with the number of sinks."""
    recent, behind = sinks_and_recent, capacity - SINKS
    looked_at = partial(kept_after_prompt, capacity=capacity, window=SEEN)
    return {
        f"last {capacity}": (0, partial(_by_count, partial(recent, sinks=0, recent=capacity))),
        f"{SINKS} first + last {behind}": (SINKS, partial(_by_count, partial(recent, sinks=SINKS, recent=behind))),
        f"{capacity - SEEN} looked at + last {SEEN}": (0, looked_at),
    }


def _needle(reader: Reader, text: str, number: int, length: int) -> tuple[list[int], list[int]]:
    """A prompt of about ``length`` tokens with a pass key at a depth of its own, and the tokens of the key."""
    encode = reader.parts.tokenizer.encode
    key = str(10_000 + (number + 1) * 7919 % 90_000)
    needle = encode(f"\n\nThe pass key is {key}. Remember it: {key} is the pass key.\n\n")
    question = encode("\n\nWhat is the pass key? The pass key is")
    answer = encode(f" {key}")
    room = length - len(needle) - len(question)
    filler = encode(text[number * 9000 : number * 9000 + 8 * room])[:room]
    depth = room * (2 * number + 1) // 20
    return [*filler[:depth], *needle, *filler[depth:], *question], answer


def _prompted(reader: Reader, prompt: Sequence[int]) -> tuple[ForgetfulBackend, Floats]:
    """Everything cached, with what its last tokens looked at; the logits of the last."""
    seen = SEEN
    backend = ForgetfulBackend()
    for start in range(0, len(prompt) - seen, 256):
        reader.read(backend, prompt[start : min(start + 256, len(prompt) - seen)], start, every_row=False)
    backend.forget_scores()
    return backend, reader.read(backend, prompt[-seen:], len(prompt) - seen, every_row=False)


def _answered(
    reader: Reader, prompted: tuple[ForgetfulBackend, Floats], start: int, answer: Sequence[int], keep: Keep, sinks: int
) -> tuple[float, bool]:
    """Mean -log p of the answer's tokens, and whether each was the likeliest."""
    whole, last = prompted
    backend = ForgetfulBackend(sinks)
    backend.layers = {layer: HeadCache(*_parts(held)) for layer, held in whole.layers.items()}
    backend.end_chunk(keep, 0)
    logits = np.concatenate([last, reader.read(backend, answer[:-1], start)])
    return float(_loss(logits, answer).mean()), bool((logits.argmax(axis=1) == answer).all())


def kivi(reader: Reader, ids: Sequence[int], *, length: int = 1024) -> dict[str, Any]:
    """Few bits, in groups of 32 values along the tokens (a channel's) or along the channels (a token's)."""
    exact = ForgetfulBackend()
    rows = {"fp32": _perplexity(reader.losses(exact, ids[: length + 1], 32, None)[32:])}
    errors: dict[str, float] = {}
    for bits in (2, 4):
        for keys, values in (("channel", "token"), ("token", "token"), ("channel", "channel"), ("token", "channel")):
            name = f"{bits} bits, keys per {keys}, values per {values}"
            lossy_keys = partial(_rounded, bits=bits, along=1 if keys == "channel" else 2)
            lossy_values = partial(_rounded, bits=bits, along=1 if values == "channel" else 2)
            losses = reader.losses(ForgetfulBackend(0, lossy_keys, lossy_values), ids[: length + 1], 32, None)
            rows[name] = _perplexity(losses[32:])
            print("kivi", name, rows[name], file=sys.stderr, flush=True)
    for bits in (2, 4):
        for along, name in ((1, "channel"), (2, "token")):
            for what in ("keys", "values"):
                errors[f"{bits} bits, {what} per {name}"] = _rms_error(exact, what, bits, along)
    return {"tokens": length, "group": 32, "perplexity": rows, "relative rms error": errors}


def _rounded(x: Floats, *, bits: int, along: int) -> Floats:
    """[kv heads, n, D] rounded to ``2 ** bits`` even steps between least and most of each 32 values along an axis."""
    moved = np.moveaxis(x, along, -1)
    if moved.shape[-1] % 32:
        return x  # the rest of the text: KIVI keeps what fills no group
    groups = moved.reshape(*moved.shape[:-1], -1, 32)
    low = groups.min(axis=-1, keepdims=True)
    step = np.maximum((groups.max(axis=-1, keepdims=True) - low) / np.float32(2**bits - 1), np.float32(1e-12))
    rounded = np.rint((groups - low) / step) * step + low
    return np.ascontiguousarray(np.moveaxis(rounded.reshape(moved.shape), -1, along)).astype(np.float32)


def _rms_error(exact: ForgetfulBackend, what: str, bits: int, along: int) -> float:
    errors, sizes = 0.0, 0.0
    for held in exact.layers.values():
        plain = getattr(held, what)
        errors += float(((plain - _rounded(plain, bits=bits, along=along)) ** 2).sum())
        sizes += float((plain**2).sum())
    return round((errors / sizes) ** 0.5, 4)


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--json", type=Path, help="results; what it has of other sections stays")
    given = parser.parse_args()
    reader = Reader(given.model)
    text = "\n".join(topics[name] for name in TOPICS)
    ids = reader.parts.tokenizer.encode(text)
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "window": partial(window, reader, ids),
        "h2o": partial(h2o, reader, ids),
        "snapkv": partial(snapkv, reader, text),
        "kivi": partial(kivi, reader, ids),
    }
    found = json.loads(given.json.read_text("utf-8")) if given.json and given.json.exists() else {}
    found |= {"model": given.model, "text": f"pydoc_data.topics of Python {platform.python_version()}"}
    found |= {name: run[name]() for name in given.only.split(",")}
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
