"""Tokens, templates and probes over a fake engine."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import TEMPLATE, FakeEngine, byte_tokenizer
from serve_http import CHAT, HELLO, check_error, make_app, post, send

IDS = [0x68, 0xC3, 0xA9]
TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_back(prefix: str) -> None:
    whole = {"tokens": IDS, "count": 3, "max_model_len": 512, "token_strs": None}
    assert post(f"{prefix}/tokenize", {"prompt": "hé"}).json() == whole
    spelled = post(f"{prefix}/tokenize", {"prompt": "hé", "model": "fake", "return_token_strs": True}).json()
    assert spelled["token_strs"] == ["<0x68>", "<0xC3>", "<0xA9>"]
    assert post(f"{prefix}/tokenize", HELLO).json()["count"] == 10
    assert post(f"{prefix}/detokenize", {"tokens": IDS}).json() == {"prompt": "hé"}


def test_special_tokens_are_added_unless_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, engine = [], FakeEngine()
    encode = engine.tokenizer.encode
    monkeypatch.setattr(engine.tokenizer, "encode", lambda text, **how: seen.append(how) or encode(text, **how))
    for path in ("/tokenize", "/v1/completions"):
        for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            assert post(path, {"prompt": "a", **more}, engine=engine).status_code == 200
    assert [how["add_special_tokens"] for how in seen] == [True, True, False] * 2


def test_what_is_no_token_and_no_text_is_refused_by_name() -> None:
    check_error(post("/detokenize", {"tokens": [999]}), 400, "tokens")
    check_error(post("/detokenize", {}), 400, "tokens")
    check_error(post("/tokenize", {}), 400, "prompt")
    check_error(post("/tokenize", {"prompt": "a" * 5000}), 400, "prompt")
    check_error(post("/apply-template", {"messages": [{"role": "x"}]}), 400, "messages")
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]}), ("/apply-template", HELLO)):
        check_error(post(path, {**body, "model": "other"}), 404, "model")
        told = post(path, {**body, "modle": "fake"})
        assert (
            told.headers["x-octavo-warnings"] == "modle"
            and "did you mean model?" in told.json()["warnings"][0]["message"]
        )


def test_a_template_shows_what_the_model_reads() -> None:
    assert post("/apply-template", HELLO).json() == {"prompt": "<user>hé\n"}
    engine = FakeEngine(tokenizer=byte_tokenizer(TEMPLATE + "{% if add_generation_prompt %}<me>{% endif %}{{ mood }}"))
    body: dict[str, Any] = {"messages": TURNS}
    asked = {
        "<user>a\n<assistant>b\n<me>": {},
        "<user>a\n<assistant>b\n": {"add_generation_prompt": False},
        "<user>a\n<assistant>b": {"continue_final_message": True},
        "<user>a\n<assistant>b\n<me>!": {"chat_template_kwargs": {"mood": "!"}},
    }
    for text, more in asked.items():
        assert post("/apply-template", {**body, **more}, engine=engine).json() == {"prompt": text}
        assert post(CHAT, {**body, **more}, engine=engine).status_code == 200
        assert bytes(engine.asked[-1][0]).decode() == text
        assert post("/tokenize", {**body, **more}, engine=engine).json()["tokens"] == [*text.encode()]


@pytest.mark.parametrize("name", ["messages", "runner", "tools", "documents", "chat_template", "bos_token", "a b", ""])
def test_a_template_is_given_no_code_and_no_name_of_ours(name: str) -> None:
    body = {**HELLO, "chat_template_kwargs": {name: "{{ x }}"}}
    for path in (CHAT, "/apply-template", "/tokenize"):
        check_error(post(path, body), 400, "chat_template_kwargs")


def test_both_ends_of_a_template_are_not_asked_for_at_once() -> None:
    body = {"messages": TURNS, "continue_final_message": True, "add_generation_prompt": True}
    check_error(post(CHAT, body), 400, "continue_final_message")


def test_health_follows_the_engine() -> None:
    engine = FakeEngine()
    app = make_app(engine)
    for path in ("/health", "/health/live", "/health/ready"):
        engine.problem = None
        assert send(app, "GET", path).json() == {"status": "ok", "reason": None, "model": "fake"}
        engine.problem = "no step for 40 s: the oldest request is secret"
        response = send(app, "GET", path)
        assert response.status_code == 503 and response.json()["reason"] == "no step for 40 s"
    check_error(send(app, "POST", CHAT, json=HELLO), 503)


def test_ready_is_whether_a_request_would_be_served_soon() -> None:
    engine = FakeEngine()
    app = make_app(engine, ready_timeout=5)

    def answers() -> tuple[int, int]:
        return send(app, "GET", "/health/live").status_code, send(app, "GET", "/health/ready").status_code

    engine.last_step_age = 100.0
    assert answers() == (200, 200)  # nothing to do
    engine.live = 1
    assert answers() == (200, 503)
    engine.last_step_age = 4.0
    assert answers() == (200, 200)


def test_version() -> None:
    assert send(make_app(), "GET", "/version").json()["version"]
