"""From events to text: stop strings end choices, deltas join to the whole, what lies beyond a stop does not count."""

from __future__ import annotations

from typing import Any

import pytest
from engine_harness import assert_idle, make_core, make_request, tiny_parts

from octavo.core.events import EventKind, TokenEvent
from octavo.core.params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.engine.output import OutputDelta, OutputRouter, merge_deltas

PROMPT = tuple(tiny_parts("llama").tokenizer.encode("the quick brown fox jumps over"))
WHOLE = "mpp0s9pmppp9ppp9pz6smm"  # the fixture's golden tokens as text; two unknown tokens show nothing


def collect(core: EngineCore, router: OutputRouter) -> list[OutputDelta]:
    deltas: list[OutputDelta] = []
    while core.has_work:
        deltas += router.take(core.step(0.0))
    assert_idle(core)
    return deltas


def run(core: EngineCore | None = None, **params: Any) -> list[OutputDelta]:
    core = core or make_core()
    router = OutputRouter(core, tiny_parts("llama").tokenizer)
    request = make_request("r", PROMPT, SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **params}))
    core.submit(request, 0.0)
    router.open(request)
    return collect(core, router)


def test_deltas_join_to_the_whole_text() -> None:
    deltas = run()
    assert "".join(delta.text for delta in deltas) == WHOLE
    assert [delta.last for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert deltas[-1].finish_reason == "length"
    assert deltas[-1].num_output_tokens == 24
    assert sum(len(delta.token_ids) for delta in deltas) == 24


@pytest.mark.parametrize("stop", ["9", "ppp", "s9pm", "zz", "m"])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_choice_where_it_stands(stop: str, include: bool) -> None:
    core = make_core()
    deltas = run(core, stop=(stop,), include_stop_str_in_output=include)
    at = WHOLE.find(stop)
    text = "".join(delta.text for delta in deltas)
    if at < 0:
        assert text == WHOLE
        assert deltas[-1].finish_reason == "length"
        return
    assert text == WHOLE[: at + len(stop) if include else at]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    count = sum(len(delta.token_ids) for delta in deltas)
    assert count == deltas[-1].num_output_tokens == core.metrics.output_tokens  # the engine stopped as well
    shown = tiny_parts("llama").tokenizer.decode([token for delta in deltas for token in delta.token_ids])
    assert shown == WHOLE[: at + len(stop)]  # nothing sampled after the stop is counted


def test_tokens_sampled_before_a_stop_string_was_noticed_do_not_count() -> None:
    core = make_core()
    router = OutputRouter(core, tiny_parts("llama").tokenizer)
    request = make_request("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=24, stop=("pp",)))
    core.submit(request, 0.0)
    router.open(request)
    tokens = [16, 19, 19, 31, 22]  # m p p 0 s: as if three steps had been in flight
    events = [TokenEvent("r", EventKind.TOKEN, index=i, token_id=token) for i, token in enumerate(tokens)]
    (delta,) = router.take(events)
    assert (delta.text, delta.token_ids, delta.num_output_tokens) == ("m", (16, 19, 19), 3)


def test_a_stop_string_is_held_back_until_it_is_decided() -> None:
    so_far = ""
    for delta in run(stop=("s9px",)):
        so_far += delta.text
        assert WHOLE.startswith(so_far)
    assert so_far == WHOLE


def test_choices_and_requests_do_not_mix() -> None:
    core = make_core()
    router = OutputRouter(core, tiny_parts("llama").tokenizer)
    for i in range(3):
        params = SamplingParams(temperature=1.0, seed=i, n=2, max_tokens=6, logprobs=0)
        request = make_request(f"r{i}", PROMPT[: 4 + i], params)
        core.submit(request, 0.0)
        router.open(request)
    deltas = collect(core, router)
    for i in range(3):
        mine = [delta for delta in deltas if delta.request_id == f"r{i}"]
        assert [delta.last for delta in mine].count(True) == 1
        assert mine[-1].last
        for choice in range(2):
            part = [delta for delta in mine if delta.choice == choice]
            tokens = [token for delta in part for token in delta.token_ids]
            ends = [delta.finish_reason for delta in part if delta.finish_reason]
            assert ends == ["stop"] if tokens[-1] == 2 else ends == ["length"]
            assert len(tokens) == part[-1].num_output_tokens == sum(len(delta.logprobs) for delta in part)


def test_a_cancelled_request_ends_with_its_reason() -> None:
    core = make_core()
    router = OutputRouter(core, tiny_parts("llama").tokenizer)
    request = make_request("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=24))
    core.submit(request, 0.0)
    router.open(request)
    deltas = [delta for _ in range(3) for delta in router.take(core.step(0.0))]
    core.cancel("r")
    deltas += collect(core, router)
    assert deltas[-1].last
    assert deltas[-1].finish_reason == "cancelled"


def test_a_restored_request_shows_only_what_was_not_shown() -> None:
    core, other = make_core(), make_core(page_size=2)
    tokenizer = tiny_parts("llama").tokenizer
    router, second = OutputRouter(core, tokenizer), OutputRouter(other, tokenizer)
    request = make_request("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=24, stop=("p9p",)))
    core.submit(request, 0.0)
    router.open(request)
    text = "".join(delta.text for _ in range(6) for delta in router.take(core.step(0.0)))
    moved = other.restore(core.snapshot("r"), 0.0)
    second.open(moved)
    deltas = collect(other, second)
    assert text + "".join(delta.text for delta in deltas) == WHOLE[: WHOLE.find("p9p")]
    assert deltas[-1].stop_reason == "p9p"
    assert deltas[-1].num_output_tokens == 14  # the token at which the stop string was complete is the last


def test_merged_deltas_lose_nothing() -> None:
    deltas = run(logprobs=1, prompt_logprobs=0)
    merged = merge_deltas(deltas)
    assert merged.text == WHOLE
    assert len(merged.token_ids) == len(merged.logprobs) == 24
    assert merged.prompt_logprobs is not None
    assert (merged.finish_reason, merged.last) == ("length", True)
