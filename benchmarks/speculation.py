"""Speculation against none: the same engine, pairs of runs, in turn.

python benchmarks/speculation.py copy 16 --tokens 64 --pairs 5 --method ngram
python benchmarks/speculation.py story 1 --draft-model smollm2-135m-instruct --quantization w4g32
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

from octavo.core.params import SamplingParams
from octavo.core.speculative_config import METHODS
from octavo.decoding.speculation import DraftControl
from octavo.engine.llm import LLM
from octavo.tokenizers.chat import encode_chat

TEXT = (
    "The harbour of Lindau lies at the eastern end of the lake. Its entrance is guarded by a lighthouse and a stone "
    "lion, both built in 1856. Every hour a white steamer leaves for Bregenz, Friedrichshafen and Constance; in winter "
    "only two boats a day make the crossing. The fishermen sell perch and whitefish on the quay before seven in the "
    "morning, and the baker on Maximilian Street opens at half past five. Anna Keller, who kept the ticket office for "
    "thirty-one years, wrote down the weather of each day in a green book of four hundred pages."
)
WHO, WHAT, WHERE = ("robot", "teacher", "sailor", "painter"), ("map", "clock", "letter"), ("desert", "attic", "river")


def asks(task: str, streams: int) -> list[str]:
    """What each stream is asked."""
    if task == "copy":
        return [f"Repeat this text word for word:\n\n{TEXT[i % 7 :]}" for i in range(streams)]
    stories = [f"Write a story about a {a} who finds a {b} in the {c}." for a in WHO for b in WHAT for c in WHERE]
    return [stories[i % len(stories)] for i in range(streams)]


def main() -> None:
    """Print tokens a second without and with, their ratio pair by pair, and what became of the drafts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("task", choices=("copy", "story"))
    parser.add_argument("streams", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--method", choices=METHODS, default="ngram")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--format", default="auto", help="of the model's weights")
    parser.add_argument("--temperature", type=float, help="0 for a copy, 0.8 for a story")
    parser.add_argument("--most", type=int, default=8, help="drafts of a sequence in one step")
    parser.add_argument("--anew", action="store_true", help="nothing is known of drafts when a run begins")
    parser.add_argument("--draft-model", default="", help="in place of --method")
    parser.add_argument("--quantization", default="auto", help="format of the draft model")
    asked = parser.parse_args()
    config = {"model": asked.draft_model, "quantization": asked.quantization} if asked.draft_model else ""
    options: dict[str, Any] = {"speculative_config": config, "speculative": "" if config else asked.method}
    options |= {"max_seq_len": 1024, "max_running_requests": asked.streams, "num_speculative_tokens": asked.most}
    llm = LLM(asked.model, format=asked.format, say=lambda line: None, **options)
    speculator = llm.loaded.core.speculator
    prompts = [
        encode_chat(llm.tokenizer, [{"role": "user", "content": ask}]) for ask in asks(asked.task, asked.streams)
    ]
    temperature = asked.temperature if asked.temperature is not None else 0.0 if asked.task == "copy" else 0.8
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=asked.tokens, ignore_eos=True)
    rates: dict[bool, list[float]] = {False: [], True: []}
    said = None
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2))
    for turn in range(2 * asked.pairs):
        llm.loaded.core.speculator = speculator if turn % 2 else None
        if asked.anew and turn % 2 and speculator is not None:
            speculator.control = DraftControl()
            speculator.rehearse()
        begun = time.perf_counter()
        outputs = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        rates[bool(turn % 2)].append(asked.streams * asked.tokens / (time.perf_counter() - begun))
        assert said in (None, outputs), "the tokens differ"
        said = outputs
    pairs = " ".join(f"{on / off:.2f}" for off, on in zip(rates[False], rates[True], strict=True))
    off, on, stats = median(rates[False]), median(rates[True]), speculator.stats if speculator else None
    name = f"{asked.draft_model} {asked.quantization}" if asked.draft_model else asked.method
    print(f"{asked.task} x {asked.streams}, {name}: off {off:.0f}, on {on:.0f} tokens/s; pairs {pairs}")
    if stats is not None:
        print(f"steps with drafts {stats.steps}, drafts {stats.drafted}, drawn {stats.accepted}")
        proposer, control = speculator.proposer, speculator.control
        print(f"seconds: drafting {proposer.draft_seconds:.2f}, reading {proposer.catch_up_seconds:.2f}, ", end="")
        print(f"verifying {control.verify_seconds:.2f}, saved {control.saved_seconds:.2f}")


if __name__ == "__main__":
    main()
