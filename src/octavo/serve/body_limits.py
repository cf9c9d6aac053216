"""What the schema of a request body says beyond types: ranges and lengths, of the tables that bodies are checked by."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from octavo.core.params import MAX_ALLOWED_IDS, MAX_BANNED_IDS, MAX_LOGPROB_IDS, MAX_STOP_IDS, POOLINGS, RANGES
from octavo.core.samplers import MAX_BREAKERS, MAX_WORD_CHARACTERS, MAX_WORDS
from octavo.serve.front import REQUEST_ID, Front
from octavo.serve.params import BIAS_KEY, LONGEST_DEADLINE, MOST_PRIORITY
from octavo.serve.prompts import ROLES, VARIABLE, longest_prompt

__all__ = ["limited"]

_Json = dict[str, Any]
_FILLED = {"string": {"minLength": 1}, "array": {"minItems": 1}}
_WORD = {"type": "string", "minLength": 1, "maxLength": MAX_WORD_CHARACTERS}
_Limits = dict[str, _Json]  # JSON type -> what its schema says in addition; "any": of a parameter without a type


def limited(schema: _Json, front: Front, needs: Collection[str] = ()) -> _Json:
    """The schema of a body's type, each parameter with the limits of its name; what it ``needs`` is not empty."""
    limits = {**_ranges(), **_of_server(front), **_of_texts(front, needs), **_of_ids(front)}
    for name in needs:
        more = limits.get(name, {})
        limits[name] = {**more, **{kind: {**more.get(kind, {}), **filled} for kind, filled in _FILLED.items()}}
    properties = {name: _narrowed(found, limits.get(name, {})) for name, found in schema.get("properties", {}).items()}
    return {**schema, "properties": properties}


def _narrowed(schema: _Json, limits: _Limits) -> _Json:
    """A parameter's schema, each of its types with the limits of that type."""
    if "anyOf" in schema:
        return {**schema, "anyOf": [_narrowed(one, limits) for one in schema["anyOf"]]}
    return {**schema, **limits.get(schema.get("type", "any"), {})}


def _range(low: float, high: float) -> _Limits:
    """Of a number, integer or not."""
    integers = {"minimum": int(low), "maximum": int(high)}
    return {"integer": integers, "number": {"minimum": low, "maximum": high}}


def _ranges() -> dict[str, _Limits]:
    """Of the parameters of sampling, as the engine checks them."""
    found = {name: _range(*bounds) for name, bounds in RANGES.items()}
    return {
        **found,
        "repeat_penalty": found["repetition_penalty"],
        "deadline_ms": _range(1, LONGEST_DEADLINE),
        "priority": _range(-MOST_PRIORITY, MOST_PRIORITY - 1),
    }


def _of_server(front: Front) -> dict[str, _Limits]:
    """Of what a server is configured to take."""
    config, most = front.config, front.engine.max_seq_len - 1
    return {
        **dict.fromkeys(("n", "best_of"), _range(1, config.max_choices)),
        "early_stopping": {"string": {"enum": ["never"]}},
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _range(0, most)),
        "num_predict": _range(-2, most),
        **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), _range(0, config.max_top_logprobs)),
        "model": {"string": {"enum": sorted(front.models())}},
        "request_id": {"string": {"pattern": f"^{REQUEST_ID.pattern}$"}},
        "cache_salt": {"string": {"minLength": 1, "maxLength": 128}},
        "dimensions": _range(1, front.engine.hidden_size),
        "pooling": {"string": {"enum": list(POOLINGS)}},
        "top_n": {"integer": {"minimum": 0}},
        "documents": {"array": {"maxItems": config.max_inputs - 1}},
    }


def _of_texts(front: Front, needs: Collection[str]) -> dict[str, _Limits]:
    """Of texts and conversations."""
    config, text = front.config, {"maxLength": longest_prompt(front.engine, front.config)}
    stop = {"minLength": 1, "maxLength": config.max_stop_chars}
    strings = {"maxItems": config.max_stop_strings, "items": {"type": "string", **stop}}
    variables = {"propertyNames": {"pattern": f"^{VARIABLE.pattern}$"}}
    return {
        "stop": {"string": stop, "array": strings},
        "stop_sequences": {"array": strings},
        "bad_words": {"array": {"maxItems": MAX_WORDS, "items": _WORD}},
        "dry_sequence_breakers": {"array": {"maxItems": MAX_BREAKERS, "items": _WORD}},
        "messages": {"array": {"items": _turn("text", named=True)}},
        "input": {
            "string": text,
            "array": {"items": _turn("input_text", "output_text", "text")},
            "any": _prompts(front, text, config.max_inputs, "input" in needs),
        },
        "system": {"array": {"items": _part("text")}},
        "prompt": {"string": text, "any": _prompts(front, text, config.max_prompts, "prompt" in needs)},
        "chat_template_kwargs": {"object": variables},
    }


def _of_ids(front: Front) -> dict[str, _Limits]:
    """Of token ids."""
    one = {"type": "integer", "minimum": 0, "maximum": front.engine.vocab_size - 1}
    most = {
        "allowed_token_ids": MAX_ALLOWED_IDS,
        "banned_token_ids": MAX_BANNED_IDS,
        "logprob_token_ids": MAX_LOGPROB_IDS,
        "stop_token_ids": MAX_STOP_IDS,
    }
    bias = {
        "propertyNames": {"pattern": f"^({BIAS_KEY.pattern})$"},
        "maxProperties": front.config.max_logit_bias,
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    }
    lists: dict[str, _Limits] = {name: {"array": {"items": one, "maxItems": count}} for name, count in most.items()}
    return {**lists, "tokens": {"array": {"items": one}}, "logit_bias": {"object": bias}}


def _prompts(front: Front, text: _Json, most: int, needed: bool) -> _Json:
    """One prompt or several, each a text or token ids; or none."""
    one = {"type": "integer", "minimum": 0, "maximum": front.engine.vocab_size - 1}
    ids = {"type": "array", "items": one, "minItems": int(needed), "maxItems": front.engine.max_seq_len}
    texts = {"type": "string", **text}
    several = {"type": "array", "minItems": int(needed), "maxItems": most}
    nothing = [] if needed else [{"type": "null"}]
    return {"anyOf": [texts, ids, {**several, "items": texts}, {**several, "items": ids}, *nothing]}


def _part(*kinds: str) -> _Json:
    properties = {"type": {"enum": list(kinds)}, "text": {"type": "string"}}
    return {"type": "object", "properties": properties, "required": ["type", "text"]}


def _turn(*kinds: str, named: bool = False) -> _Json:
    """A message whose content is a text, or parts of these kinds."""
    content = {"anyOf": [{"type": "string"}, {"type": "array", "items": _part(*kinds)}]}
    name = {"name": {"type": ["string", "null"]}} if named else {}
    properties = {"role": {"enum": list(ROLES)}, "content": content, **name}
    return {"type": "object", "properties": properties, "required": ["role", "content"]}
