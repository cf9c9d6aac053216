"""Streaming clients of a `/v1/completions` server, light enough to share its cores: HTTP/1.1 over plain sockets.

    python benchmarks/load_client.py http://127.0.0.1:8000 [--model NAME] [--clients 16] [--seed 1]

The load: 64 requests, 32 to 512 tokens in and 16 to 128 out, always the same lengths; texts are drawn from a seed, out
of words that are one token each. Clients take the requests in order and wait for one answer before the next.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from octavo.core.errors import OctavoError

__all__ = ["Answer", "Asked", "ask", "one_token_words", "requests", "run", "summary", "tokenizer_of"]

_LENGTHS_SEED = 7  # 15,554 tokens in, 4,490 out
_TIMEOUT_S = 120.0


class LoadFailed(OctavoError):
    """The server answered something else than what was asked for."""


@dataclass(frozen=True)
class Asked:
    """A prompt and how many tokens to answer with."""

    prompt: str
    tokens: int
    output: int


@dataclass
class Answer:
    """When it was asked for, when each piece came (seconds), and how many tokens the server counts."""

    begin: float
    pieces: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0


def one_token_words(tokenizer: Any, most: int = 4000) -> list[str]:
    """Lower-case words with their space, each one token wherever it stands."""
    ids = ((token, tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
    words = (text.decode() for _, text in ids if re.fullmatch(rb" [a-z]{4,9}", text))
    kept = [word for word, _ in zip(words, range(most), strict=False)]
    if len(tokenizer.encode("".join(kept))) != len(kept):
        kept = [word for word in kept if len(tokenizer.encode(word)) == 1]
    return kept


def tokenizer_of(model: str) -> Any:
    """The tokenizer of a model as `--model` names it, without its weights."""
    from octavo.tokenizers.load import from_folder, from_gguf_metadata
    from octavo.weights.names import open_weights
    from octavo.weights.store import ModelStore

    path = ModelStore(None, False).resolve(model).path
    return from_folder(path) if path.is_dir() else from_gguf_metadata(open_weights(path).metadata)


def requests(words: Sequence[str], seed: int, count: int = 64) -> list[Asked]:
    """The load, with the texts of `seed`."""
    lengths, rng = random.Random(_LENGTHS_SEED), random.Random(f"load/{seed}")
    pairs = [(lengths.randint(32, 512), lengths.randint(16, 128)) for _ in range(count)]
    return [Asked("".join(rng.choice(words) for _ in range(size)), size, output) for size, output in pairs]


async def ask(url: str, model: str, wanted: Asked, saw_gap: Callable[[float], None] = lambda seconds: None) -> Answer:
    """One streamed answer over a connection of its own. Raises LoadFailed, OSError."""
    body = {
        "model": model,
        "prompt": wanted.prompt,
        "max_tokens": wanted.output,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    address = urlsplit(url)
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        answer = Answer(time.perf_counter())
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        status = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.split(b"\r\n")[0]:
            raise LoadFailed(f"{url}: {(status + await reader.read(300)).decode(errors='replace')}")
        async for line in _lines(reader):
            before = len(answer.pieces)
            if _take(answer, line):
                return answer
            if len(answer.pieces) > max(before, 1):
                saw_gap(answer.pieces[-1] - answer.pieces[-2])
    finally:
        writer.close()
    raise LoadFailed(f"{url}: the stream broke off after {len(answer.pieces)} pieces")


async def _lines(reader: asyncio.StreamReader) -> Any:
    """Lines of the body. The sizes of chunks are lines of their own here and nothing else looks at them."""
    while line := await reader.readline():
        yield line


def _take(answer: Answer, line: bytes) -> bool:
    """Read one line of a stream; whether it was the last."""
    if not line.startswith(b"data:"):
        return False
    now = time.perf_counter()
    text = line[5:].strip()
    if text == b"[DONE]":
        return True
    found = json.loads(text)
    if "error" in found:
        raise LoadFailed(text.decode(errors="replace"))
    if found.get("usage"):
        answer.tokens, answer.prompt_tokens = found["usage"]["completion_tokens"], found["usage"]["prompt_tokens"]
    choices = found.get("choices")
    if choices and (choices[0].get("text") or choices[0].get("finish_reason") is None):
        answer.pieces.append(now)
    return False


async def _clients(url: str, model: str, load: Sequence[Asked], clients: int) -> tuple[list[Answer], float]:
    waiting: Iterator[Asked] = iter(load)
    answers: list[Answer] = []

    async def client() -> None:
        for wanted in waiting:
            answer = await asyncio.wait_for(ask(url, model, wanted), _TIMEOUT_S)
            if (answer.tokens, answer.prompt_tokens) != (wanted.output, wanted.tokens):
                got = f"{answer.prompt_tokens} in and {answer.tokens} out"
                raise LoadFailed(f"{url}: {got}, wanted {wanted.tokens} in and {wanted.output} out")
            answers.append(answer)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return answers, time.perf_counter() - begin


def run(url: str, model: str, load: Sequence[Asked], clients: int = 16) -> dict[str, float]:
    """All of the load through some clients at once; see `summary`."""
    return summary(*asyncio.run(_clients(url, model, load, clients)))


def percentile(values: Sequence[float], part: float) -> float:
    """Between the two nearest, by distance; 0 without values."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    place = (len(ordered) - 1) * part
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summary(answers: Sequence[Answer], seconds: float) -> dict[str, float]:
    """Tokens a second, and the median and 95th percentile of first pieces and of the gaps between pieces, in ms."""
    first = [answer.pieces[0] - answer.begin for answer in answers if answer.pieces]
    gaps = [b - a for answer in answers for a, b in zip(answer.pieces, answer.pieces[1:], strict=False)]
    return {
        "tokens_per_s": sum(answer.tokens for answer in answers) / seconds,
        **{f"first_p{part}_ms": 1e3 * percentile(first, part / 100) for part in (50, 95)},
        **{f"gap_p{part}_ms": 1e3 * percentile(gaps, part / 100) for part in (50, 95)},
        "pieces": float(sum(len(answer.pieces) for answer in answers)),
    }


def main() -> None:
    """Run the load against a server and print what came."""
    from octavo.engine.config import EngineConfig

    parser = argparse.ArgumentParser(description="Sixteen streaming clients.")
    parser.add_argument("url")
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    load = requests(one_token_words(tokenizer_of(given.model)), given.seed)
    print(json.dumps(run(given.url, given.model, load, given.clients), indent=2))


if __name__ == "__main__":
    main()
