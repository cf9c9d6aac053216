"""From a conversation to a prompt: the model's chat template, rendered safely, and its ids.

What users write never becomes a control token. The text of a special token inside a message, a tool or a document is
*marked* before rendering (a character that occurs nowhere else goes between its characters) and the marks are taken out
afterwards. Where a mark was needed, the prompt is cut at the template's own special tokens and everything between is
encoded as plain text; where none was needed, which is nearly always, the whole prompt is encoded at once, exactly as
the original tokenizer does. Limits of this: a template that takes a message apart and puts it together differently
could build a special token from harmless parts; white space that a special token swallows (`rstrip`) is kept in a
prompt that had marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.tokenizers.base import Tokenizer
from octavo.tokenizers.messages import normalized_messages
from octavo.tokenizers.template_runner import TemplateRunner, shared_runner

__all__ = ["FALLBACK_CHATML", "FALLBACK_PLAIN", "FALLBACK_STOPS", "ChatTemplate", "encode_chat", "render_chat"]
__all__ += ["template_of"]

# For models that bring no template. The first is used where the vocabulary has its turn marks, the second elsewhere.
FALLBACK_CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
FALLBACK_PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] | capitalize + ': ' + m['content'] }}"
    "{% if not loop.last or add_generation_prompt %}{{ '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
FALLBACK_STOPS = {"fallback-chatml": ("<|im_end|>",), "fallback-plain": ("\nUser:", "\nSystem:")}

_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
_MAX_DEPTH = 100
_PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True)
class ChatTemplate:
    """A template and where it came from: `model`, `model:NAME`, `given`, `fallback-chatml` or `fallback-plain`."""

    name: str
    source: str


@dataclass(frozen=True)
class _Prompt:
    """A rendered prompt in which `mark` stands inside the special-token text of users."""

    marked: str
    mark: str

    @property
    def text(self) -> str:
        return self.marked.replace(self.mark, "")


def template_of(tokenizer: Tokenizer, *, tools: bool = False) -> ChatTemplate:
    """The template that a conversation will be rendered with; its name tells a caller to warn about a fallback."""
    named = tokenizer.traits.named_templates
    if tools and "tool_use" in named:
        return ChatTemplate("model:tool_use", named["tool_use"])
    if tokenizer.chat_template is not None:
        return ChatTemplate("model", tokenizer.chat_template)
    if "<|im_start|>" in tokenizer.special_tokens:
        return ChatTemplate("fallback-chatml", FALLBACK_CHATML)
    return ChatTemplate("fallback-plain", FALLBACK_PLAIN)


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    runner: TemplateRunner | None = None,
    **variables: Any,
) -> str:
    """The prompt of a conversation, as text (special tokens by their own text).

    `continue_final_message` leaves the last message open so that the model goes on with it. `chat_template` (the
    operator's) replaces the model's own. Further keywords go to the template. Raises `InvalidInput`.
    """
    options = (add_generation_prompt, tools, documents, continue_final_message, chat_template, runner)
    return _render(tokenizer, messages, options, variables).text


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    runner: TemplateRunner | None = None,
    **variables: Any,
) -> list[int]:
    """The ids of a conversation's prompt; arguments as for `render_chat`.

    The template alone decides about BOS: none is added, so there is never a second one.
    """
    options = (add_generation_prompt, tools, documents, continue_final_message, chat_template, runner)
    prompt = _render(tokenizer, messages, options, variables)
    if prompt.mark not in prompt.marked:
        return tokenizer.encode(prompt.marked, add_special_tokens=False)
    return _encode_marked(tokenizer, prompt)


def _encode_marked(tokenizer: Tokenizer, prompt: _Prompt) -> list[int]:
    special = {text: index for text, index in tokenizer.special_tokens.items() if len(text) > 1}
    pattern = _special_pattern(special)
    ids: list[int] = []
    for number, part in enumerate(pattern.split(prompt.marked) if pattern else [prompt.marked]):
        if number % 2:
            ids.append(special[part])
        else:
            plain = part.replace(prompt.mark, "")
            ids += tokenizer.encode(plain, add_special_tokens=False, parse_special=False)
    return ids


def _render(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], options: tuple[Any, ...], variables: dict[str, Any]
) -> _Prompt:
    add_generation_prompt, tools, documents, continue_final, given, runner = options
    _check_variables(variables, add_generation_prompt and continue_final)
    conversation = normalized_messages(messages)
    template = ChatTemplate("given", given) if given is not None else template_of(tokenizer, tools=bool(tools))
    mark, end = _unused_characters((conversation, tools, documents, variables, template.source))
    if continue_final:
        conversation[-1]["content"] += end
    marker = _Marker(tokenizer, mark)
    values = {
        "messages": [{k: v if k == "role" else marker.walk(v) for k, v in m.items()} for m in conversation],
        "add_generation_prompt": add_generation_prompt,
        **marker.walk({"tools": tools, "documents": documents, **variables}),
        **_token_names(tokenizer),
    }
    text = (runner or shared_runner()).render(template.source, values)
    return _Prompt(_cut(text, end) if continue_final else text, mark)


def _check_variables(variables: Mapping[str, Any], both: bool) -> None:
    for name in variables:
        if name in _RESERVED:
            raise InvalidInput(f"chat_template_kwargs.{name}", variables[name], "this name is set by the engine")
    if both:
        raise InvalidInput(
            "continue_final_message", True, "cannot be combined with add_generation_prompt; set that to false"
        )


def _cut(text: str, end: str) -> str:
    at = text.rfind(end)
    if at < 0:
        raise InvalidInput("continue_final_message", True, "the template does not show the last message")
    return text[:at].replace(end, "")


def _token_names(tokenizer: Tokenizer) -> dict[str, str]:
    """What templates call the BOS and EOS tokens; a tokenizer without one leaves the name undefined."""
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_ids[0] if tokenizer.eos_ids else None}
    names = {name: tokenizer.id_to_token(index) for name, index in ids.items() if index is not None}
    return {name: token for name, token in names.items() if token is not None}


def _unused_characters(values: tuple[Any, ...]) -> tuple[str, str]:
    """Two private-use characters that occur nowhere in what is rendered."""
    try:
        text = json.dumps(values, ensure_ascii=False)
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput("messages", str(error)[:120], "must be made of JSON values and valid Unicode") from None
    used = set(text)
    free = [chr(code) for code in _PRIVATE_USE if chr(code) not in used]
    if len(free) < 2:
        raise InvalidInput("messages", "private-use characters", "uses every one of them; leave out some")
    return free[0], free[1]


def _special_pattern(special: Mapping[str, int]) -> re.Pattern[str] | None:
    """Matches the text of any special token, the longest first; one capture group."""
    longest_first = sorted(special, key=lambda text: (-len(text), text))
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None


class _Marker:
    """Puts marks into special-token text, through lists and dictionaries."""

    def __init__(self, tokenizer: Tokenizer, mark: str) -> None:
        special = {text: index for text, index in tokenizer.special_tokens.items() if len(text) > 1}
        self._mark = mark
        self._pattern = _special_pattern(special)
        self._beginnings = {text[:cut] for text in special for cut in range(1, len(text))}
        self._longest = max(map(len, special), default=0)

    def walk(self, value: Any, depth: int = 0) -> Any:
        """A copy of a JSON value with marks in its strings and keys."""
        if depth > _MAX_DEPTH:
            raise InvalidInput("messages", f"{depth} levels", f"must be nested at most {_MAX_DEPTH} deep")
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, Mapping):
            return {self.walk(key): self.walk(item, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.walk(item, depth + 1) for item in value]
        return value

    def _marked(self, text: str) -> str:
        if self._pattern is None:
            return text
        while self._pattern.search(text):  # again, because token texts may overlap; each round leaves fewer
            text = self._pattern.sub(lambda found: self._mark.join(found.group()), text)
        return text + self._mark if self._may_go_on(text) else text

    def _may_go_on(self, text: str) -> bool:
        """True if `text` ends with the beginning of a special token, which what follows might complete."""
        return any(text[-size:] in self._beginnings for size in range(1, min(self._longest, len(text) + 1)))
