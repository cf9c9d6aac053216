"""An engine that forgets: memory that does not grow, nothing shared, and a refusal by name of what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import FIXTURES, FORGETFUL, Collector, assert_idle, make_core, make_request, tiny_parts

from octavo.core.errors import InvalidInput
from octavo.core.kv_eviction import H2O, SnapKV, StreamingLLM, parse_eviction
from octavo.core.params import SamplingParams
from octavo.decoding.speculation import make_speculator
from octavo.engine.config import EngineConfig
from octavo.engine.llm import LLM
from octavo.engine.loader import plan_engine

TINY = str(FIXTURES / "tiny_model.json")
PROMPT = tuple(range(3, 45))


def llm(**options: Any) -> LLM:
    return LLM(TINY, backend="reference", page_size=4, say=lambda line: None, **options)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_stay_as_few_as_sinks_window_and_chunk_need(page_size: int) -> None:
    """In a pool that has no other page."""
    (group,) = tiny_parts("streaming").model.kv_groups()
    bound = group.most_columns(96, page_size, 5)
    core, collector = make_core("streaming", page_size=page_size, num_pages=bound, max_prefill_chunk=5), Collector()
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    core.submit(make_request("r", PROMPT, params, "streaming"), 0.0)
    held = []
    while core.has_work:
        collector.take(core.step(0.0))
        held.append(core.kv.num_branch_pages(("r", 0)))
    assert len(collector.choices["r", 0].tokens) == 50
    _, policy = FORGETFUL["streaming"]
    assert max(held[12:-1]) <= -(-policy.sinks // page_size) + (policy.window + page_size - 1) // page_size + 1
    assert_idle(core)


def test_a_text_that_fits_is_not_forgotten() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    exact, forgetful = llm(), llm(kv_eviction="streaming_llm:sinks=2,window=20")
    (plain,), (short,) = (each.generate([PROMPT[:12]], params) for each in (exact, forgetful))
    assert plain.outputs[0].token_ids == short.outputs[0].token_ids
    (plain,), (long,) = (each.generate([PROMPT], params) for each in (exact, forgetful))
    assert plain.outputs[0].token_ids != long.outputs[0].token_ids


def test_text_runs_past_the_model_s_context_in_pages_for_the_window() -> None:
    """128 positions is all that the model has; the pool holds 32 tokens."""
    page = tiny_parts("llama").model.kv_groups()[0].page_bytes(4) * 8  # a float of the reference takes 32 bytes
    options = {"max_seq_len": 400, "max_prefill_chunk": 8, "kv_memory": str(8 * page)}
    with pytest.raises(InvalidInput, match="128"):
        llm(**options)
    engine = llm(kv_eviction="streaming_llm:sinks=4,window=8", **options)
    assert engine.loaded.plan.num_pages == 8
    (output,) = engine.generate([PROMPT], SamplingParams(temperature=0.7, seed=3, max_tokens=300, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 300
    assert_idle(engine.loaded.core)
    with pytest.raises(InvalidInput, match="one sequence"):
        llm(kv_eviction="streaming_llm:sinks=4,window=80", **options)


def test_nothing_is_shared_and_the_numbers_have_a_name_of_their_own() -> None:
    engine = llm(kv_eviction="streaming_llm:sinks=4,window=64")
    params = SamplingParams(temperature=0.0, max_tokens=3)
    first, second = (engine.generate([PROMPT], params)[0] for _ in range(2))
    assert first.outputs == second.outputs
    assert (second.num_cached_tokens, engine.loaded.core.kv.match_length("", PROMPT)) == (0, 0)
    assert engine.loaded.core.kv.usage().pages.referenced == 0
    asked = ("", "streaming_llm:sinks=4,window=64", "streaming_llm:sinks=5,window=64", "streaming_llm:window=63")
    ids = {llm(kv_eviction=text).loaded.parts.numerics_id for text in asked}
    assert len(ids) == 4
    assert len({tiny_parts(model).namespace() for model in ("llama", "streaming")}) == 2


@pytest.mark.parametrize("method", ["ngram", "suffix"])
@pytest.mark.parametrize(
    "asked", ["streaming_llm:sinks=2,window=9", "snapkv:capacity=9,window=3,block=4", "h2o:heavy=5,recent=4,block=4"]
)
def test_guessed_tokens_are_the_same_bytes(method: str, asked: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
    engine = llm(kv_eviction=asked)
    (plain,) = engine.generate([PROMPT], params)
    engine.loaded.core.speculator = make_speculator(method, 5, adapts=False)
    (guessed,) = engine.generate([PROMPT], params)
    assert plain.outputs == guessed.outputs and guessed.num_draft_tokens > 0


def test_what_is_said() -> None:
    said: list[str] = []
    LLM(TINY, backend="reference", kv_eviction="streaming_llm:window=50", say=said.append)
    assert any(line.startswith("lossy: streaming_llm:window=50") for line in said)


def test_how_it_is_spelt() -> None:
    assert parse_eviction("") is None
    assert parse_eviction("streaming_llm") == StreamingLLM(4, 1024)
    assert parse_eviction("streaming_llm:window=8,sinks=1") == StreamingLLM(1, 8)
    assert parse_eviction("snapkv:block=16,capacity=99") == SnapKV(99, 32, 5, 16)
    assert parse_eviction("h2o:recent=7") == H2O(512, 7, 64)


@pytest.mark.parametrize(
    ("options", "field", "remedy"),
    [
        ({"kv_eviction": "lru"}, "kv_eviction", "streaming_llm"),
        ({"kv_eviction": "h2o:window=4"}, "kv_eviction", "once"),
        ({"kv_eviction": "h2o:recent=0"}, "kv_eviction: recent", "1 to"),
        ({"kv_eviction": "h2o:block=8"}, "page_size", "divides its block"),
        ({"kv_eviction": "h2o", "max_batched_tokens": 60}, "kv_eviction: block", "max_batched_tokens"),
        ({"kv_eviction": "snapkv:sinks=4"}, "kv_eviction", "once"),
        ({"kv_eviction": "snapkv:capacity=0"}, "kv_eviction: capacity", "1 to"),
        ({"kv_eviction": "snapkv:capacity=9,window=10"}, "kv_eviction: window", "1 to 9"),
        ({"kv_eviction": "snapkv:kernel=4"}, "kv_eviction: kernel", "odd"),
        ({"kv_eviction": "snapkv:block=24"}, "page_size", "divides its block"),
        ({"kv_eviction": "snapkv:window=200", "max_batched_tokens": 100}, "kv_eviction: window", "max_batched_tokens"),
        ({"kv_eviction": "snapkv", "max_seq_len": 129}, "max_seq_len", "128"),
        ({"kv_eviction": "snapkv", "host_kv_memory": "1MiB"}, "host_kv_memory", "no prefix cache"),
        (
            {"kv_eviction": "snapkv", "model": str(FIXTURES / "tiny_two_groups.json")},
            "kv_eviction",
            "windows of its own",
        ),
        ({"kv_eviction": "streaming_llm:sinks=4,sinks=5"}, "kv_eviction", "once"),
        ({"kv_eviction": "streaming_llm:window=-1"}, "kv_eviction", "once"),
        ({"kv_eviction": "streaming_llm:heavy=1"}, "kv_eviction", "once"),
        ({"kv_eviction": "streaming_llm:sinks=0"}, "kv_eviction: sinks", "1 to 64"),
        ({"kv_eviction": "streaming_llm:sinks=65"}, "kv_eviction: sinks", "1 to 64"),
        ({"kv_eviction": "streaming_llm:window=0"}, "kv_eviction: window", "1 to"),
        ({"kv_eviction": "streaming_llm:window=125"}, "kv_eviction: window", "at most 124"),
        ({"host_kv_memory": "1MiB"}, "host_kv_memory", "no prefix cache"),
        ({"speculative_config": '{"method": "ngram", "tree": true}'}, "speculative_config.tree", "leave it out"),
        ({"speculative_config": f'{{"model": "{TINY}"}}'}, "speculative", "ngram or suffix"),
        ({"model": str(FIXTURES / "tiny_two_groups.json")}, "kv_eviction", "windows of its own"),
    ],
)
def test_what_is_refused(options: dict[str, Any], field: str, remedy: str) -> None:
    asked = {"model": TINY, "backend": "reference", "kv_eviction": "streaming_llm:window=50", **options}
    with pytest.raises(InvalidInput) as caught:
        plan_engine(EngineConfig(**asked), say=lambda line: None)
    assert caught.value.field == field and remedy in str(caught.value)
