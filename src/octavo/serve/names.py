"""What becomes of each name in a request body: honoured, an alias, refused with a remedy, or warned about.

Nothing is ignored in silence: a name that is none of these comes back in `warnings`, with the nearest right name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from octavo.serve.errors import ApiError, from_validation, invalid, safe_name
from octavo.serve.protocol import GenerationRequest

__all__ = ["Warnings", "decode_request"]

Warnings = list[dict[str, str]]
_Request = TypeVar("_Request", bound=GenerationRequest)
_MAX_WARNINGS = 16

# what SGLang, llama.cpp and Ollama clients send -> ours
_ALIASES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "n_cmpl": "n",
    "no_stop_trim": "include_stop_str_in_output",
    "repeat_penalty": "repetition_penalty",
    "return_tokens": "return_token_ids",
    "rid": "request_id",
}


def _empty(value: Any) -> bool:
    """null, false, nothing: asking for an unsupported thing to be off is no request for it."""
    return value is None or value is False or value == [] or value == {} or value == ""


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: _empty(value) or any(type(value) is type(known) and value == known for known in values)


_NO_TOOLS = "this server does not call tools yet; describe the tools in the prompt and parse the answer"
_NO_GRAMMAR = "this server does not constrain output yet; ask for the format in the prompt and validate the answer"
_TEXT_ONLY = "this model reads and writes text only; leave it out"
_NO_TEMPLATE = "a template comes from the model alone; leave it out, or send the rendered prompt to /v1/completions"
_NO_THINKING = "this model has no reasoning to control; leave it out"

# labels that clients send along and that change no answer
_LABELS = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")

# name -> (values that ask for nothing, why it is refused and what to do)
_UNSUPPORTED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tools": (_empty, _NO_TOOLS),
    "tool_choice": (_one_of("none", "auto"), _NO_TOOLS),
    "functions": (_empty, _NO_TOOLS),
    "function_call": (_one_of("none", "auto"), _NO_TOOLS),
    "parallel_tool_calls": (_one_of(True), _NO_TOOLS),
    "response_format": (_one_of({"type": "text"}), _NO_GRAMMAR),
    "structured_outputs": (_empty, _NO_GRAMMAR),
    "guided_json": (_empty, _NO_GRAMMAR),
    "guided_regex": (_empty, _NO_GRAMMAR),
    "guided_choice": (_empty, _NO_GRAMMAR),
    "guided_grammar": (_empty, _NO_GRAMMAR),
    "grammar": (_empty, _NO_GRAMMAR),
    "json_schema": (_empty, _NO_GRAMMAR),
    "regex": (_empty, _NO_GRAMMAR),
    "ebnf": (_empty, _NO_GRAMMAR),
    "audio": (_empty, _TEXT_ONLY),
    "modalities": (_one_of(["text"]), _TEXT_ONLY),
    "suffix": (_empty, "filling a gap is not supported; leave it out"),
    "best_of": (_one_of(1), "ranking candidates is not supported; use n and choose by logprobs"),
    "use_beam_search": (_empty, "beam search is not supported yet; leave it out to sample"),
    "bad_words": (_empty, "words cannot be banned yet; ban token ids with banned_token_ids or logit_bias"),
    "stop_regex": (_empty, "stopping by a pattern is not supported; use stop with strings"),
    "prediction": (_empty, "predicted outputs are not supported; leave it out"),
    "web_search_options": (_empty, "this server does not search the web; leave it out"),
    "prompt_embeds": (_empty, "embeddings as a prompt are not supported; send text or token ids"),
    "truncate_prompt_tokens": (_empty, "a prompt is never cut; shorten it before sending"),
    "chat_template": (_empty, _NO_TEMPLATE),
    "chat_template_kwargs": (_empty, _NO_TEMPLATE),
    "documents": (_empty, _NO_TEMPLATE),
    "continue_final_message": (_empty, _NO_TEMPLATE),
    "add_generation_prompt": (_one_of(True), _NO_TEMPLATE),
    "reasoning_effort": (_one_of("none"), _NO_THINKING),
    "thinking_token_budget": (_empty, _NO_THINKING),
    "store": (_empty, "this server stores no answers; leave it out"),
}


def decode_request(body: dict[str, Any], kind: type[_Request]) -> tuple[_Request, Warnings]:
    """The typed request and the warnings about it. Raises ``ApiError`` 400, naming the parameter."""
    fields = kind.__struct_fields__
    known: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in body.items():
        name = _renamed(name, body, fields)
        if name in fields:
            known[name] = value
        elif name in _UNSUPPORTED:
            _refuse(name, value)
        elif value is not None:
            unknown.append(name)
    try:
        return msgspec.convert(known, kind), _warnings(unknown, fields)
    except msgspec.ValidationError as error:
        raise from_validation(error) from error


def _renamed(name: str, body: Mapping[str, Any], fields: Iterable[str]) -> str:
    target = _ALIASES.get(name)
    if target is None or target not in fields:
        return name
    if target in body:
        raise invalid(name, f"is another name of {target}, which is given too; send one of them")
    return target


def _refuse(name: str, value: Any) -> None:
    asks_for_nothing, remedy = _UNSUPPORTED[name]
    if not asks_for_nothing(value):
        raise ApiError(400, f"{name}: {remedy}.", param=name, code="unsupported_parameter")


def _warnings(unknown: list[str], fields: Iterable[str]) -> Warnings:
    warnings = [_unknown_warning(name, fields) for name in unknown[:_MAX_WARNINGS]]
    if len(unknown) > _MAX_WARNINGS:
        more = len(unknown) - _MAX_WARNINGS
        warnings.append({"param": "", "message": f"{more} more unknown parameters had no effect."})
    return warnings


def _unknown_warning(name: str, fields: Iterable[str]) -> dict[str, str]:
    shown = safe_name(name)
    if name in _LABELS:
        return {"param": name, "message": f"{name} is a label that this server does not use; it had no effect."}
    near = difflib.get_close_matches(name[:64], [*fields, *_ALIASES], n=1, cutoff=0.7)
    hint = f"; did you mean {near[0]}?" if near else "."
    return {"param": shown, "message": f"{shown} is unknown here and had no effect{hint}"}
