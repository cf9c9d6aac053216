"""Beam search beside that of ``transformers``, on small random models: tokens and scores.

Needs torch and transformers 5, which nothing else here does:
    PYTHONPATH=src python benchmarks/beam_peer.py 200
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

from octavo.core.batch import TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.decoding.beam import next_move, score

VOCAB = 24
Beams = list[tuple[list[int], float]]
Likely = Callable[[Sequence[Sequence[int]]], list[list[float]]]  # logprobs [R, V] after each of R texts


def main(count: int) -> None:
    """Compare so many cases, and say how many came out the same."""
    import torch
    import transformers

    torch.set_num_threads(1)
    rng, same, worst = random.Random(7), 0, 0.0
    model: Any = None
    for case in range(count):
        if case % 10 == 0:
            model = _model(torch, transformers, case)
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 5))]
        ends, params = sorted(rng.sample(range(VOCAB), rng.randint(1, 3))), _params(rng)

        def likely(texts: Sequence[Sequence[int]], model: Any = model) -> list[list[float]]:
            with torch.no_grad():
                logits = model(torch.tensor([list(text) for text in texts])).logits[:, -1].float()
            found: list[list[float]] = torch.log_softmax(logits, -1).tolist()
            return found

        got, theirs = _ours(likely, prompt, params, ends), _theirs(torch, model, prompt, params, ends)
        same += [tokens for tokens, _ in got] == [tokens for tokens, _ in theirs]
        worst = max([worst, *(abs(a - b) for (_, a), (_, b) in zip(got, theirs, strict=True))])
    print(f"transformers {transformers.__version__}: {same} of {count} with the same tokens; scores within {worst:.1e}")


def _model(torch: Any, transformers: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, initializer_range=0.7, **shape)
    return transformers.LlamaForCausalLM(config).float().eval()


def _params(rng: random.Random) -> SamplingParams:
    most = rng.randint(1, 10)
    return SamplingParams(
        n=rng.randint(2, 5),
        use_beam_search=True,
        max_tokens=most,
        min_tokens=min(most, rng.choice((0, 0, 2))),
        length_penalty=rng.choice((1.0, 0.0, 0.5, 2.0, -1.0)),
        early_stopping=rng.choice((False, True, "never")),
    )


def _ours(likely: Likely, prompt: list[int], params: SamplingParams, ends: list[int]) -> Beams:
    request = Request("r", prompt, params, eos_token_ids=ends)
    request.token_limit = len(prompt) + (params.max_tokens or 0)
    while True:
        drawing = request.branches if request.branches[0].num_output_tokens else request.branches[:1]
        rows = likely([branch.token_ids for branch in drawing])
        move = next_move(request, {b.choice: _drawn(row, params) for b, row in zip(drawing, rows, strict=True)})
        if move.endings:
            return [(list(ending.token_ids), score(ending, params.length_penalty)) for ending in move.endings]
        before = [(branch.token_ids, branch.logprobs) for branch in request.branches]
        for index, branch in enumerate(request.branches):
            tokens, logprobs = before[move.parents[index]]
            branch.token_ids = [*tokens, move.token_ids[index]]
            branch.logprobs = [*logprobs, move.logprobs[index]]
        request.ended = move.ended


def _drawn(row: Sequence[float], params: SamplingParams) -> TokenLogprobs:
    order = sorted(range(VOCAB), key=lambda token: (-row[token], token))[: params.num_top_logprobs]
    return TokenLogprobs(order[0], row[order[0]], 1, tuple((token, row[token]) for token in order))


def _theirs(torch: Any, model: Any, prompt: list[int], params: SamplingParams, ends: list[int]) -> Beams:
    pad = next(token for token in range(VOCAB) if token not in ends)
    least = {"min_new_tokens": params.min_tokens} if params.min_tokens else {}
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=params.max_tokens,
            num_beams=params.n,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=ends,
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_scores=True,
            **least,
        )
    beams = []
    for row, value in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        last = next((at for at, token in enumerate(row) if token in ends), len(row) - 1)
        beams.append((row[: last + 1], value))
    return beams


if __name__ == "__main__":
    main(int(sys.argv[1]))
