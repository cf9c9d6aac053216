"""What an engine that forgets loses and saves: a hidden number, pages held, and tokens a second at long contexts.

    python benchmarks/lossy_engine.py [--model NAME] [--streams 8] [--prompt 2048] [--json FILE]

Retrieval: prompts as in lossy_kv.py's `snapkv`, through the engine. Perplexity: of a prompt, as it is read. Speed: so
many streams with prompts of that length, steps in which all of them decode.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.engine.config import EngineConfig
from octavo.engine.llm import LLM

TOPICS = ("specialnames", "compound", "types", "formatstrings", "string-methods", "typesseq")
KEPT = {
    "all": "",
    "4 first + last 252": "streaming_llm:sinks=4,window=252",
    "224 looked at + last 32": "snapkv:capacity=256,window=32",
    "96 looked at + last 32": "snapkv:capacity=128,window=32",
    "128 heavy + last 128": "h2o:heavy=128,recent=128,block=64",
}
READ = {
    "1 first + last 407": "streaming_llm:sinks=1,window=407",
    "4 first + last 404": "streaming_llm:sinks=4,window=404",
    "204 heavy + last 204": "h2o:heavy=204,recent=204,block=32",
    "204 heavy + last 204 by 64": "h2o:heavy=204,recent=204,block=64",
}
FAST = {
    "4 first + last 252": "streaming_llm:sinks=4,window=252",
    "224 looked at + last 32": "snapkv:capacity=256,window=32",
    "128 heavy + last 128": "h2o:heavy=128,recent=128,block=64",
}


def needle(encode: Any, text: str, number: int, length: int) -> tuple[list[int], str]:
    """A prompt of about ``length`` tokens with a pass key at a depth of its own, and what is to follow it."""
    key = str(10_000 + (number + 1) * 7919 % 90_000)
    hidden = encode(f"\n\nThe pass key is {key}. Remember it: {key} is the pass key.\n\n")
    question = encode("\n\nWhat is the pass key? The pass key is")
    room = length - len(hidden) - len(question)
    filler = encode(text[number * 9000 : number * 9000 + 8 * room])[:room]
    depth = room * (2 * number + 1) // 20
    return [*filler[:depth], *hidden, *filler[depth:], *question], f" {key}"


def retrieval(model: str, *, prompts: int = 8, length: int = 1024) -> dict[str, Any]:
    """Nats for each token of the answer, which a grammar forces, and how often all of them were the likeliest."""
    text, rows = "\n".join(topics[name] for name in TOPICS), {}
    for name, asked in KEPT.items():
        llm = LLM(model, kv_eviction=asked, max_seq_len=length + 64, say=lambda line: None)
        nats, said = [], 0
        for number in range(prompts):
            prompt, answer = needle(llm.loaded.parts.tokenizer.encode, text, number, length)
            grammar = Grammar("choice", json.dumps([answer]))
            params = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, grammar=grammar)
            logprobs = llm.generate([prompt], params)[0].outputs[0].logprobs or ()
            drawn = logprobs[: len(answer)]  # a digit is a token; what follows is the end
            nats += [-entry.logprob for entry in drawn]
            said += all(entry.rank == 1 for entry in drawn)
        rows[name] = {"nats a token": round(statistics.mean(nats), 3), "said": said}
        print("retrieval", name, rows[name], file=sys.stderr, flush=True)
    return {"prompt tokens": length, "prompts": prompts, "answers": rows}


def perplexity(model: str, *, length: int = 2048, budget: int = 408) -> dict[str, Any]:
    """Of a text that is read with a fifth of it kept: of the tokens past that."""
    rows = {}
    for name, asked in {"all": "", **READ}.items():
        llm = LLM(model, kv_eviction=asked, max_seq_len=length + 64, say=lambda line: None)
        ids = llm.loaded.parts.tokenizer.encode("\n".join(topics[name] for name in TOPICS))[: length + 1]
        (output,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
        known = [entry.logprob for entry in output.prompt_logprobs or () if entry is not None]
        rows[name] = round(math.exp(-statistics.mean(known[budget:])), 3)
        print("perplexity", name, rows[name], file=sys.stderr, flush=True)
    return {"tokens": length, "budget": budget, "perplexity past the budget": rows}


def speed(model: str, *, streams: int = 8, length: int = 2048, outputs: int = 48) -> dict[str, Any]:
    """Medians over steps in which all streams decode; pages that they hold then; seconds until the last begins."""
    text, rows = "\n".join(topics[name] for name in TOPICS), {}
    for name, asked in {"all": "", **FAST}.items():
        options = {"max_running_requests": streams, "prefix_cache": False, "max_seq_len": length + outputs}
        llm = LLM(model, kv_eviction=asked, say=lambda line: None, **options)
        core, ids = llm.loaded.core, llm.loaded.parts.tokenizer.encode(text)
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        for i in range(streams):
            core.submit(Request(f"r{i}", ids[i * 64 : i * 64 + length], params), 0.0)
        begun, steps = time.perf_counter(), []
        while core.has_work:
            before = time.perf_counter()
            core.step(0.0)
            steps.append(
                (time.perf_counter() - before, core.metrics.scheduled_tokens, core.kv.usage().pages.referenced)
            )
        counts = [now - then for (_, then, _), (_, now, _) in itertools.pairwise(steps)]
        decodes = [step for step, count in zip(steps[1:], counts, strict=True) if count == streams][4:]
        first = sum(seconds for seconds, *_ in steps[: len(steps) - len(decodes)])
        rows[name] = {
            "tokens a second": round(streams / statistics.median(seconds for seconds, *_ in decodes), 1),
            "pages": max(pages for *_, pages in decodes),
            "seconds before": round(first, 2),
        }
        print("speed", name, rows[name], f"{time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)
        core.close()
    return {"streams": streams, "prompt tokens": length, "page tokens": 16, "rows": rows}


def main() -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default=EngineConfig.model)
    parser.add_argument("--only", default="retrieval,perplexity,speed")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--json", type=Path, help="results; what it has of the other section stays")
    given = parser.parse_args()
    found = json.loads(given.json.read_text("utf-8")) if given.json and given.json.exists() else {}
    found["model"] = given.model
    if "retrieval" in given.only:
        found["retrieval"] = retrieval(given.model)
    if "perplexity" in given.only:
        found["perplexity"] = perplexity(given.model)
    if "speed" in given.only:
        found["speed"] = speed(given.model, streams=given.streams, length=given.prompt)
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
