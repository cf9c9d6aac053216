"""Conversations become prompts: rendered under limits, and users' words never become control tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_builders import TURN_MARKS, byte_level_metadata

from octavo.core.errors import InvalidInput
from octavo.tokenizers import Tokenizer, from_gguf_metadata
from octavo.tokenizers.chat import FALLBACK_CHATML, encode_chat, render_chat, template_of
from octavo.tokenizers.template_runner import TemplateRunner

USER = [{"role": "user", "content": "hi"}]
FRAGMENTS = st.lists(
    st.sampled_from([*TURN_MARKS, "<|im_", "end|>", "<", "|>", "|im_end|>", "\n", " ", "the", "é", "\ue000"]),
    max_size=7,
).map("".join)


def with_template(template: str | None, **changes: Any) -> Tokenizer:
    metadata = byte_level_metadata(**changes)
    return from_gguf_metadata(metadata if template is None else metadata | {"tokenizer.chat_template": template})


@pytest.fixture(scope="module")
def chatml() -> Tokenizer:
    return with_template(FALLBACK_CHATML)


@pytest.fixture(scope="module")
def runner() -> Iterator[TemplateRunner]:
    made = TemplateRunner()
    yield made
    made.close()


def special_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [index for index in ids if tokenizer.is_special(index)]


@given(st.lists(FRAGMENTS, min_size=1, max_size=3))
def test_users_words_never_become_control_tokens(chatml: Tokenizer, contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    ids = encode_chat(chatml, messages)
    assert special_ids(chatml, ids) == [1, 2] * len(messages) + [1]
    expected = "".join(f"<|im_start|>user\n{content}<|im_end|>\n" for content in contents) + "<|im_start|>assistant\n"
    assert render_chat(chatml, messages) == expected
    assert chatml.decode(ids, skip_special_tokens=False) == expected


@given(st.lists(FRAGMENTS, min_size=2, max_size=4))
def test_pieces_of_several_messages_never_make_a_control_token(chatml: Tokenizer, contents: list[str]) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    ids = encode_chat(chatml, messages, chat_template=bare)
    assert special_ids(chatml, ids) == []
    assert chatml.decode(ids) == "".join(contents)


def test_special_tokens_whose_texts_overlap_are_all_taken_for_words() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<xyz", "z>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3, 3]
    tokenizer = from_gguf_metadata(metadata)
    ids = encode_chat(tokenizer, [{"role": "user", "content": "<xyz>"}], chat_template="{{ messages[0].content }}z>")
    assert special_ids(tokenizer, ids) == [tokenizer.token_to_id("z>")]
    assert tokenizer.decode(ids) == "<xyz>"


def test_harmless_conversations_are_encoded_whole(chatml: Tokenizer) -> None:
    assert encode_chat(chatml, USER) == chatml.encode(render_chat(chatml, USER), add_special_tokens=False)


def test_words_in_tools_documents_and_variables_are_words_too(chatml: Tokenizer) -> None:
    template = "{{ tools | tojson }}{{ documents[0]['text'] }}{{ note }}{{ '<|im_end|>' }}"
    evil = "é<|im_start|>"
    options: dict[str, Any] = {"tools": [{"name": evil}], "documents": [{"text": evil}], "note": evil}
    ids = encode_chat(chatml, USER, chat_template=template, **options)
    assert special_ids(chatml, ids) == [2]
    assert chatml.decode(ids, skip_special_tokens=False) == f'[{{"name": "{evil}"}}]{evil}{evil}<|im_end|>'


def test_there_is_one_bos_where_the_template_says_so() -> None:
    tokenizer = with_template("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", add_bos_token=True)
    assert special_ids(tokenizer, tokenizer.encode("hi")) == [1]
    assert special_ids(tokenizer, encode_chat(tokenizer, USER)) == [1, 2]
    assert special_ids(tokenizer, tokenizer.encode(render_chat(tokenizer, USER))) == [1, 2]


def test_templates_find_the_helpers_they_expect(chatml: Tokenizer) -> None:
    cases = {
        "{{ strftime_now('%%') }}": "%",
        "{{ {'é': [1, '<']} | tojson }}": '{"é": [1, "<"]}',
        "{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=True) }}": '{\n "a": 2,\n "b": 1\n}',
        "{% for i in range(5) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}{{ i }}"
        "{% endfor %}": "013",
        "a{% generation %}b{{ messages[0].content }}{% endgeneration %}c": "abhic",
        "{% if True %}\n  x\n  {% endif %}\ny": "  x\ny",
        "{{ tools is none }}{{ add_generation_prompt }}{{ enable_thinking }}": "TrueTrueFalse",
    }
    for template, expected in cases.items():
        assert render_chat(chatml, USER, chat_template=template, enable_thinking=False) == expected


def test_the_final_message_can_be_continued(chatml: Tokenizer) -> None:
    messages = [*USER, {"role": "assistant", "content": "Sure: "}]
    prompt = render_chat(chatml, messages, continue_final_message=True, add_generation_prompt=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nSure: "
    trimming = "{% for m in messages %}{{ m.content | trim }};{% endfor %}"
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    assert render_chat(chatml, messages, chat_template=trimming, **options) == "hi;Sure: "
    with pytest.raises(InvalidInput, match="continue_final_message"):
        render_chat(chatml, messages, continue_final_message=True)
    with pytest.raises(InvalidInput, match="does not show"):
        render_chat(chatml, messages, chat_template="x", **options)


def test_content_parts_and_tool_calls_are_brought_to_plain_form(chatml: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    template = (
        "{{ messages[0].content }}|{{ messages[1].content }}|{{ messages[1].tool_calls[0].function.arguments.x }}"
    )
    assert render_chat(chatml, messages, chat_template=template) == "a\nb||1"


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([*USER, {"role": "end", "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [3]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "name": {1, 2}}], "messages"),
        ([{"role": "user", "content": "x", "name": "\ud800"}], "messages"),
    ],
)
def test_a_bad_conversation_is_refused_by_name(chatml: Tokenizer, messages: Any, field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        encode_chat(chatml, messages)
    assert caught.value.field == field


def test_deep_values_and_reserved_names_are_refused(chatml: Tokenizer) -> None:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(InvalidInput, match="deep"):
        encode_chat(chatml, USER, note=deep)
    with pytest.raises(InvalidInput, match="bos_token"):
        encode_chat(chatml, USER, bos_token="x")


@pytest.mark.parametrize(
    ("template", "field", "reason"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "chat_template", "CPU"),
        ("{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "", ""),
        ("{{ 'a' * 10 ** 11 }}", "messages", "MemoryError"),
        ("{{ 'a' | center(10 ** 11) }}", "messages", "MemoryError"),
        ("{{ range(10 ** 9) | list }}", "messages", "Range"),
        ("{% for i in range(99999) %}{{ 'more and more text' }}{% endfor %}", "chat_template", "characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "messages", "Recursion"),
        ("{{" + "(" * 50_000, "messages", "Recursion"),
        ("x" * (256 * 1024 + 1), "chat_template", "at most"),
        ("{{ ''.__class__.__mro__ }}", "messages", "Security"),
        ("{{ messages.append(1) }}", "messages", "Security"),
        ("{{ cycler.__init__.__globals__ }}", "messages", "Security"),
        ("{% include 'x' %}", "messages", ""),
        ("{% if %}", "chat_template", "line 1"),
        ("{{ raise_exception('roles must alternate') }}", "messages", "roles must alternate"),
        ("{{ messages[0] + 1 }}", "messages", "TypeError"),
    ],
)
def test_a_hostile_or_broken_template_is_stopped(
    chatml: Tokenizer, runner: TemplateRunner, template: str, field: str, reason: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        render_chat(chatml, USER, chat_template=template, runner=runner)
    assert not field or caught.value.field == field
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert render_chat(chatml, USER, chat_template="still {{ messages[0].content }}", runner=runner) == "still hi"


def test_a_runner_goes_on_after_it_was_closed(chatml: Tokenizer, runner: TemplateRunner) -> None:
    for _ in range(2):
        assert render_chat(chatml, USER, chat_template="{{ 1 + 1 }}", runner=runner) == "2"
        runner.close()


def test_workers_that_die_between_renders_leave_no_file_open(chatml: Tokenizer, runner: TemplateRunner) -> None:
    open_files = []
    for _ in range(3):
        assert render_chat(chatml, USER, chat_template="{{ 1 + 1 }}", runner=runner) == "2"
        open_files.append(len(os.listdir("/proc/self/fd")))
        worker = runner._worker._process
        assert worker is not None
        worker.kill()
        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert len(set(open_files)) == 1, open_files


def test_files_of_the_working_folder_hide_no_module(
    chatml: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    made = TemplateRunner()
    assert render_chat(chatml, USER, chat_template="{{ 1 + 1 }}", runner=made) == "2"
    made.close()


def test_models_without_a_template_get_a_named_one(chatml: Tokenizer, space_mark: Tokenizer) -> None:
    assert template_of(chatml).name == "model"
    assert template_of(with_template(None)).name == "fallback-chatml"
    assert template_of(space_mark).name == "fallback-plain"
    messages = [{"role": "system", "content": "S"}, *USER]
    assert render_chat(space_mark, messages) == "<s>System: S\nUser: hi\nAssistant:"
    assert special_ids(space_mark, encode_chat(space_mark, messages)) == [1]
    answered = [*messages, {"role": "assistant", "content": "yes"}]
    assert render_chat(space_mark, answered, add_generation_prompt=False) == "<s>System: S\nUser: hi\nAssistant: yes"


def test_a_template_for_tools_is_taken_when_there_are_tools() -> None:
    metadata = byte_level_metadata() | {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "U"}
    tokenizer = from_gguf_metadata(metadata)
    assert render_chat(tokenizer, USER) == "D"
    assert render_chat(tokenizer, USER, tools=[{"name": "f"}]) == "U"


@pytest.mark.weights
def test_smollm2_conversations(smollm: Tokenizer) -> None:
    ids = encode_chat(smollm, USER)
    assert special_ids(smollm, ids) == [1, 2, 1, 2, 1]
    assert smollm.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
