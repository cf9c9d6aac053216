"""Tools and reasoning over the APIs: what the model is shown, and what comes of its answer."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fake_engine import FakeEngine, byte_tokenizer
from serve_http import CHAT, check_error, events, make_app, post, send

from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams
from octavo.decoding.pieces import Call
from octavo.decoding.tools import DIALECTS, written
from octavo.serve.protocol import ChatRequest
from octavo.serve.tools import tools_asked
from octavo.tokenizers.simple import SimpleTokenizer

SHOWN = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}<tool_call>"
SHOWN += "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }}"
SHOWN += "{{ c.function.arguments.a }}){% endfor %}{{ '\n' }}{% endfor %}"
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.reasoning_content }}\n{% endfor %}<think>\n{# </think> #}"
)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("f", "g")]
USER: Any = [{"role": "user", "content": "hé"}]
CALLS = [Call("f", '{"a": 1}'), Call("g", '{"a": [1, "é✓"]}')]
SAID = "I look.\n" + written(DIALECTS["hermes"], CALLS)
BODY = {"messages": USER, "tools": TOOLS}


def engine(answer: str | None = None, template: str = SHOWN) -> FakeEngine:
    return FakeEngine(answer=answer, max_seq_len=4096, tokenizer=byte_tokenizer(template))


def prompt_of(body: dict[str, Any], template: str = SHOWN, **config: Any) -> str:
    asked = engine("x", template)
    answer = post(CHAT, body, engine=asked, **config)
    assert answer.status_code == 200, answer.text
    return bytes(asked.asked[0][0]).decode()


def gathered(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The message of a stream, as its chunks build it, and its finish reason."""
    message: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks):
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"id": call["id"], "type": call["type"], "function": {**call["function"]}})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    return ({**message, "tool_calls": calls} if calls else message), next(filter(None, reasons))


def test_calls_are_the_same_whole_and_streamed() -> None:
    whole = post(CHAT, {**BODY, "request_id": "r"}, engine=engine(SAID)).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] == "I look."
    assert [call["function"] for call in whole["message"]["tool_calls"]] == [
        {"name": call.name, "arguments": call.arguments} for call in CALLS
    ]
    ids = {call["id"] for call in whole["message"]["tool_calls"]}
    assert len(ids) == 2 and all(name.startswith("call_") for name in ids)
    message, reason = gathered(events(post(CHAT, {**BODY, "stream": True}, engine=engine(SAID))))
    assert reason == "tool_calls" and message["content"] == "I look."
    assert [c["function"] for c in message["tool_calls"]] == [c["function"] for c in whole["message"]["tool_calls"]]
    assert not ids & {call["id"] for call in message["tool_calls"]}


def test_what_is_no_call_is_text() -> None:
    for said in ("<tool_call>{}</tool_call>", '<tool_call>{"name": "h"}</tool_call> ', SAID[:-20]):
        choice = post(CHAT, BODY, engine=engine(said)).json()["choices"][0]
        chunks = events(post(CHAT, {**BODY, "stream": True}, engine=engine(said)))
        message, reason = gathered(chunks)
        assert message["content"] == choice["message"]["content"] and reason == choice["finish_reason"]
        assert ("tool_calls" in choice["message"]) == (said == SAID[:-20])
    cut = post(CHAT, {**BODY, "max_tokens": 40}, engine=engine(SAID)).json()["choices"][0]
    assert cut["finish_reason"] == "length" and cut["message"]["content"] == SAID[:40]


def test_a_call_that_a_stop_string_has_cut_is_not_what_it_ended_for() -> None:
    for body in (BODY, {**BODY, "tool_choice": "required"}):
        for stop, reason in (("1", "stop"), ("z", "tool_calls")):
            asked = {**body, "stop": [stop]}
            choice = post(CHAT, asked, engine=engine(SAID)).json()["choices"][0]
            message, streamed = gathered(events(post(CHAT, {**asked, "stream": True}, engine=engine(SAID))))
            assert choice["finish_reason"] == streamed == reason and choice["message"].get("tool_calls")
            assert [call["function"] for call in message["tool_calls"]] == [
                call["function"] for call in choice["message"]["tool_calls"]
            ]


def test_one_call_at_most_and_none_where_none_is_wanted() -> None:
    one = post(CHAT, {**BODY, "parallel_tool_calls": False}, engine=engine(SAID)).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in one["tool_calls"]] == ["f"]
    none = post(CHAT, {**BODY, "tool_choice": "none"}, engine=engine(SAID)).json()["choices"][0]
    assert none["message"]["content"] == SAID and none["finish_reason"] == "stop"


def test_functions_are_the_older_tools() -> None:
    body = {"messages": USER, "functions": [tool["function"] for tool in TOOLS]}
    choice = post(CHAT, body, engine=engine(SAID)).json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    chunks = events(post(CHAT, {**body, "stream": True}, engine=engine(SAID)))
    found = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
    assert (
        "".join(part.get("name", "") for part in found) == "f"
        and chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    )
    assert "".join(part.get("arguments", "") for part in found) == '{"a": 1}'
    assert prompt_of(body) == prompt_of(BODY)


CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
TURNS: Any = [
    *USER,
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "content": "<b>", "tool_call_id": "1"},
]


def test_a_template_is_shown_tools_calls_and_results() -> None:
    assert prompt_of({"messages": TURNS, "tools": TOOLS}) == "[f][g]<tool_call><user>hé\n<assistant>(f7)\n<tool><b>\n"
    older = [
        TURNS[0],
        {"role": "assistant", "function_call": CALLED["function"]},
        {"role": "function", "name": "f", "content": "<b>"},
    ]
    assert prompt_of({"messages": older, "tools": TOOLS}) == prompt_of({"messages": TURNS, "tools": TOOLS})
    assert prompt_of({**BODY, "tool_choice": "none"}) == "<tool_call><user>hé\n"
    answer = send(make_app(engine()), "POST", "/apply-template", json={"messages": TURNS, "tools": TOOLS}).json()
    assert answer["prompt"] == prompt_of({"messages": TURNS, "tools": TOOLS})


def test_where_the_template_shows_no_tools_they_are_told_in_words() -> None:
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    told = prompt_of({"messages": TURNS, "tools": TOOLS}, plain)
    assert told.startswith("<system>You can call functions.") and json.dumps(TOOLS[1]["function"]) in told
    assert told.endswith(
        '<user>hé\n<assistant>[{"name": "f", "arguments": {"a": 7}}]\n<user><tool_response>\n<b>\n</tool_response>\n'
    )
    system = [{"role": "system", "content": "Be brief."}, *USER]
    assert prompt_of({"messages": system, "tools": TOOLS}, plain).startswith("<system>Be brief.\n\nYou can call")
    assert prompt_of({"messages": system}, plain) == "<system>Be brief.\n<user>hé\n"
    named = prompt_of({"messages": TURNS, "tools": TOOLS}, plain, tool_call_parser="pythonic")
    assert "<assistant>[f(a=7)]\n" in named


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web"}]}, "tools"), ({"tools": [{}]}, "tools"), ({"tools": [TOOLS[0]] * 2}, "tools"),
    ({"tools": [{"function": {"name": 'a"b\n'}}]}, "tools"), ({"tools": [{"function": {"name": "é"}}]}, "tools"),
    ({"tools": [{"function": {"name": "auto"}}]}, "tools"),
    ({"tools": [{"function": {"name": "f", "parameters": 1}}]}, "tools"),
    ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
    ({"tools": [{"function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": [{"function": {"name": "f", "description": "x" * 50_000}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"), ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": TOOLS, "functions": [{"name": "f"}]}, "functions"),
    ({"functions": [{}]}, "functions"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "param"), REFUSED)
def test_what_cannot_be_asked_is_refused_by_name(more: dict[str, Any], param: str) -> None:
    asked = engine()
    check_error(post(CHAT, {"messages": USER, **more}, engine=asked), 400, param)
    assert not asked.asked


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"a": NaN}', '{"a": 1e999}', "{'a': 1}", [], False, 0])
def test_arguments_of_earlier_calls_are_a_json_object_or_left_out(arguments: Any) -> None:
    for given, status in ((arguments, 400), (None, 200), ("", 200), ({}, 200)):
        call = {"function": {"name": "f", "arguments": given}}
        answer = post(CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}]}, engine=engine("x"))
        assert answer.status_code == status and ("JSON object" in answer.text) == (status == 400), answer.text


def test_a_template_whose_calls_cannot_be_read_is_said_so() -> None:
    template = "{{ tools }}<function=f>{{ messages }}"
    error = check_error(post(CHAT, BODY, engine=engine("x", template)), 400, "tools")
    assert "--tool-call-parser" in error["message"]
    assert post(CHAT, BODY, engine=engine("x", template), tool_call_parser="hermes").status_code == 200


def test_a_forced_choice_names_the_tools_that_may_be_called() -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    asked = tools_asked(ChatRequest(messages=USER, tools=TOOLS, tool_choice=choice))
    assert asked is not None and asked.must and [tool.name for tool in asked.callable] == ["g"]


def test_thoughts_are_apart_from_the_answer() -> None:
    def ask(**more: Any) -> dict[str, Any]:
        made = engine("so it is\n</think>\n\nYes.", THINKS)
        return dict(post(CHAT, {"messages": USER, **more}, engine=made).json()["choices"][0]["message"])

    assert ask()["reasoning_content"] == "so it is" and ask()["content"] == "Yes."
    assert "reasoning_content" not in ask(include_reasoning=False) and ask(include_reasoning=False)["content"] == "Yes."
    assert ask(separate_reasoning=False)["content"] == "so it is\n</think>\n\nYes."
    stream = events(post(CHAT, {"messages": USER, "stream": True}, engine=engine("so\n</think>\n\nYes.", THINKS)))
    assert gathered(stream) == ({"reasoning_content": "so", "content": "Yes."}, "stop")
    off = post(CHAT, {"messages": USER}, engine=engine("a</think>b", THINKS), reasoning_parser="none").json()
    assert off["choices"][0]["message"]["content"] == "a</think>b"
    earlier = [*USER, {"role": "assistant", "content": "b", "reasoning_content": "a"}, *USER]
    assert "<assistant>ba\n" in prompt_of({"messages": earlier}, THINKS)


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_thought_are_in_the_usage(stream: bool) -> None:
    def usage(path: str, **body: Any) -> dict[str, Any]:
        made = engine("so it is\n</think>\n\nYes.", THINKS)
        answer = post(path, {**body, "stream": stream}, engine=made)
        assert answer.status_code == 200, answer.text
        if not stream:
            return dict(answer.json()["usage"])
        parts = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        found = [event.get("response", event).get("usage") for event in parts]
        return dict(next(filter(None, reversed(found))))

    size = len("so it is\n</think>")
    told = {"stream_options": {"include_usage": True}} if stream else {}
    for more, count in (({"n": 2}, 2 * size), ({"max_tokens": 5}, 5), ({"include_reasoning": False}, size)):
        found = usage(CHAT, messages=USER, **told, **more)
        assert found["completion_tokens_details"]["reasoning_tokens"] == count, more
    assert "completion_tokens_details" not in usage(CHAT, messages=USER, separate_reasoning=False, **told)
    assert usage("/v1/responses", input="a")["output_tokens_details"]["reasoning_tokens"] == size
    assert usage("/v1/messages", messages=USER, max_tokens=99)["output_tokens_details"] == {"thinking_tokens": size}


# -- what is enforced


def grammar_of(body: dict[str, Any], template: str = SHOWN, **config: Any) -> str:
    """The grammar that the engine is given; empty if none."""
    asked = engine("x", template)
    answer = post(CHAT, {"messages": USER, **body}, engine=asked, **config)
    assert answer.status_code == 200, answer.text
    grammar = asked.asked[0][1].grammar
    return "" if grammar is None else grammar.source


def test_a_forced_call_is_a_grammar_and_so_is_one_that_has_begun() -> None:
    auto, required = grammar_of({"tools": TOOLS}), grammar_of({"tools": TOOLS, "tool_choice": "required"})
    named = grammar_of({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}})
    assert "lazy" in auto and "lazy" not in required and "call_1" in required and "call_1" not in named
    assert '\\"g\\"' in named and '\\"f\\"' not in named
    one = grammar_of({"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False})
    assert len(one) < len(required)
    assert not grammar_of({"tools": TOOLS, "tool_choice": "none"}) and not grammar_of({})
    assert not grammar_of({"tools": TOOLS}, tool_call_parser="json")  # no mark says that a call has begun
    older = grammar_of({"functions": [TOOLS[0]["function"]], "function_call": {"name": "f"}})
    assert older == grammar_of({"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False})


def test_what_cannot_be_enforced_is_refused_where_it_was_demanded() -> None:
    odd = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": odd}}]
    assert '"not"' not in grammar_of({"tools": tools})
    strict = [{"type": "function", "function": {**tools[0]["function"], "strict": True}}]
    for body in ({"tools": tools, "tool_choice": "required"}, {"tools": strict}):
        asked = engine()
        error = check_error(post(CHAT, {"messages": USER, **body}, engine=asked), 400, "tools")
        assert "not" in error["message"] and not asked.asked
    error = check_error(post(CHAT, {"messages": USER, "tools": [_strict("yes")]}, engine=engine()), 400, "tools")
    assert "strict" in error["message"]


@pytest.mark.parametrize(
    ("asked", "blamed"),
    [
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"function_call": "yes"}, "function_call"),
        ({"tools": TOOLS, "function_call": "none"}, "function_call"),
        ({"functions": [{"name": "f"}], "tool_choice": "required"}, "tool_choice"),
        ({"function_call": "none", "tool_choice": "auto"}, ""),
    ],
)
def test_a_choice_among_tools_that_are_not_there_is_refused(asked: dict[str, Any], blamed: str) -> None:
    answer = post(CHAT, {"messages": USER, **asked}, engine=engine("x"))
    assert answer.status_code == 200 if not blamed else check_error(answer, 400, blamed)


def _strict(value: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "strict": value}}


def test_strict_is_passed_on_by_anthropics_api() -> None:
    odd = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"not": {}}}}, "strict": True}
    body = {"messages": USER, "max_tokens": 9, "tools": [odd]}
    assert post("/v1/messages", body, engine=engine()).status_code == 400
    assert post("/v1/messages", {**body, "tools": [{**odd, "strict": False}]}, engine=engine()).status_code == 200


FORMATS: Any = [{"response_format": {"type": "json_object"}}, {"guided_json": PARAMETERS}]


@pytest.mark.parametrize("form", FORMATS)
def test_tools_and_a_format_of_the_answer_exclude_each_other(form: dict[str, Any]) -> None:
    older = {"functions": [TOOLS[0]["function"]]}
    for tools, blamed in ((older, "functions"), *(({"tools": TOOLS, "tool_choice": c}, "tools") for c in _CHOICES)):
        asked = engine()
        check_error(post(CHAT, {"messages": USER, **tools, **form}, engine=asked), 400, blamed)
        assert not asked.asked
    none = {"tools": TOOLS, "tool_choice": "none"}
    assert post(CHAT, {"messages": USER, **none, **form}, engine=engine("{}")).status_code == 200


_CHOICES = ("auto", "required")


WILLING = THINKS.replace("<think>\n{#", "{# <think>")  # the prompt opens no thoughts


def asked_for(body: dict[str, Any], template: str, said: str = "x") -> tuple[SamplingParams, dict[str, Any]]:
    """What the engine is given, and the message that comes of what it says."""
    asked = FakeEngine(answer=said, tokenizer=thinker(template), vocab_size=259)
    answer = post(CHAT, {"messages": USER, **body}, engine=asked)
    assert answer.status_code == 200, answer.text
    return asked.asked[0][1], answer.json()["choices"][0]["message"]


def test_thoughts_may_come_before_a_format_of_the_answer() -> None:
    said = '{"a": "<think>1</think>"}'  # a mark in a word of the grammar marks nothing
    thoughts = "so\n</think>\n\n"
    form = {"response_format": {"type": "json_object"}}
    for body in (form, {"guided_regex": ".*"}):
        for template, before in ((THINKS, thoughts), (WILLING, "<think>" + thoughts), (WILLING, "")):
            params, message = asked_for(body, template, before + said)
            assert message["content"] == said and message.get("reasoning_content") == ("so" if before else None)
            grammar = params.grammar
            assert grammar is not None and grammar.kind in ("json_object", "regex")
            assert grammar.before.startswith("thoughts: thinking" if template is THINKS else "thoughts: (")
    over = THINKS.replace("{#", "</think>\n\n{#")
    for more, template in (({"separate_reasoning": False}, THINKS), ({}, over), ({}, SHOWN)):
        params, message = asked_for({**form, **more}, template, said)
        assert params.grammar == Grammar("json_object") and message["content"] == said
        assert "reasoning_content" not in message
    for template, plain in ((WILLING, True), (THINKS, False)):  # where no token opens thoughts
        several = engine("x", template)
        assert post(CHAT, {"messages": USER, **form}, engine=several).status_code == 200
        assert (several.asked[0][1].grammar == Grammar("json_object")) == plain
    begun = {"messages": [*USER, {"role": "assistant", "content": "{"}], "continue_final_message": True}
    assert asked_for({**form, **begun}, THINKS.replace("<think>\n", ""))[0].grammar == Grammar("json_object")


def test_thoughts_that_a_turn_has_begun_go_on() -> None:
    for said, thought in (("<think>so", True), ("<think>so</think>", False), ("so", False)):
        turns = [*USER, {"role": "assistant", "content": said}]
        body = {"messages": turns, "continue_final_message": True}
        for form in ({}, {"guided_regex": ".*"}):
            params, message = asked_for({**body, **form}, TURNS_OF + "{# <think> #}", "b</think>c")
            assert (message.get("reasoning_content"), message["content"]) == (
                ("b", "c") if thought else (None, "b</think>c")
            )
            assert not form or (params.grammar is not None and bool(params.grammar.before) == thought)


def test_a_format_and_a_budget_of_thought_go_together() -> None:
    asked = FakeEngine(answer="x", tokenizer=THINKER, vocab_size=259)
    body = {"messages": USER, "thinking_token_budget": 3, "guided_choice": ["a", "b"]}
    assert post(CHAT, body, engine=asked).status_code == 200
    grammar = asked.asked[0][1].grammar
    assert grammar is not None and grammar.kind == "choice" and "{0,3} <[258]>" in grammar.before


def test_a_schema_that_nobody_insists_on_is_said_not_to_be_enforced() -> None:
    odd = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    either = {"type": "object", "properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}]}
    for schema, dialect in ((odd, "hermes"), (odd, "gemma"), (either, "gemma")):
        functions = [{"name": "f", "parameters": schema}, TOOLS[1]["function"]]
        tools = [{"type": "function", "function": function} for function in functions]
        for body, place in (({"tools": tools}, "tools[0]"), ({"functions": functions}, "functions[0]")):
            asked = engine("x")
            answer = post(CHAT, {"messages": USER, **body}, engine=asked, tool_call_parser=dialect)
            assert answer.headers["x-octavo-warnings"] == place, answer.text
            (warning,) = answer.json()["warnings"]
            assert ("not" if schema is odd else "anyOf") in warning["message"] and ".." not in warning["message"]
            grammar = asked.asked[0][1].grammar
            assert grammar is not None and '"integer"' in grammar.source  # the other one is enforced
        strict = [{"type": "function", "function": {**functions[0], "strict": True}}]
        asked = engine()
        refused = post(CHAT, {"messages": USER, "tools": strict}, engine=asked, tool_call_parser=dialect)
        assert check_error(refused, 400, "tools")["code"] == "invalid_grammar" and not asked.asked
        beside = [tools[0], {"type": "function", "function": {**functions[1], "strict": True}}]
        assert post(CHAT, {"messages": USER, "tools": beside}, engine=engine("x")).status_code == 200


def test_tools_beyond_what_a_grammar_holds_are_said_not_to_be_enforced() -> None:
    large = {"type": "object", "properties": {f"p{i}": {"enum": ["x" * 30, "y" * 30]} for i in range(9)}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": large}} for i in range(120)]
    asked = engine("x")
    asked.max_seq_len = 1 << 17
    answer = post(CHAT, {"messages": USER, "tools": tools}, engine=asked)
    assert answer.headers["x-octavo-warnings"] == "tools" and asked.asked[0][1].grammar is None
    check_error(post(CHAT, {"messages": USER, "tools": tools, "tool_choice": "required"}, engine=asked), 400, "tools")


@pytest.mark.parametrize("beside", [{"ignore_eos": True}, {"use_beam_search": True}])
def test_what_a_grammar_cannot_stand_beside_leaves_calls_to_the_model_and_says_so(beside: dict[str, Any]) -> None:
    asked = engine("x")
    answer = post(CHAT, {**BODY, **beside}, engine=asked)
    assert answer.headers["x-octavo-warnings"] == "tools" and asked.asked[0][1].grammar is None
    check_error(post(CHAT, {**BODY, **beside, "tool_choice": "required"}, engine=asked), 400, "tools")
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    check_error(post(CHAT, {**BODY, **beside, "tools": [strict]}, engine=asked), 400, "tools")


@pytest.mark.parametrize("dialect", ["json", "llama3_json", "pythonic"])
def test_strict_calls_are_enforced_where_no_mark_opens_them(dialect: str) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    assert "WORDS" in grammar_of({"tools": strict}, tool_call_parser=dialect)
    assert not grammar_of({"tools": TOOLS}, tool_call_parser=dialect)
    answer = post(CHAT, {"messages": USER, "tools": strict}, engine=engine("x"), tool_call_parser=dialect)
    assert "x-octavo-warnings" not in answer.headers


def thinker(template: str) -> SimpleTokenizer:
    """One whose marks of thought are tokens."""
    spelled = [f"<0x{byte:02X}>" for byte in range(256)] + ["<eos>", "<think>", "</think>"]
    return SimpleTokenizer(
        spelled, kind="bytes", eos=["<eos>"], special=["<think>", "</think>"], chat_template=template
    )


THINKER = thinker(THINKS)


def test_thoughts_have_a_budget_where_their_mark_is_a_token() -> None:
    asked = FakeEngine(answer="x", tokenizer=THINKER, vocab_size=259)
    assert post(CHAT, {"messages": USER, "thinking_token_budget": 7}, engine=asked).status_code == 200
    params = asked.asked[0][1]
    assert "<[^256,258]>{0,7} <[258]>" in params.grammar.source and not params.skip_special_tokens
    body = {"messages": USER, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 7}}
    assert post("/v1/messages", body, engine=asked).status_code == 200
    assert asked.asked[1][1].grammar == params.grammar
    bad = check_error(post(CHAT, {"messages": USER, "thinking_token_budget": 7}, engine=engine("x", THINKS)), 400)
    assert bad["param"] == "thinking_token_budget" and "no single token" in bad["message"]
    check_error(post(CHAT, {"messages": USER, "thinking_token_budget": -1}, engine=asked), 400, "thinking_token_budget")


# -- the other APIs

THOUGHT = "<think>\nso\n</think>\n\n" + SAID
ALL = SHOWN + "{# <think> #}"


def named_events(text: str) -> list[dict[str, Any]]:
    return [json.loads(part.split("\ndata: ")[1]) for part in text.split("\n\n") if part]


def test_anthropics_blocks_are_the_same_whole_and_streamed() -> None:
    tools = [{"name": name, "description": "d", "input_schema": PARAMETERS} for name in ("f", "g")]
    body = {"messages": USER, "tools": tools, "max_tokens": 2000}
    whole = post("/v1/messages", body, engine=engine(THOUGHT, ALL)).json()
    plain = [{k: v for k, v in block.items() if k != "id"} for block in whole["content"]]
    assert whole["stop_reason"] == "tool_use" and plain == [
        {"type": "thinking", "thinking": "so", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "name": "g", "input": {"a": [1, "é✓"]}},
    ]
    events_ = named_events(post("/v1/messages", {**body, "stream": True}, engine=engine(THOUGHT, ALL)).text)
    blocks: list[dict[str, Any]] = []
    for event in events_:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta, block = dict(event["delta"]), blocks[event["index"]]
            delta.pop("type")
            ((field, text),) = delta.items()
            field = "json" if field == "partial_json" else field
            block[field] += text
    for block in blocks:
        text = block.pop("json")
        if text:
            block["input"] = json.loads(text)
    assert [{k: v for k, v in block.items() if k != "id"} for block in blocks] == plain
    assert next(event["delta"]["stop_reason"] for event in events_ if event["type"] == "message_delta") == "tool_use"


def test_anthropics_turns_are_the_same_conversation() -> None:
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 7}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "<b>"}]}
    turns = [
        *USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    tools = [{"name": name, "input_schema": PARAMETERS} for name in ("f", "g")]
    asked = engine("x")
    answer = post("/v1/messages", {"messages": turns, "tools": tools, "max_tokens": 9}, engine=asked)
    assert answer.status_code == 200, answer.text
    assert bytes(asked.asked[0][0]).decode() == prompt_of(
        {"messages": [*TURNS, {"role": "user", "content": "So?"}], "tools": TOOLS}
    )
    count = post("/v1/messages/count_tokens", {"messages": turns, "tools": tools}, engine=engine()).json()
    assert count["input_tokens"] == len(asked.asked[0][0])
    for choice in ({"type": "tool", "name": "h"}, {"type": "x"}, {"type": "auto", "disable_parallel_tool_use": 1}):
        bad = post(
            "/v1/messages", {"messages": USER, "tools": tools, "max_tokens": 9, "tool_choice": choice}, engine=engine()
        )
        assert bad.status_code == 400 and bad.json()["error"]["message"].startswith("tool_choice")
    for block in ({"type": "image"}, {**use, "input": "x"}, {**use, "name": 1}):
        bad = post("/v1/messages", {"messages": [{"role": "assistant", "content": [block]}], "max_tokens": 9})
        assert bad.status_code == 400 and bad.json()["error"]["message"].startswith("messages[0]")


def test_ollamas_calls_are_the_same_whole_and_streamed() -> None:
    body = {"messages": USER, "tools": TOOLS, "stream": False}
    whole = post("/api/chat", body, engine=engine(THOUGHT, ALL)).json()["message"]
    functions = [call["function"] for call in whole["tool_calls"]]
    assert [(call["name"], call["arguments"]) for call in functions] == [("f", {"a": 1}), ("g", {"a": [1, "é✓"]})]
    assert (whole["content"], whole["thinking"]) == ("I look.", "so")
    lines = [
        json.loads(line)
        for line in post("/api/chat", {**body, "stream": True}, engine=engine(THOUGHT, ALL)).text.splitlines()
    ]
    messages = [line["message"] for line in lines]
    assert [call["function"] for message in messages for call in message.get("tool_calls", ())] == functions
    assert "".join(message["content"] for message in messages) == "I look."
    assert "".join(message.get("thinking", "") for message in messages) == "so"
    asked = engine("x")
    back = [
        *USER,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 7}}}]},
    ]
    back.append({"role": "tool", "content": "<b>", "tool_name": "f"})
    assert "x-octavo-warnings" not in post("/api/chat", {**body, "messages": back}, engine=asked).headers
    assert bytes(asked.asked[0][0]).decode() == prompt_of({"messages": TURNS, "tools": TOOLS})
    quiet = post("/api/chat", {**body, "think": False}, engine=engine(THOUGHT, ALL)).json()["message"]
    assert "thinking" not in quiet and quiet["content"] == "I look."


def test_responses_items_are_the_same_whole_and_streamed_and_are_gone_on_with() -> None:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    app = make_app(engine(THOUGHT, ALL))
    body = {"input": "hé", "tools": tools}
    made = send(app, "POST", "/v1/responses", json={**body, "request_id": "a"}).json()
    kinds = [item["type"] for item in made["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"] and made["tools"] == tools
    calls = made["output"][2:]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
        ("f", {"a": 1}),
        ("g", {"a": [1, "é✓"]}),
    ]
    streamed = named_events(send(app, "POST", "/v1/responses", json={**body, "stream": True, "request_id": "b"}).text)
    final = streamed[-1]["response"]["output"]
    done = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    assert done == final and [item["type"] for item in final] == kinds
    fragments: dict[int, str] = {}
    for event in streamed:
        if event["type"] == "response.function_call_arguments.delta":
            fragments[event["output_index"]] = fragments.get(event["output_index"], "") + event["delta"]
    assert fragments == {2: CALLS[0].arguments, 3: CALLS[1].arguments}
    output = {"type": "function_call_output", "call_id": calls[0]["call_id"], "output": "<b>"}
    answer = send(
        app,
        "POST",
        "/v1/responses",
        json={"input": [output], "tools": tools, "previous_response_id": "resp_a", "request_id": "c"},
    )
    assert answer.status_code == 200, answer.text
    listed = send(app, "GET", "/v1/responses/resp_c/input_items").json()["data"]
    assert [item["type"] for item in listed] == [
        "message",
        "message",
        "function_call",
        "function_call",
        "function_call_output",
    ]
    whole = {
        "input": [{"role": "user", "content": "hé"}, *[i for i in final if i["type"] != "message"], output],
        "tools": tools,
    }
    asked = engine("x", ALL)
    assert post("/v1/responses", whole, engine=asked).status_code == 200
    assert bytes(asked.asked[0][0]).decode().startswith("[f][g]<tool_call><user>hé\n<assistant>(f1)(g[1, ")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses"])
def test_any_tools_are_answered_or_refused(path: str) -> None:
    odd: list[Any] = [
        [1],
        [[]],
        [{}],
        [{"function": 1}],
        [{"type": []}],
        [{"name": {}}],
        {"a": 1},
        "x",
        [{"function": {"name": "f", "parameters": {"type": {}}}}],
    ]
    for value in odd:
        for choice in ("required", {}, {"type": []}, {"type": "function", "function": []}, 5, None):
            body = {
                "messages": USER,
                "input": "a",
                "max_tokens": 9,
                "stream": False,
                "tools": value,
                "tool_choice": choice,
            }
            assert post(path, body, engine=engine("x")).status_code in (200, 400), (value, choice)


# -- how much is thought

SWITCHED = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
WORDED = "{{ '[' ~ reasoning_effort ~ ']' if reasoning_effort is defined }}"
TURNS_OF = "{% for m in messages %}{{ m.content }}{% endfor %}"
OPENED = TURNS_OF + "<think>"


def effort(template: str, path: str = CHAT, **body: Any) -> tuple[str, int | None, str]:
    """The prompt, the budget in tokens and the names in the warnings that come of what a body says of thoughts."""
    asked = FakeEngine(answer="x</think>y", tokenizer=thinker(template), vocab_size=259)
    answer = post(path, {**({} if "input" in body else {"messages": USER}), **body}, engine=asked)
    assert answer.status_code == 200, answer.text
    prompt, params, _ = asked.asked[0]
    text = asked.tokenizer.decode(prompt, skip_special_tokens=False)
    grammar = params.grammar
    most = None if grammar is None else re.search(r"block: (?:<[^>]*>\{0,(\d+)\})?", grammar.source)
    budget = None if most is None else int(most[1] or 0)
    return text, budget, answer.headers.get("x-octavo-warnings", "")


def test_effort_is_a_word_of_the_template_or_a_switch_and_a_budget() -> None:
    worded, switched = WORDED + OPENED, TURNS_OF + SWITCHED + "{# <think> #}"
    assert effort(worded, reasoning_effort="low") == ("[low]hé<think>", None, "")
    assert effort(worded, thinking={"type": "enabled"}) == ("[medium]hé<think>", None, "")
    assert effort(worded, thinking={"type": "enabled", "budget_tokens": 9}) == ("[medium]hé<think>", 9, "")
    assert effort(switched, reasoning_effort="none") == ("hé<think></think>", None, "")
    assert effort(switched, thinking={"type": "disabled"}) == ("hé<think></think>", None, "")
    assert effort(switched, reasoning_effort="medium") == ("hé", 8192, "")
    assert effort(OPENED, reasoning_effort="none") == ("hé<think>", 0, "")
    assert effort(OPENED, reasoning_effort="minimal") == ("hé<think>", 512, "")
    assert effort(OPENED, reasoning_effort="high") == effort(OPENED) == ("hé<think>", None, "")
    assert effort(OPENED, reasoning_effort="low", thinking_token_budget=5) == ("hé<think>", 5, "")
    assert effort(switched, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})[1] == 2048
    fixed = {"chat_template_kwargs": {"reasoning_effort": "max"}}
    assert effort(worded, reasoning_effort="low", **fixed) == ("[max]hé<think>", None, "")


def test_effort_is_spelled_in_every_api() -> None:
    template = WORDED + OPENED
    responses = {"path": "/v1/responses", "input": "hé"}
    assert effort(template, **responses, reasoning={"effort": "high"}) == ("[high]hé<think>", None, "")
    summed = effort(template, **responses, reasoning={"effort": "low", "summary": "auto"})
    assert summed == ("[low]hé<think>", None, "reasoning.summary")
    many = {"input": "a", "reasoning": {f"x{number}": 1 for number in range(1000)}}
    assert len(post("/v1/responses", many, engine=engine("x")).json()["warnings"]) == 16
    messages = {"path": "/v1/messages", "max_tokens": 9}
    assert effort(template, **messages, output_config={"effort": "max"}) == ("[max]hé<think>", None, "")
    assert effort(template, **messages, thinking={"type": "adaptive"}) == ("[medium]hé<think>", None, "")
    assert effort(OPENED, **messages, thinking={"type": "disabled"}) == ("hé<think>", 0, "")
    for think, word in ((True, "medium"), ("high", "high"), (False, "none")):
        assert effort(template, path="/api/chat", think=think, stream=False)[0] == f"[{word}]hé<think>"
    count = {"messages": USER, "reasoning_effort": "low"}
    asked = engine("x", template)
    assert post("/apply-template", count, engine=asked).json()["prompt"] == "[low]hé<think>"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"reasoning_effort": "much"}, "reasoning_effort"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),  # by a model without thoughts
        (CHAT, {"thinking": {"type": "enabled"}}, "thinking"),
        (CHAT, {"thinking": {"type": "on"}}, "thinking"),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking"),
        (CHAT, {"thinking": {"type": "disabled", "display": "omitted"}}, "thinking"),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_token_budget": 5}, "thinking"),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "low"}}, "reasoning"),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": 1}}, "reasoning"),
        ("/v1/messages", {"max_tokens": 9, "output_config": {"effort": "low"}}, "output_config"),
        ("/v1/messages", {"max_tokens": 9, "output_config": {"effort": 3}}, "output_config"),
        ("/api/chat", {"think": True, "stream": False}, "think"),
        ("/api/chat", {"think": "much", "stream": False}, "think"),
        ("/api/generate", {"prompt": "a", "raw": True, "think": True}, "think"),
        ("/v1/completions", {"prompt": "a", "reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
def test_an_effort_that_cannot_be_made_is_refused_by_its_name(path: str, body: dict[str, Any], param: str) -> None:
    asked = engine()
    answer = post(path, {**({} if "prompt" in body or "input" in body else {"messages": USER}), **body}, engine=asked)
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert answer.status_code == 400 and message.startswith(param) and not asked.asked


def test_where_thoughts_cannot_be_kept_short_a_word_for_it_comes_back() -> None:
    asks: list[dict[str, Any]] = [{"reasoning_effort": "low"}, {"thinking": {"type": "disabled"}}]
    for body in asks:
        answer = post(CHAT, {"messages": USER, **body}, engine=engine("x", OPENED))
        assert answer.headers["x-octavo-warnings"] == next(iter(body))
        assert "</think>" in answer.json()["warnings"][0]["message"]
    quiet = {"messages": USER, "think": False, "stream": False}
    assert post("/api/chat", quiet, engine=engine("x", OPENED)).headers["x-octavo-warnings"] == "think"
