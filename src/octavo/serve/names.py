"""What becomes of each name in a request body: honoured, an alias, refused with a remedy, or warned about.

Nothing is ignored in silence: a name that is none of these comes back in `warnings`, with the nearest right name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from octavo.serve.errors import ApiError, from_validation, invalid, safe_name
from octavo.serve.known_names import GENERATION, Names, is_empty

__all__ = ["Warnings", "decode_request", "note", "translated", "warn", "warning_headers"]

Warnings = list[dict[str, str]]
_Request = TypeVar("_Request", bound=msgspec.Struct)
_MAX_WARNINGS = 16
_TURNS = ("messages", "input")  # fields that are lists of turns


def decode_request(
    body: dict[str, Any], kind: type[_Request], names: Names = GENERATION, prefix: str = ""
) -> tuple[_Request, Warnings]:
    """The typed request and the warnings about it. Raises ``ApiError`` 400, naming the parameter as it was sent.

    `prefix` stands before each name in what is said of it: the path of a part of a body.
    """
    try:
        return _decoded(body, kind, names, prefix)
    except ApiError as error:
        error.is_spelled = True
        raise


def _decoded(body: dict[str, Any], kind: type[_Request], names: Names, prefix: str) -> tuple[_Request, Warnings]:
    fields = kind.__struct_fields__
    known: dict[str, Any] = {}
    warnings: Warnings = []
    unknown: list[str] = []
    for name, value in body.items():
        name = _renamed(name, body, fields, names.aliases, prefix)
        if name in fields:
            known[name] = value
        elif name in names.refused:
            _refuse(name, value, names, prefix)
        elif name in names.idle and value is not None:
            note(warnings, prefix + name, names.idle[name])
        elif value is not None:
            unknown.append(name)
    try:
        asked = msgspec.convert(known, kind)
    except msgspec.ValidationError as error:
        raise from_validation(error, prefix) from error
    strange = _unknown_warnings(unknown, [*fields, *names.aliases], prefix)
    for field in _TURNS:
        strange += _in_turns(known.get(field), names, f"{prefix}{field}")
    return asked, warnings + strange[:_MAX_WARNINGS] + _rest(len(strange) - _MAX_WARNINGS)


def translated(asked: msgspec.Struct, kind: type[_Request], **values: Any) -> _Request:
    """Another API's request in our words: what both spell alike, and ``values``."""
    same = {name: getattr(asked, name) for name in asked.__struct_fields__ if name in kind.__struct_fields__}
    return kind(**{**same, **values})


def warning_headers(warnings: Warnings) -> dict[str, str]:
    """The header that names what was not honoured, if anything was not."""
    named = ", ".join(warning["param"] or "more" for warning in warnings)
    return {"X-Octavo-Warnings": named} if warnings else {}


def note(warnings: Warnings, param: str, reason: str) -> None:
    """Add that a parameter had no effect, and why; once."""
    if all(warning["param"] != param for warning in warnings):
        warnings.append({"param": param, "message": f"{param} had no effect: {reason}."})


def warn(warnings: Warnings, param: str, message: str) -> None:
    """Add what a client is told of a parameter, besides the answer."""
    warnings.append({"param": param, "message": f"{param}: {message}."})


def _renamed(name: str, body: Mapping[str, Any], fields: Iterable[str], aliases: Mapping[str, str], prefix: str) -> str:
    target = aliases.get(name)
    if target is None or target not in fields:
        return name
    if target in body:
        raise invalid(prefix + name, f"is another name of {target}, which is given too; send one of them")
    return target


def _refuse(name: str, value: Any, names: Names, prefix: str) -> None:
    asks_for_nothing, remedy = names.refused[name]
    if not asks_for_nothing(value):
        name = prefix + name
        raise ApiError(400, f"{name}: {remedy}.", param=name, code="unsupported_parameter")


def _unknown_warnings(unknown: Sequence[str], known: Sequence[str], prefix: str) -> Warnings:
    return [_unknown_warning(name, known, prefix) for name in unknown]


def _rest(count: int) -> Warnings:
    """One warning for so many more."""
    return [{"param": "", "message": f"{count} more unknown parameters had no effect."}] if count > 0 else []


def _in_turns(turns: Any, names: Names, where: str) -> Warnings:
    """What single turns, and the parts of their contents, say that nobody knows; asking for nothing is no matter."""
    found: Warnings = []
    known, in_parts = names.in_turns, names.in_parts
    for index, turn in enumerate(turns if isinstance(turns, list) else ()):
        if not isinstance(turn, dict):
            continue
        place = f"{where}[{index}]"
        found += _unknown_warnings([n for n in turn if n not in known and not is_empty(turn[n])], known, f"{place}.")
        content = turn.get("content")
        for number, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict):
                unknown = [name for name in part if name not in in_parts and not is_empty(part[name])]
                found += _unknown_warnings(unknown, in_parts, f"{place}.content[{number}].")
    return found


def _unknown_warning(name: str, known: Sequence[str], prefix: str) -> dict[str, str]:
    shown = prefix + safe_name(name)
    near = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.7)
    hint = f"; did you mean {near[0]}?" if near else "."
    return {"param": shown, "message": f"{shown} is unknown here and had no effect{hint}"}
