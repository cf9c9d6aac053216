"""Grammars over HTTP: every name for one, what is refused and with which words, and the process that tries them out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeDelta, FakeEngine
from serve_http import check_error, post

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.decoding.grammar.checker import GrammarChecker
from octavo.engine.output import CANNOT_FOLLOW
from octavo.serve.grammars import constrained_by
from octavo.serve.protocol import ChatRequest
from octavo.tokenizers import worker as worker_module

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hé"}]}
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
ODD = {"type": "array", "uniqueItems": True}
LOOSE = {"schema": ODD, "strict": False}  # what cannot be enforced is refused all the same
AS_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA, ensure_ascii=False))
AS_TAG = Grammar("structural_tag", json.dumps(TAG, ensure_ascii=False))
ASKED: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, AS_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True}}}, AS_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}}, AS_SCHEMA),
    ({"response_format": {"type": "structural_tag", **TAG}}, None),  # below: its type stays in it
    ({"structured_outputs": {"json": SCHEMA}}, AS_SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA, ensure_ascii=False)}}, AS_SCHEMA),
    ({"structured_outputs": {"regex": "a+", "json": None}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "é"]}}, Grammar("choice", '["a", "é"]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ({"structured_outputs": {"structural_tag": TAG}}, AS_TAG),
    ({"structured_outputs": {}, "guided_json": SCHEMA}, AS_SCHEMA),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, AS_SCHEMA),
    ({"structured_outputs": {"json": {}}}, Grammar("json_schema", "{}")),
    ({"guided_json": {}}, Grammar("json_schema", "{}")),
    ({"guided_json": "", "guided_regex": "", "guided_choice": []}, None),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["a"]}, Grammar("choice", '["a"]')),
    ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
    ({"grammar": 'root ::= "a"'}, Grammar("lark", 'root ::= "a"')),
    ({"ebnf": 'root ::= "a"'}, Grammar("lark", 'root ::= "a"')),
    ({"json_schema": SCHEMA}, AS_SCHEMA),
    ({"regex": "a"}, Grammar("regex", "a")),
    ({"structural_tag": json.dumps(TAG, ensure_ascii=False)}, AS_TAG),
]


@pytest.mark.parametrize(("asked", "grammar"), ASKED)
def test_every_name_asks_for_a_grammar(asked: dict[str, Any], grammar: Grammar | None) -> None:
    engine = FakeEngine()
    response = post(CHAT, {**HELLO, **asked}, engine=engine)
    assert response.status_code == 200 and "warnings" not in response.json(), response.text
    ((_, params, _),) = engine.asked
    if asked.get("response_format", {}).get("type") == "structural_tag":
        grammar = Grammar("structural_tag", json.dumps(asked["response_format"], ensure_ascii=False))
    assert params.grammar == grammar


OTHERS: list[tuple[str, dict[str, Any], Grammar | None]] = [
    ("/api/chat", {"format": "json"}, Grammar("json_object")),
    ("/api/chat", {"format": SCHEMA}, AS_SCHEMA),
    ("/api/chat", {"format": ""}, None),
    ("/v1/responses", {"text": {"format": {"type": "text"}}}, None),
    ("/v1/responses", {"text": {"format": {"type": "json_object"}}}, Grammar("json_object")),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, AS_SCHEMA),
    ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, AS_SCHEMA),
    ("/v1/messages", {"output_format": {"type": "json_schema", "schema": SCHEMA}}, AS_SCHEMA),
    ("/v1/messages", {"output_config": {"effort": None}}, None),
]


@pytest.mark.parametrize(("path", "asked", "grammar"), OTHERS)
def test_other_apis_ask_for_a_format(path: str, asked: dict[str, Any], grammar: Grammar | None) -> None:
    engine = FakeEngine()
    body = {"input": "hé"} if path == "/v1/responses" else {**HELLO, "stream": False}
    body |= {"max_tokens": 9} if path == "/v1/messages" else {}
    response = post(path, {**body, **asked}, engine=engine)
    assert response.status_code == 200, response.text
    assert engine.asked[0][1].grammar == grammar
    (name,) = asked
    wrong = {name: "yaml"} if name == "format" else {name: {"effort": "low"}}
    assert post(path, {**body, **wrong}, engine=engine).status_code == 400


BLAMED: list[tuple[str, dict[str, Any], str]] = [
    ("/api/chat", {"format": ODD}, "format"),
    ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": ODD}}}, "text"),
]


@pytest.mark.parametrize(("path", "asked", "name"), BLAMED)
def test_other_apis_are_told_their_own_name_of_what_is_refused(path: str, asked: dict[str, Any], name: str) -> None:
    body = {"input": "hé"} if path == "/v1/responses" else {**HELLO, "max_tokens": 9}
    response = post(path, {**body, **asked})
    error = response.json()["error"]
    said = error if isinstance(error, str) else error["message"]
    assert response.status_code == 400 and said.startswith(f"{name}: uniqueItems: "), error
    assert isinstance(error, str) or error["param"] == name


REFUSED: list[tuple[dict[str, Any], str, str]] = [  # what is blamed, and a word that is said
    ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "schema is not supported"),
    ({"structured_outputs": {"yaml": "x"}}, "structured_outputs", "yaml"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", "both"),
    ({"guided_json": SCHEMA, "regex": "a"}, "regex", "both"),
    ({"guided_choice": []}, "", ""),
    ({"regex": "a" * 5000}, "regex", "4096"),
    ({"json_schema": {"enum": ["x" * 70000]}}, "json_schema", "65536"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "grammar"),
    ({"regex": "(?=a)b"}, "regex", "look-around"),
    ({"regex": r"(a)\1"}, "regex", "references back"),
    ({"regex": "["}, "regex", "well-formed"),
    ({"regex": r"[^\s\S]"}, "regex", "nothing can be said"),
    ({"regex": "(" * 200 + "a" + ")" * 200}, "regex", "nest at most"),
    ({"grammar": "start: " + "(" * 30000 + '"a"' + ")" * 30000}, "grammar", "nest at most"),
    ({"grammar": 'start: start "x"'}, "grammar", "nothing can be said"),
    ({"grammar": 'start: "x" start'}, "grammar", "nothing fits it"),
    ({"grammar": 'root ::= "x" root'}, "grammar", "nothing fits it"),
    ({"grammar": "no grammar"}, "grammar", "GBNF"),
    ({"json_schema": {"type": "foo"}}, "json_schema", "cannot be compiled"),
    ({"json_schema": ODD}, "json_schema", "uniqueItems: this keyword is not supported"),
    ({"json_schema": {"properties": {"secret": {"not": {}}}}}, "json_schema", "not: this keyword"),
    ({"json_schema": {"$ref": "http://x/y"}}, "json_schema", "within the schema"),
    ({"json_schema": {"$ref": "#"}}, "json_schema", "nothing fits"),
    ({"json_schema": {"multipleOf": 999_983}}, "json_schema", "multipleOf: with what is beside it, it needs an"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "response_format",
        "strict",
    ),
    ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 4}}, "json_schema", "nothing fits"),
    ({"json_schema": {"enum": list(range(2049))}}, "json_schema", "2048"),
    ({"json_schema": {"enum": list(range(100_000))[:9000]}}, "json_schema", "4096"),
    ({"json_schema": {"x-guidance": {"lenient": True}, "not": {}}}, "json_schema", "not supported"),
    ({"structural_tag": {"format": {"type": "magic"}}}, "structural_tag", "const_string"),
    ({"structural_tag": {"structures": [], "triggers": []}}, "structural_tag", "1 to"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": ODD}}}, "response_format", "uniqueItems"),
    ({"response_format": {"type": "json_schema", "json_schema": LOOSE}}, "response_format", "uniqueItems"),
    ({"structured_outputs": {"json": ODD}}, "structured_outputs.json", "uniqueItems"),
    ({"structured_outputs": {"json": None, "regex": "["}}, "structured_outputs.regex", "well-formed"),
    ({"guided_json": ODD}, "guided_json", "uniqueItems"),
    ({"guided_regex": "["}, "guided_regex", "well-formed"),
    ({"guided_grammar": "no grammar"}, "guided_grammar", "GBNF"),
    ({"ebnf": "no grammar"}, "ebnf", "GBNF"),
    ({"structured_outputs": {"json": 1}}, "structured_outputs.json", ": json_schema: give a schema"),
    ({"repetition_detection": {"max_pattern_size": 2, "min_size": 1}}, "repetition_detection", "min_size"),
]


@pytest.mark.parametrize(("asked", "blamed", "word"), REFUSED)
def test_what_cannot_be_followed_is_refused_before_anything_is_queued(
    asked: dict[str, Any], blamed: str, word: str
) -> None:
    engine = FakeEngine()
    response = post(CHAT, {**HELLO, **asked}, engine=engine)
    if not blamed:  # an empty list asks for nothing
        assert response.status_code == 200
        return
    error = check_error(response, 400, blamed)
    said = error["message"]
    assert word in said and said.startswith(blamed) and "secret" not in said, error
    assert engine.asked == []


class Stuck(FakeEngine):
    """A grammar that turns out to be too much for the engine."""

    async def generate(self, *args: Any, **kwargs: Any) -> AsyncGenerator[FakeDelta, None]:
        async for delta in super().generate(*args, **kwargs):
            yield replace(delta, error=f"{CANNOT_FOLLOW}: it is too ambiguous here")


@pytest.mark.parametrize(
    "asked", [{"guided_regex": "a+"}, {"structured_outputs": {"json": SCHEMA}}, {"response_format": FORMAT}]
)
def test_a_grammar_that_cannot_be_followed_is_blamed_by_its_name(asked: dict[str, Any]) -> None:
    (name,) = asked
    error = check_error(post(CHAT, {**HELLO, **asked}, engine=Stuck()), 400)
    assert error["code"] == "grammar_failed"
    assert error["param"] == (f"{name}.json" if name == "structured_outputs" else name)
    said = f"{error['param']}: the output could not go on under its grammar: it is too ambiguous here"
    assert error["message"] == f"{said}; give a simpler grammar."


def test_what_constrains_an_answer_without_a_format_has_a_name() -> None:
    asked: list[dict[str, Any]] = [{"tools": [{}]}, {"functions": [{}]}, {"thinking_token_budget": 5}]
    for values in asked:
        assert [constrained_by(ChatRequest(**values))] == list(values)


def test_what_takes_too_long_is_ended_and_the_next_grammar_is_served() -> None:
    hasty = GrammarChecker(cpu_seconds=1e-6)
    large = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^a{1,50}$"} for i in range(700)}}
    try:
        with pytest.raises(InvalidInput, match="more than 1e-06 s"):
            hasty.check(Grammar("json_schema", json.dumps(large)))
        hasty.cpu_seconds = 2.0
        hasty.check(Grammar("json_object"))
    finally:
        hasty.close()


def test_a_worker_that_is_killed_meanwhile_says_so_and_another_one_begins() -> None:
    checker = GrammarChecker(["<tool>"])
    try:
        checker.check(Grammar("lark", 'start: <tool> "a"'))
        checker.kill()
        checker.check(Grammar("json_object"))
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda i=i: found.append(checker.check(Grammar("regex", f"a{{{i}}}"))))
            for i in range(1, 9)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [None] * 8
    finally:
        checker.close()


def test_workers_that_die_between_checks_leave_no_file_open() -> None:
    checker, open_files = GrammarChecker(), []
    try:
        for number in range(3):
            checker.check(Grammar("regex", f"a{{{number}}}b"))
            open_files.append(len(os.listdir("/proc/self/fd")))
            checker.kill()
            os.waitid(os.P_PID, checker._worker._process.pid, os.WEXITED | os.WNOWAIT)  # type: ignore[union-attr]
    finally:
        checker.close()
    assert len(set(open_files)) == 1, open_files


def test_a_worker_that_stands_still_before_its_first_word_is_given_up(monkeypatch) -> None:
    def stopped(*args: Any, **options: Any) -> Any:
        worker = start(*args, **options)
        os.kill(worker.pid, signal.SIGSTOP)
        return worker

    checker, start = GrammarChecker(), subprocess.Popen
    monkeypatch.setattr(worker_module, "_WALL_SECONDS", 0.2)
    monkeypatch.setattr(worker_module.subprocess, "Popen", stopped)
    try:
        with pytest.raises(InvalidInput, match="took more than"):
            checker.check(Grammar("regex", "a"))
        monkeypatch.undo()
        checker.check(Grammar("regex", "b"))
    finally:
        checker.close()
