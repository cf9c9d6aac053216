"""Suffix drafts as trees, as chains, and none: an agent's tickets, new ones in each turn, the three in random order.

python benchmarks/draft_trees.py 4 --turns 9 --tokens 64
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median

from octavo.core.params import SamplingParams
from octavo.decoding.speculation import Speculator, make_speculator
from octavo.engine.llm import LLM
from octavo.tokenizers.chat import encode_chat

WHO, WHERE = ("Anna", "Bert", "Clara", "Dora", "Emil", "Fritz"), ("Bonn", "Lindau", "Kiel", "Ulm")
WHAT = ("the printer is broken", "nobody can log in", "an invoice is missing", "the screen is black", "mail is late")
KEYS = '"name", "city", "problem", "status", "priority", "next step"'


def ticket(number: int) -> str:
    """What a request asks for."""
    dice = random.Random(number)
    said = f"{dice.choice(WHO)} from {dice.choice(WHERE)} says that {dice.choice(WHAT)}"
    return f"Write this ticket as JSON with the keys {KEYS}: {said}."


def main() -> None:
    """Print tokens a second of each way, their ratio to chains turn by turn, and what became of the drafts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("streams", type=int)
    parser.add_argument("--turns", type=int, default=9, help="the first third is not counted")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--most", type=int, default=8, help="drafts of a sequence in one step")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    asked = parser.parse_args()
    llm = LLM(asked.model, max_seq_len=1024, max_running_requests=asked.streams, say=lambda line: None)
    ways: dict[str, Speculator | None] = {
        "none": None,
        "chains": make_speculator("suffix", asked.most),
        "trees": make_speculator("suffix", asked.most, tree=True),
    }
    params = SamplingParams(temperature=0.0, max_tokens=asked.tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(asked.turns):
        tickets = [ticket(turn * asked.streams + i) for i in range(asked.streams)]
        prompts = [encode_chat(llm.tokenizer, [{"role": "user", "content": each}]) for each in tickets]
        llm.loaded.core.speculator, said = None, None
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1))  # all three find the prompts computed
        for name in random.Random(turn).sample(list(ways), len(ways)):
            llm.loaded.core.speculator = ways[name]
            begun = time.perf_counter()
            outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            rates[name].append(asked.streams * asked.tokens / (time.perf_counter() - begun))
            assert said in (None, outputs), "the tokens differ"
            said = outputs
    for name, speculator in ways.items():
        counted = slice(asked.turns // 3, None)
        pairs = zip(rates[name][counted], rates["chains"][counted], strict=True)
        ratios = " ".join(f"{rate / chains:.2f}" for rate, chains in pairs)
        print(
            f"{asked.streams} streams, {name}: {median(rates[name][counted]):.0f} tokens/s; to chains {ratios}", end=""
        )
        stats = None if speculator is None else speculator.stats
        print(f"; steps {stats.steps}, drafts {stats.drafted}, drawn {stats.accepted}" if stats else "")


if __name__ == "__main__":
    main()
