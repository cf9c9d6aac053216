"""Work on text that a front end has done, here in a thread or in a tokenizer's process: data in, data out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from octavo.serve.config import ServeConfig
from octavo.serve.port import TextModel
from octavo.serve.prompts import (
    Prompt,
    decode_ids,
    encode_chat_prompt,
    encode_prompts,
    render_chat_prompt,
    token_strings,
)
from octavo.serve.tools import shown_tools

__all__ = [
    "Decode",
    "EncodeChat",
    "EncodeText",
    "RenderChat",
    "Spell",
    "Work",
    "do",
    "encoding",
    "rendering",
    "result_of",
]


class _Work(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A task. It may be done twice."""


class EncodeText(_Work, tag=1):
    """The prompts of a completion, as `Prompt`s."""

    prompt: Any
    add_special_tokens: bool | None = None
    echo: bool | None = None


class RenderChat(_Work, tag=2):
    """The text of a conversation's prompt."""

    messages: Any
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None  # that the model is shown
    reasoning_effort: str | None = None
    thinking: dict[str, Any] | None = None


class EncodeChat(RenderChat, tag=3):
    """The prompt of a conversation, as one `Prompt`."""


class Decode(_Work, tag=4):
    """The text of token ids; ``param`` is what an error names."""

    ids: Any
    param: str


class Spell(_Work, tag=5):
    """Each token as the vocabulary spells it."""

    ids: tuple[int, ...]


Work = EncodeText | RenderChat | EncodeChat | Decode | Spell


def encoding(body: Any) -> EncodeText | EncodeChat:
    """What makes the token ids of a request: of a conversation, or of a completion."""
    return (
        EncodeChat(*_values(body, EncodeChat)) if hasattr(body, "messages") else EncodeText(*_values(body, EncodeText))
    )


def rendering(body: Any) -> RenderChat:
    """What makes the text of a conversation's prompt."""
    return RenderChat(*_values(body, RenderChat))


def _values(body: Any, kind: type[_Work]) -> Iterator[Any]:
    for name in kind.__struct_fields__:
        value = shown_tools(body) if name == "tools" else getattr(body, name, None)
        yield None if value is msgspec.UNSET else value


def do(work: Work, model: TextModel, config: ServeConfig) -> Any:
    """The result. Raises ``ApiError`` 400."""
    if isinstance(work, EncodeText):
        return encode_prompts(work, model, config)
    if isinstance(work, EncodeChat):
        return encode_chat_prompt(work, model, config)
    if isinstance(work, RenderChat):
        return render_chat_prompt(work, model, config)
    if isinstance(work, Decode):
        return decode_ids(work.ids, model, work.param)
    return token_strings(work.ids, model)


def result_of(work: Work) -> Any:
    """The type of the result."""
    if isinstance(work, (EncodeText, EncodeChat)):
        return list[Prompt]
    return list[str] if isinstance(work, Spell) else str
