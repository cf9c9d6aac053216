"""What of a request body constrains the output: one `Grammar`, by whatever name it is asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.decoding.grammar.compiler import LIBRARY
from octavo.serve.errors import ApiError, invalid, safe_name
from octavo.serve.known_names import is_empty

__all__ = ["constrained_by", "format_of", "grammar_of", "output_effort", "output_format", "refusal", "text_format"]

_TOLD = {  # by what the library says
    "look-around": "look-around is not supported",
    "backreference": "references back are not supported",
    "too big": "it is too large",
    "too large": "it is too large",
    "nsatisfiable": "nothing fits it",
    "parse error": "it is not well-formed",
}
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_SCHEMA_NAMES = ("name", "description", "schema", "strict")  # strict or not, the output fits the schema


def grammar_of(request: Any) -> Grammar | None:
    """The grammar that a completion or conversation asks for, if it does. Raises ``ApiError`` 400."""
    named = _named(request)
    if len(named) > 1:
        raise invalid(_param(named[1][0]), f"and {named[0][0]} both constrain the output; send one of them")
    return named[0][1] if named else None


def constrained_by(request: Any) -> str:
    """The name under which a request says how its output is constrained: `structured_outputs.json`, `tools` ..."""
    named = _named(request)
    if named:
        return named[0][0]
    others = ("tools", "functions", "reasoning_effort", "thinking", "thinking_token_budget")
    return next((name for name in others if getattr(request, name, None)), "tools")


def _named(request: Any) -> list[tuple[str, Grammar]]:
    """What a body asks for, each under its own name."""
    found = _in_format("response_format", request.response_format)
    named = [] if found is None else [("response_format", found)]
    outputs = request.structured_outputs
    for name, value in ({} if is_empty(outputs) else outputs).items():
        if name not in _OPTIONS and is_empty(value):
            continue
        if name not in _OPTIONS:
            param = "structured_outputs"
            raise invalid(param, f"{_known(name)} is not supported; known: {', '.join(_OPTIONS)}")
        named += _made(f"structured_outputs.{name}", name, value)
    for name, option in _ALIASES.items():
        named += _made(name, option, getattr(request, name))
    return named


def format_of(param: str, value: Any) -> dict[str, Any] | None:
    """Another API's format in our words: the word ``json``, a schema, or ``{"type": "json_schema", "schema": ...}``.

    Raises ``ApiError`` 400.
    """
    if is_empty(value) or value == {"type": "text"}:
        return None
    if value in ("json", {"type": "json_object"}):
        return {"type": "json_object"}
    if not isinstance(value, dict):
        raise invalid(param, "must be json, or a JSON schema")
    if value.get("type") != "json_schema":
        return {"type": "json_schema", "json_schema": {"schema": value}}
    _check_names(param, value, ("type", *_SCHEMA_NAMES))
    return {"type": "json_schema", "json_schema": {name: value[name] for name in value if name != "type"}}


def text_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What ``text`` of the Responses API says of the format. Raises ``ApiError`` 400."""
    _check_names("text", text or {}, ("format",))
    return format_of("text", (text or {}).get("format"))


def output_format(config: Mapping[str, Any] | None, older: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What ``output_config`` of Anthropic's API, or the older ``output_format``, says. Raises ``ApiError`` 400."""
    _check_names("output_config", {n: v for n, v in (config or {}).items() if not is_empty(v)}, ("format", "effort"))
    newer = format_of("output_config", (config or {}).get("format"))
    if newer is not None and not is_empty(older):
        raise invalid("output_format", "is the older name of output_config.format; send one of them")
    return newer or format_of("output_format", older)


def output_effort(config: Mapping[str, Any] | None) -> str | None:
    """The effort in ``output_config`` of Anthropic's API. Raises ``ApiError`` 400."""
    effort = (config or {}).get("effort")
    if not isinstance(effort, str | None):
        raise invalid("output_config", "effort must be a word: low, medium, high ...")
    return effort


def _in_format(param: str, value: Any) -> Grammar | None:
    if is_empty(value):
        return None
    kind = value.get("type")
    if kind not in _FORMATS:
        raise invalid(f"{param}", f"type must be one of {', '.join(_FORMATS)}")
    if kind == "structural_tag":
        return _tag(param, value)
    names = ("type", "json_schema") if kind == "json_schema" else ("type",)
    _check_names(param, value, names)
    if kind != "json_schema":
        return Grammar("json_object") if kind == "json_object" else None
    asked = value.get("json_schema")
    if not isinstance(asked, dict) or "schema" not in asked:
        raise invalid(param, "json_schema must be an object with name and schema")
    _check_names(param, asked, _SCHEMA_NAMES)
    if not isinstance(asked.get("strict"), (bool, type(None))):
        raise invalid(param, "json_schema.strict must be true or false")
    return _schema(param, asked["schema"])


def _made(param: str, option: str, value: Any) -> list[tuple[str, Grammar]]:
    asks = value == {} or not is_empty(value)  # an empty schema is one: any JSON fits it
    return [(param, _OPTIONS[option](param, value))] if asks else []


def _schema(param: str, value: Any) -> Grammar:
    """A schema, as JSON or in a string of JSON."""
    return _grammar(param, "json_schema", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _regex(param: str, value: Any) -> Grammar:
    return _grammar(param, "regex", value)


def _lark(param: str, value: Any) -> Grammar:
    return _grammar(param, "lark", value)


def _choice(param: str, value: Any) -> Grammar:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise invalid(_param(param), "must be a list of strings")
    return _grammar(param, "choice", json.dumps(value, ensure_ascii=False))


def _object(param: str, value: Any) -> Grammar:
    if value is not True:
        raise invalid(_param(param), "must be true or false")
    return Grammar("json_object")


def _tag(param: str, value: Any) -> Grammar:
    source = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _grammar(param, "structural_tag", source)


_OPTIONS: Mapping[str, Callable[[str, Any], Grammar]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
    "json_object": _object,
    "structural_tag": _tag,
}
_ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "ebnf": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "structural_tag": "structural_tag",
}


def _grammar(param: str, kind: str, source: Any) -> Grammar:
    try:
        return Grammar(kind, source)
    except InvalidInput as error:
        raise invalid(_param(param), error.remedy) from error


def _check_names(param: str, value: Mapping[str, Any], names: tuple[str, ...]) -> None:
    strange = next((name for name in value if name not in names), None)
    if strange is not None:
        raise invalid(param, f"{_known(strange)} is not supported; known: {', '.join(names)}")


def _known(name: Any) -> str:
    return safe_name(str(name))


def _param(param: str) -> str:
    return param.split(".")[0]


def refusal(param: str, error: InvalidInput) -> ApiError:
    """A grammar that was tried out and refused, as the client's ``param``.

    What the library says of it may hold its text: a fixed one is sent.
    """
    place = safe_name(re.split(r"[/ ]", error.field.removesuffix(" #"))[-1])
    said = error.remedy
    if said.startswith(LIBRARY):
        said = next((told for sign, told in _TOLD.items() if sign in said), "it cannot be compiled")
    return ApiError(400, f"{param}: {place}: {said}.", param=param, code="invalid_grammar")
