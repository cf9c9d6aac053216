"""The OpenAI API over a fake engine: shapes, the law of streams, warnings, limits."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, refusing
from serve_http import CHAT, COMPLETIONS, HELLO, check_error, events, make_app, post, send, send_all

from octavo.serve.app import create_app
from octavo.tokenizers.simple import SimpleTokenizer

ANSWER = "<USER>HÉ\n ✓"


def test_a_whole_chat_answer() -> None:
    body = post(CHAT, {**HELLO, "model": "fake"}).json()
    assert body["object"] == "chat.completion" and body["model"] == "fake" and body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] is None and choice["logprobs"] is None
    prompt, output = len(b"<user>h\xc3\xa9\n"), len(ANSWER.encode()) + 1
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
    }
    assert "warnings" not in body and "token_ids" not in choice


def test_without_a_template_the_mark_of_the_next_turn_ends_an_answer() -> None:
    plain, marks = [f"<0x{byte:02X}>" for byte in range(256)], ["<eos>", "<|im_start|>", "<|im_end|>"]
    base = FakeEngine(tokenizer=SimpleTokenizer([*plain, "<eos>"], kind="bytes", eos=["<eos>"]))
    chatml = FakeEngine(tokenizer=SimpleTokenizer([*plain, *marks], kind="bytes", eos=["<eos>"], special=marks))
    own = FakeEngine()
    many = [str(i) for i in range(16)]
    bodies = (CHAT, {**HELLO, "stop": "x"}), (CHAT, {**HELLO, "stop": many}), (COMPLETIONS, {"prompt": "a"})
    for engine in (base, chatml, own):
        for path, body in bodies:
            assert post(path, body, engine=engine).status_code == 200
    stops = {"base": base, "chatml": chatml, "own": own}
    asked = {name: [(p.stop, p.stop_token_ids) for _, p, _ in engine.asked] for name, engine in stops.items()}
    assert asked["base"] == [(("x", "\nUser:", "\nSystem:"), ()), (tuple(many), ()), ((), ())]
    assert asked["chatml"] == [(("x",), (258,)), (tuple(many), (258,)), ((), ())]
    assert asked["own"] == [(("x",), ()), (tuple(many), ()), ((), ())]


def test_a_chat_stream_obeys_its_law() -> None:
    body = {**HELLO, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
    chunks = events(post(CHAT, body))
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    *pieces, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2 * (len(ANSWER.encode()) + 1) + 1
    assert all(piece["usage"] is None for piece in pieces)
    for index, text in enumerate((ANSWER, ANSWER + "1")):
        mine = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert sum("role" in choice["delta"] for choice in mine) == 1
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]


def test_a_stream_without_usage_does_not_mention_it() -> None:
    assert all("usage" not in chunk for chunk in events(post(CHAT, {**HELLO, "stream": True})))


def test_continuous_usage_counts_up() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(post(COMPLETIONS, {"prompt": "ab", "stream": True, "stream_options": options, "max_tokens": 3}))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


def test_prompts_of_every_kind_and_their_choices() -> None:
    engine = FakeEngine()
    body = {"prompt": ["a", [98, 99]], "n": 2, "max_tokens": 2}
    answer = post(COMPLETIONS, body, engine=engine).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "A "),
        (1, "A "),
        (2, "BC"),
        (3, "BC"),
    ]
    assert answer["usage"]["prompt_tokens"] == 3 and answer["usage"]["completion_tokens"] == 8
    assert [prompt for prompt, _, _ in engine.asked] == [(97,), (98, 99)]
    assert post(COMPLETIONS, {"prompt": [104, 105], "max_tokens": 2}).json()["choices"][0]["text"] == "HI"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_covers_the_prompt(stream: bool) -> None:
    body = {"prompt": "ab", "echo": True, "logprobs": 2, "max_tokens": 1, "stream": stream}
    response = post(COMPLETIONS, body)
    choice = (events(response)[0] if stream else response.json())["choices"][0]
    assert choice["text"] == "abA" and choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "A"] and logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25] and logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][2] == {"\x00": -0.25, "\x01": -1.25, "A": -0.25}


def test_a_streams_logprobs_are_those_of_the_whole() -> None:
    body = {"prompt": "hi", "logprobs": 1}
    whole = post(COMPLETIONS, body).json()["choices"][0]["logprobs"]
    pieces = [chunk["choices"][0]["logprobs"] for chunk in events(post(COMPLETIONS, {**body, "stream": True}))]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for piece in pieces for value in piece[name]] == whole[name], name
    assert whole["tokens"][-1] == "<eos>" and whole["text_offset"][:4] == [0, 1, 2, 3]


def test_scoring_a_prompt_generates_nothing() -> None:
    choice = post(COMPLETIONS, {"prompt": "abc", "max_tokens": 0, "echo": True}).json()["choices"][0]
    assert choice["text"] == "abc" and choice["finish_reason"] == "length"


def test_chat_logprobs_spell_every_token() -> None:
    body = {**HELLO, "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 8}
    content = post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    assert bytes(byte for entry in content for byte in entry["bytes"]) == ANSWER.encode()[:8]
    assert content[0]["token"] == "<" and content[0]["logprob"] == -0.25
    assert content[0]["top_logprobs"] == [{"token": "\x00", "logprob": -0.25, "bytes": [0]}]
    streamed = [
        entry
        for chunk in events(post(CHAT, {**body, "stream": True}))
        if chunk["choices"][0]["logprobs"]
        for entry in chunk["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == content


def test_token_ids_come_back_when_asked_for() -> None:
    whole = post(COMPLETIONS, {"prompt": "é", "return_token_ids": True}).json()["choices"][0]
    assert whole["prompt_token_ids"] == [0xC3, 0xA9] and whole["token_ids"] == [*"É ✓".encode(), 256]
    chunks = events(post(COMPLETIONS, {"prompt": "é", "return_token_ids": True, "stream": True}))
    assert [i for chunk in chunks for i in chunk["choices"][0]["token_ids"]] == whole["token_ids"]
    assert ["prompt_token_ids" in chunk["choices"][0] for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert post(CHAT, {**HELLO, "return_token_ids": True}).json()["prompt_token_ids"][:2] == [*b"<u"]


def test_stop_reason_names_the_stop_string() -> None:
    choice = post(COMPLETIONS, {"prompt": "abc", "stop": "C"}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("AB", "stop", "C")


def test_parameters_reach_the_engine() -> None:
    engine = FakeEngine()
    asked: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
        "frequency_penalty": 0.3, "seed": 5, "min_tokens": 1, "ignore_eos": True, "include_stop_str_in_output": True,
        "skip_special_tokens": False, "prompt_logprobs": 3,
    }  # fmt: skip
    lists = {"stop": ["x", "yz"], "stop_token_ids": [4], "allowed_token_ids": [5, 6], "logprob_token_ids": [9]}
    body = {"prompt": "a", **asked, **lists, "logit_bias": {"7": 2}, "logprobs": 0}
    assert post(COMPLETIONS, body, engine=engine).status_code == 200
    params = engine.asked[0][1]
    assert {name: getattr(params, name) for name in asked} == asked
    assert {name: list(getattr(params, name)) for name in lists} == lists
    assert dict(params.logit_bias) == {7: 2.0} and params.max_tokens == 16 and params.logprobs == 0


def test_other_engines_names_are_understood() -> None:
    engine = FakeEngine()
    post(COMPLETIONS, {"prompt": "a", "n_predict": 3, "repeat_penalty": 1.5}, engine=engine)
    assert engine.asked[0][1].max_tokens == 3 and engine.asked[0][1].repetition_penalty == 1.5
    check_error(post(COMPLETIONS, {"prompt": "a", "n_predict": 3, "max_tokens": 4}), 400, "n_predict")


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_parameters_are_named_with_the_nearest_right_one(stream: bool) -> None:
    for path, body in ((CHAT, HELLO), (COMPLETIONS, {"prompt": "a"})):
        check_warnings(post(path, {**body, "temprature": 0.1, "a\nb": 1, "stream": stream}), stream)


def check_warnings(response: httpx.Response, stream: bool) -> None:
    chunks = events(response) if stream else [response.json()]
    assert ["warnings" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    found = chunks[0]["warnings"]
    assert [warning["param"] for warning in found] == ["temprature", "(unprintable name)"]
    assert "did you mean temperature?" in found[0]["message"]
    assert response.headers["x-octavo-warnings"] == "temprature, (unprintable name)"


def test_what_changes_nothing_says_so() -> None:
    found = post(CHAT, {**HELLO, "user": "u-1", "priority": 3}).json()["warnings"]
    assert [warning["param"] for warning in found] == ["user", "priority"] and "--policy priority" in found[1][
        "message"
    ]
    app = create_app(FakeEngine(), policy="priority")
    assert "warnings" not in send(app, "POST", CHAT, json={**HELLO, "priority": 3}).json()


def test_many_unknown_parameters_are_counted_not_listed() -> None:
    found = post(CHAT, {**HELLO, **{f"zz{i}": 1 for i in range(5000)}}).json()["warnings"]
    assert len(found) == 17 and found[-1]["message"].startswith("4984 more")


UNSUPPORTED = [
    ("suffix", "x"), ("audio", {"voice": "x"}), ("modalities", ["text", "audio"]), ("chat_template", "{{ x }}"),
    ("store", True),
]  # fmt: skip


def test_an_entry_is_blamed_on_its_parameter() -> None:
    error = check_error(post(COMPLETIONS, {**HELLO, "logit_bias": {"0": 101}}), 400)
    assert error["param"] == "logit_bias" and error["message"].startswith("logit_bias[0] = 101")


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_what_is_unsupported_is_refused_with_a_remedy(name: str, value: Any) -> None:
    error = check_error(post(CHAT, {**HELLO, name: value}), 400, name)
    assert error["code"] == "unsupported_parameter" and len(error["message"]) > len(name) + 20


def test_asking_for_the_unsupported_to_be_off_is_fine() -> None:
    off = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "suffix": None, "best_of": 1}
    response = post(CHAT, {**HELLO, **off, "store": False})
    assert response.status_code == 200 and "warnings" not in response.json()


LIMITS = [
    ("n", 0), ("n", 65), ("stop", ["x"] * 17), ("stop", ["x" * 257]), ("stop", [""]), ("logprobs", 21),
    ("logprobs", -1),
    ("prompt_logprobs", 21), ("logit_bias", {str(i): 1 for i in range(1025)}), ("logit_bias", {"257": 1}),
    ("logit_bias", {"-1": 1}), ("logit_bias", {"x": 1}), ("temperature", -1), ("top_p", 0), ("top_p", 1.5),
    ("max_tokens", -1),
    ("min_p", 2), ("stop_token_ids", [257]), ("stop_token_ids", [-1]), ("prompt", []), ("prompt", ""), ("prompt", [[]]),
    ("prompt", [257]), ("prompt", [-1]), ("prompt", [True]), ("prompt", [1.5]), ("prompt", ["a", 1]),
    ("prompt", {"a": 1}),
    ("prompt", ["a"] * 129), ("prompt", "a" * 5000), ("prompt", None), ("max_tokens", 512), ("request_id", "a b"),
    ("request_id", ""), ("cache_salt", ""), ("stream_options", {"include_usage": True}), ("max_tokens", "9"),
    ("max_tokens", 1.5), ("temperature", "hot"), ("stop", 5), ("seed", True), ("ignore_eos", 1),
    ("repetition_penalty", 0), ("deadline_ms", 0), ("deadline_ms", 1e9), ("deadline_ms", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), LIMITS)
def test_every_limit_is_refused_by_name(name: str, value: Any) -> None:
    engine = FakeEngine()
    error = check_error(post(COMPLETIONS, {"prompt": "a", name: value}, engine=engine), 400, name)
    assert error["type"] == "invalid_request_error" and error["message"].startswith(name)
    assert not engine.asked


def test_prompts_times_n_is_bounded() -> None:
    check_error(post(COMPLETIONS, {"prompt": ["a"] * 65, "n": 2}), 400, "n")
    assert post(COMPLETIONS, {"prompt": ["a"] * 64, "n": 2, "max_tokens": 1}).status_code == 200


def test_the_context_is_never_exceeded_nor_a_prompt_cut() -> None:
    assert post(COMPLETIONS, {"prompt": [97] * 500, "max_tokens": 12}).status_code == 200
    error = check_error(post(COMPLETIONS, {"prompt": [97] * 500, "max_tokens": 13}), 400, "max_tokens")
    assert error["code"] == "context_length_exceeded" and "500" in error["message"] and "512" in error["message"]
    check_error(post(COMPLETIONS, {"prompt": [97] * 512, "max_tokens": 1}), 400, "prompt")
    assert post(CHAT, HELLO).status_code == 200  # no max_tokens: up to the context


MESSAGES: list[Any] = [
    [], None, "x", [1], [{}], [{"role": "user"}], [{"role": "wizard", "content": "x"}], [{"role": 1, "content": "x"}],
    [{"role": "user", "content": 1}], [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "user", "content": ["x"]}], [{"role": "user", "content": "x", "name": 1}],
    [{"role": "assistant", "content": "x", "tool_calls": [1]}], [{"role": "tool"}],
    [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "user", "content": "x", "tool_call_id": 1}], [{"role": "assistant", "function_call": {"name": 1}}],
]  # fmt: skip


@pytest.mark.parametrize("messages", MESSAGES)
def test_messages_are_checked(messages: Any) -> None:
    check_error(post(CHAT, {"messages": messages}), 400, "messages")


def test_text_parts_are_joined_and_developer_is_system() -> None:
    engine = FakeEngine()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    post(CHAT, {"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]}, engine=engine)
    assert bytes(engine.asked[0][0]) == b"<system>s\n<user>ab\n"


def test_the_wrong_model_is_404_and_says_what_is_right() -> None:
    error = check_error(post(CHAT, {**HELLO, "model": "gpt-9"}), 404, "model")
    assert error["code"] == "model_not_found" and "fake" in error["message"] and "gpt-9" not in error["message"]
    app = make_app(served_model_name="alias")
    assert send(app, "POST", CHAT, json={**HELLO, "model": "alias"}).json()["model"] == "alias"
    assert send(app, "GET", "/v1/models").json()["data"][0]["id"] == "alias"
    assert send(app, "GET", "/v1/models/alias").json()["max_model_len"] == 512
    check_error(send(app, "GET", "/v1/models/x"), 404)


def test_request_ids_come_back_and_live_ones_are_not_shared() -> None:
    response = post(CHAT, {**HELLO, "request_id": "mine"})
    assert response.headers["x-request-id"] == "mine" and response.json()["id"] == "chatcmpl-mine"
    header = send(make_app(), "POST", CHAT, json=HELLO, headers={"X-Request-Id": "theirs"})
    assert header.json()["id"] == "chatcmpl-theirs"
    engine = FakeEngine()
    app = make_app(engine)
    twice = send_all(app, [("POST", CHAT, {"json": {**HELLO, "request_id": "same"}})] * 2)
    assert sorted(answer.status_code for answer in twice) == [200, 409]
    assert send(app, "POST", CHAT, json={**HELLO, "request_id": "same"}).status_code == 200  # no longer live
    assert len({request_id for _, _, request_id in engine.asked}) == 2


def test_one_request_too_many_is_told_when_to_come_back() -> None:
    engine = FakeEngine()
    app = make_app(engine, max_pending=2)
    answers = send_all(app, [("POST", COMPLETIONS, {"json": {"prompt": "a"}})] * 5)
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1 and check_error(refused, 429)["code"] == "queue_full"
    assert [(status, after >= 1) for _, _, status, after in engine.refusals] == [(429, True)] * 3
    assert send(app, "POST", COMPLETIONS, json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("body", [HELLO, {**HELLO, "stream": True}])
def test_an_engine_error_is_one_error_and_tells_no_secret(body: dict[str, Any]) -> None:
    engine = FakeEngine(fail_after=3)
    response = post(CHAT, body, engine=engine)
    if body.get("stream"):
        error = events(response)[-1]["error"]
    else:
        error = check_error(response, 500)
    assert error["code"] == "engine_error" and "secret" not in response.text and engine.live == 0


def test_a_refusal_by_the_engine_is_a_400_without_the_text() -> None:
    error = check_error(post(COMPLETIONS, {"prompt": "a"}, engine=refusing("prompt_token_ids")), 400, "prompt")
    assert error["message"] == "prompt: say something else"


def test_a_request_has_a_time_limit() -> None:
    engine = FakeEngine(hold=True)
    app = make_app(engine, request_timeout=0.02)
    assert check_error(send(app, "POST", CHAT, json=HELLO), 504)["code"] == "timeout"
    assert events(send(app, "POST", CHAT, json={**HELLO, "stream": True}))[-1]["error"]["code"] == "timeout"
    soon = {**HELLO, "deadline_ms": 20}
    assert check_error(send(make_app(engine), "POST", CHAT, json=soon), 408, "deadline_ms")["code"] == "deadline"
    assert engine.live == 0


def test_metrics_have_the_names_that_dashboards_know() -> None:
    app = make_app()
    send(app, "POST", COMPLETIONS, json={"prompt": "abcd", "max_tokens": 3})
    send(app, "POST", COMPLETIONS, json={"prompt": 5})
    text = send(app, "GET", "/metrics").text
    for line in (
        'vllm:prompt_tokens_total{model_name="fake",priority="normal",tenant="none"} 4.0',
        'vllm:generation_tokens_total{model_name="fake",priority="normal",tenant="none"} 3.0',
        'vllm:request_success_total{finished_reason="length",model_name="fake",priority="normal",tenant="none"} 1.0',
        'vllm:time_to_first_token_seconds_count{model_name="fake",priority="normal",tenant="none"} 1.0',
        'vllm:inter_token_latency_seconds_count{model_name="fake",priority="normal",tenant="none"} 2.0',
        'vllm:e2e_request_latency_seconds_count{model_name="fake",priority="normal",tenant="none"} 1.0',
        'vllm:num_requests_running{model_name="fake"} 0.0',
        'vllm:kv_cache_usage_perc{model_name="fake"} 0.125',
        'octavo:steps_total{model_name="fake"} 3.0',
        'octavo:http_requests_total{model_name="fake",route="/v1/completions",status="400"} 1.0',
    ):
        assert line in text, line


def test_what_tiers_did_is_told_by_tier_and_by_reason() -> None:
    engine = FakeEngine()
    usual = engine.stats()
    told = {"preemptions_swap": 2, "tier_hit_tokens": 9, "disk_pages_used": 4, "restore_failures/stale": 3}
    engine.stats = lambda: {**usual, **told, "disk_write_failures/full": 1}  # type: ignore[method-assign]
    text = send(make_app(engine), "GET", "/metrics").text
    for line in (
        'octavo:preemptions_swap_total{model_name="fake"} 2.0',
        'vllm:external_prefix_cache_hits_total{model_name="fake"} 9.0',
        'octavo:disk_pages_used{model_name="fake"} 4.0',
        'octavo:restore_failures_total{model_name="fake",reason="stale"} 3.0',
        'octavo:disk_write_failures_total{model_name="fake",reason="full"} 1.0',
    ):
        assert line in text, line


def test_unknown_routes_and_methods_answer_in_our_shape() -> None:
    check_error(send(make_app(), "GET", "/v1/nothing"), 404)
    check_error(send(make_app(), "GET", CHAT), 405)
    assert send(make_app(), "GET", "/version").json()["version"]


def test_what_nobody_knows_inside_a_turn_is_named() -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache": 1}], "contnt": "b", "name": "ann"},
        {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "weight": 0.5},
        {"role": "user", "content": "d"},
    ]
    for path, more in ((CHAT, {}), ("/tokenize", {}), ("/apply-template", {}), ("/v1/messages", {"max_tokens": 5})):
        answer = post(path, {"messages": turns, **more})
        assert answer.status_code == 200, answer.text
        named = answer.headers["x-octavo-warnings"].split(", ")
        assert named == ["messages[0].contnt", "messages[0].content[0].cache", "messages[1].weight"]
        assert "did you mean content?" in answer.json()["warnings"][0]["message"]
    many = post(CHAT, {"messages": [{"role": "user", "content": "a", **{f"x{i}": 1 for i in range(40)}}]})
    assert len(many.json()["warnings"]) == 17 and "24 more" in many.json()["warnings"][-1]["message"]
    item = {"type": "message", "role": "user", "content": "a", "id": "m", "status": "completed", "stat": 1}
    assert post("/v1/responses", {"input": [item]}).headers["x-octavo-warnings"] == "input[0].stat"
