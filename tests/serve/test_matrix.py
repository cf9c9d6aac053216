"""Every parameter is honoured, refused or named: the walk over `parameter_matrix`, whose table docs/api.md holds."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from fake_engine import TEMPLATE, FakeEngine, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from parameter_matrix import BODIES, OTHERS, PAGE, Body, page_with, table
from serve_http import JSON, make_app, send, send_all

from octavo.serve.known_names import ORDER

IDS = [f"{body.path} {body.kind.__name__}" for body in [*BODIES, *OTHERS]]
EVERY = pytest.mark.parametrize("body", [*BODIES, *OTHERS], ids=IDS)
TEMPLATED = TEMPLATE + "{% if add_generation_prompt %}<me>{% endif %}{{ mood }}{{ reasoning_effort }}"

TOOL = {"type": "function", "function": {"name": "f"}}
TOOLS = {  # as each API spells them
    "/v1/responses": {"tools": [{"type": "function", "name": "f"}]},
    "/v1/messages": {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "none"}},
}
# a value of each parameter that differs from its default, and what has to stand beside it
SAMPLES: dict[str, Any] = {
    "model": "other", "max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 3, "num_predict": 3,
    "min_tokens": 1, "n": 2, "best_of": 3, "use_beam_search": True, "length_penalty": 2.0, "early_stopping": "never",
    "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.5,
    "repeat_penalty": 1.5, "presence_penalty": 0.2, "frequency_penalty": 0.3, "logit_bias": {"7": 2.0},
    "allowed_token_ids": [5, 6], "banned_token_ids": [7], "seed": 5, "stop": ["zz"], "stop_sequences": ["zz"],
    "stop_token_ids": [4], "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
    "prompt_logprobs": 1, "logprob_token_ids": [9], "return_token_ids": True, "stream": True, "priority": 3,
    "stream_options": {"include_usage": True}, "request_id": "mine", "cache_salt": "s", "prompt": "b", "echo": True,
    "messages": [{"role": "user", "content": "b"}], "add_generation_prompt": False, "top_logprobs": 2,
    "continue_final_message": True, "chat_template_kwargs": {"mood": "!"}, "input": "b", "instructions": "s",
    "include": ["message.output_text.logprobs"], "background": True, "store": False, "previous_response_id": "no",
    "metadata": {"a": "b"}, "system": "s", "options": {"seed": 5}, "raw": True, "return_token_strs": True,
    "name": "other", "tokens": [98], "pooling": "mean", "encoding_format": "base64", "dimensions": 2,
    "normalize": False, "query": "b", "documents": ["a", "c"], "top_n": 1, "return_documents": False, "text_1": "b",
    "text_2": ["b", "a"], "tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": False,
    "functions": [{"name": "f"}],
    "function_call": "none", "include_reasoning": False, "thinking_token_budget": 5,
    "thinking": {"type": "enabled", "budget_tokens": 5}, "think": True, "separate_reasoning": False,
    "reasoning_effort": "low", "reasoning": {"effort": "low"},
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a+"},
    "guided_json": {"type": "object"}, "guided_regex": "b+", "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"', "grammar": 'root ::= "a"',
    "ebnf": 'root ::= "b"', "json_schema": '{"type": "integer"}', "regex": "[ab]",
    "typical_p": 0.9, "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.2,
    "dynatemp_range": 0.5, "dynatemp_exponent": 2.0, "dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 3,
    "repeat_last_n": 9, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2,
    "dry_penalty_last_n": 64, "dry_sequence_breakers": ["x"], "no_repeat_ngram_size": 3, "bad_words": ["zz"],
    "logits_processors": ["nobody's"], "repetition_detection": {"max_pattern_size": 4},
    "speculative_verifier": "residual",
    "structural_tag": {"format": {"type": "any_text"}}, "format": "json",
    "output_config": {"format": {"type": "json_schema", "schema": {}}},
    "output_format": {"type": "json_schema", "schema": {}},
    "text": {"format": {"type": "json_object"}},
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    "length_penalty": {"use_beam_search": True}, "early_stopping": {"use_beam_search": True},
    "stream_options": {"stream": True}, "top_logprobs": {"logprobs": True},
    "continue_final_message": {"add_generation_prompt": False},
    "function_call": {"functions": [{"name": "f"}]},
    "mirostat_tau": {"mirostat": 2}, "mirostat_eta": {"mirostat": 2},
}  # fmt: skip
# a byte tokenizer adds none: test_tokens looks at these
UNSEEN = {(kind, "add_special_tokens") for kind in ("CompletionRequest", "EmbeddingsRequest", "TokenizeTextRequest")}
# this answer has neither calls nor thoughts: test_tools looks at these
UNSEEN |= {("ChatRequest", name) for name in ("parallel_tool_calls", "include_reasoning", "separate_reasoning")}
UNSEEN |= {("CountTokensRequest", name) for name in ("thinking", "output_config", "output_format")}


def sample(body: Body, name: str) -> Any:
    other = TOOLS.get(body.path.removesuffix("/count_tokens"), {})
    if name in other:
        return other[name]
    if name == "logprobs":
        return 2 if body.path == "/v1/completions" else True
    return False if name == "stream" and "/api/" in body.path else SAMPLES[name]


def beside(body: Body, name: str) -> dict[str, Any]:
    more = BESIDE.get(name, {})
    if name == "tool_choice":
        more = {"tools": sample(body, "tools")}
    if name == "top_logprobs" and "logprobs" not in body.kind.__struct_fields__:
        return {}
    return {**more, "stream": True} if name == "stream" and "/api/" in body.path else more


def ask(body: Body, values: dict[str, Any], engine: FakeEngine | None = None) -> tuple[httpx.Response, str]:
    """The answer, and all that can be seen of a request: what the engine was asked, and what came back."""
    engine = engine or FakeEngine(tokenizer=byte_tokenizer(TEMPLATED))
    answer = send(make_app(engine), "POST", body.path, json=body.with_(**values))
    heard = [[prompt, params.to_dict()] for prompt, params, _ in engine.asked]
    name = answer.headers.get("x-request-id", "")
    text = answer.text if not re.fullmatch(r"[0-9a-f]{32}", name) else answer.text.replace(name, "")
    text = re.sub(r'"(created|created_at|\w+_duration)":("[^"]*"|\d+)', "", text)
    return answer, json.dumps([heard, engine.salts, engine.priorities, answer.status_code, name == "mine", text])


def named(answer: httpx.Response) -> list[str]:
    return [name for name in answer.headers.get("x-octavo-warnings", "").split(", ") if name]


def blamed(answer: httpx.Response, name: str) -> bool:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    if isinstance(error, dict) and "param" in error:
        return bool(error["param"] == name and error["message"].startswith(name))
    return str(error["message"] if isinstance(error, dict) else error).startswith(name)


@EVERY
def test_what_is_honoured_changes_something(body: Body) -> None:
    for name in body.kind.__struct_fields__:
        if name == "deadline_ms" or (body.kind.__name__, name) in UNSEEN:
            continue
        more = beside(body, name)
        _, before = ask(body, more)
        answer, after = ask(body, {**more, name: sample(body, name)})
        assert after != before, name
        assert set(named(answer)) <= {"priority"}, (name, named(answer))


@EVERY
def test_a_deadline_is_kept(body: Body) -> None:
    if "deadline_ms" in body.kind.__struct_fields__:
        answer, _ = ask(body, {"deadline_ms": 20}, FakeEngine(hold=True))
        assert answer.status_code == 408


@EVERY
def test_another_name_is_the_same(body: Body) -> None:
    for name, target in body.names.aliases.items():
        if target in body.kind.__struct_fields__:
            value = sample(body, target)
            assert ask(body, {name: value})[1] == ask(body, {target: value})[1], name
            if target not in body.least:
                assert blamed(ask(body, {name: value, target: value})[0], body.prefix + name)


def answers(body: Body, values: list[dict[str, Any]]) -> list[httpx.Response]:
    return send_all(make_app(), [("POST", body.path, {"json": body.with_(**one)}) for one in values])


@EVERY
def test_what_is_refused_says_so_unless_it_asks_for_nothing(body: Body) -> None:
    names = [name for name in body.names.refused if name not in body.kind.__struct_fields__]
    for name, answer in zip(names, answers(body, [{name: "something"} for name in names]), strict=True):
        assert blamed(answer, body.prefix + name), name
        assert len(answer.text) > len(name) + 30
    (quiet,) = answers(body, [dict.fromkeys(names)])
    assert quiet.status_code == 200 and not named(quiet)


def test_the_order_of_samplers_that_there_is_may_be_named() -> None:
    body = BODIES[1]
    ours, other = answers(body, [{"samplers": ORDER}, {"samplers": ORDER[::-1]}])
    assert ours.status_code == 200 and not named(ours)
    assert blamed(other, "samplers") and "temperature" in other.json()["error"]["message"]


@EVERY
def test_what_has_no_effect_is_named(body: Body) -> None:
    names = [name for name in body.names.idle if name not in body.kind.__struct_fields__]
    _, before = ask(body, {})
    answer, _ = ask(body, dict.fromkeys(names, "x"))
    assert answer.status_code == 200 and named(answer) == [body.prefix + name for name in names]
    assert [w["param"] for w in answer.json().get("warnings", [])] == named(answer)
    quiet, after = ask(body, dict.fromkeys(names))
    assert after == before and not named(quiet)


@EVERY
def test_any_other_name_comes_back_with_the_nearest_right_one(body: Body) -> None:
    names = [name for name in body.kind.__struct_fields__ if len(name) > 3]
    for name, answer in zip(names, answers(body, [{name + "q": 1} for name in names]), strict=True):
        assert named(answer) == [body.prefix + name + "q"]
        assert "did you mean" in answer.json()["warnings"][0]["message"], name


def check_shape(body: Body, answer: httpx.Response) -> None:
    if answer.status_code != 200:
        assert 400 <= answer.status_code < 500, answer.text
        error = answer.json()["error"]
        assert error if "/api/" in body.path else error["message"] and error["type"]


EDGES: list[Any] = [[], {}, "", -1, 1e300, True, [{}], [""], [[]], [-1], {"a": 1}, {"": ""}, "x" * 600]


@EVERY
def test_no_field_has_a_value_that_is_the_servers_fault(body: Body) -> None:
    asked = [(name, value) for name in body.kind.__struct_fields__ for value in EDGES]
    for pair, answer in zip(asked, answers(body, [{name: value} for name, value in asked]), strict=True):
        assert answer.status_code != 500, pair
        check_shape(body, answer)


@settings(max_examples=80)
@given(st.sampled_from([*BODIES, *OTHERS]), st.data())
def test_any_value_of_any_parameter_is_answered_or_refused_in_shape(body: Body, data: st.DataObject) -> None:
    names = st.sampled_from([*body.kind.__struct_fields__, *body.names.refused, *body.names.idle])
    check_shape(body, ask(body, data.draw(st.dictionaries(names, JSON, max_size=4)))[0])


PARITY = """
top_k min_p typical_p top_n_sigma xtc_probability xtc_threshold dry_multiplier dry_base dry_allowed_length
dry_penalty_last_n dry_sequence_breakers dynatemp_range dynatemp_exponent mirostat samplers top_p_min min_keep
repetition_penalty repeat_penalty frequency_penalty presence_penalty no_repeat_ngram_size logit_bias allowed_token_ids
bad_words custom_logit_processor custom_params n n_cmpl best_of use_beam_search length_penalty early_stopping seed
stop_token_ids stop_regex include_stop_str_in_output no_stop_trim ignore_eos min_tokens min_new_tokens
repetition_detection skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side n_keep
add_generation_prompt continue_final_message chat_template chat_template_kwargs documents mm_processor_kwargs
media_io_kwargs prompt_embeds input_embeds logprobs top_logprobs prompt_logprobs logprob_token_ids token_ids_logprob
return_token_ids return_tokens return_tokens_as_token_ids return_hidden_states return_routed_experts
structured_outputs guided_json guided_regex guided_choice guided_grammar json_schema regex ebnf structural_tag grammar
response_format parallel_tool_calls reasoning_effort thinking thinking_token_budget include_reasoning
separate_reasoning priority request_id rid cache_salt extra_key session_id id_slot cache_prompt n_cache_reuse
kv_cache_hints lora_path lora lora_request adapter_id kv_transfer_params ec_transfer_params bootstrap_host
bootstrap_port bootstrap_room routed_dp_rank disaggregated_params vllm_xargs watermark user deadline_ms stream
stream_options tools tool_choice functions function_call
"""


def test_no_parameter_of_another_engine_is_a_stranger() -> None:
    chat = BODIES[1]
    known = {*chat.kind.__struct_fields__, *chat.names.aliases, *chat.names.refused, *chat.names.idle}
    assert not set(PARITY.split()) - known


def test_the_page_holds_the_table() -> None:
    text = PAGE.read_text()
    assert text == page_with(text, table()), "python tests/serve/parameter_matrix.py writes it"
