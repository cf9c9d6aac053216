"""Structural tags: free text in which, after a trigger, a part follows a schema. From JSON to Lark.

Both spellings are read: ``{"structures": [{begin, schema, end}], "triggers": [...]}`` and ``{"format": {...}}`` with
the types of `_WRITERS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.decoding.grammar.schema import checked_schema

__all__ = ["lark_of_tags"]

_MAX_TAGS = 128
_MAX_DEPTH = 16
_TEXT = r"/(.|\n)*/"
_STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}


def lark_of_tags(source: str) -> str:
    """The grammar of a structural tag. Raises ``InvalidInput`` naming the place that cannot be honoured."""
    try:
        tag = json.loads(source)
    except (ValueError, RecursionError):
        tag = None
    if not isinstance(tag, dict):
        raise InvalidInput("structural_tag", None, "give an object with format, or with structures and triggers")
    known = {"type", "format"} if "format" in tag else {"type", "structures", "triggers"}
    _check_names("structural_tag", tag, known, known - {"type"})
    form = tag.get("format", {"type": "triggered_tags", "tags": tag.get("structures"), "triggers": tag.get("triggers")})
    writer = _Writer()
    start = writer.write("structural_tag.format" if "format" in tag else "structural_tag", form, 0)
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules, ""])


class _Writer:
    """Gathers rules; what it writes of a format is a name or a term to stand in another rule."""

    def __init__(self) -> None:
        self.rules: list[str] = []

    def write(self, place: str, form: Any, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise InvalidInput(place, f"depth {depth}", f"nest at most {_MAX_DEPTH}")
        kind = form.get("type") if isinstance(form, dict) else None
        if not isinstance(kind, str) or kind not in _WRITERS:
            raise InvalidInput(f"{place}.type", kind, f"give one of {', '.join(_WRITERS)}")
        needed, writer = _WRITERS[kind]
        _check_names(place, form, {"type", *needed, *_OPTIONAL.get(kind, ())}, set(needed))
        return self.rule(writer(self, place, form, depth))

    def rule(self, body: str) -> str:
        """A rule of its own; its name."""
        name = f"part{len(self.rules)}"
        self.rules.append(f"{name}: {body}")
        return name

    def const_string(self, place: str, form: Any, depth: int) -> str:
        return _quoted(f"{place}.value", form["value"])

    def json_schema(self, place: str, form: Any, depth: int) -> str:
        return _json(f"{place}.json_schema", form["json_schema"])

    def regex(self, place: str, form: Any, depth: int) -> str:
        from llguidance import regex_to_lark

        return f"/{regex_to_lark(_text(f'{place}.pattern', form['pattern']))}/"

    def any_text(self, place: str, form: Any, depth: int) -> str:
        return _TEXT

    def sequence(self, place: str, form: Any, depth: int) -> str:
        return " ".join(self.all_of(f"{place}.elements", form["elements"], depth))

    def either(self, place: str, form: Any, depth: int) -> str:
        return " | ".join(self.all_of(f"{place}.elements", form["elements"], depth))

    def all_of(self, place: str, forms: Any, depth: int) -> list[str]:
        if not isinstance(forms, list) or not 1 <= len(forms) <= _MAX_TAGS:
            raise InvalidInput(place, None, f"give a list of 1 to {_MAX_TAGS}")
        return [self.write(f"{place}[{i}]", form, depth + 1) for i, form in enumerate(forms)]

    def tag(self, place: str, form: Any, depth: int) -> str:
        return self.tagged(place, form, depth, _text(f"{place}.begin", form["begin"]))

    def tagged(self, place: str, form: Any, depth: int, begin: str) -> str:
        """What begins with (the rest of) ``begin``, then the content, then the end."""
        if "schema" in form:
            content = _json(f"{place}.schema", form["schema"])
        else:
            content = self.write(f"{place}.content", form.get("content"), depth + 1)
        end = _quoted(f"{place}.end", form.get("end"), empty=True)
        return " ".join(part for part in (json.dumps(begin) if begin else "", content, end) if part)

    def triggered(self, place: str, form: Any, depth: int) -> str:
        """Free text; where a trigger is complete, one of the tags that begin with it goes on."""
        triggers, tags = form.get("triggers"), form.get("tags")
        for name, listed in (("triggers", triggers), ("tags", tags)):
            if not isinstance(listed, list) or not 1 <= len(listed) <= _MAX_TAGS:
                raise InvalidInput(f"{place}.{name}", None, f"give a list of 1 to {_MAX_TAGS}")
        begun: dict[str, list[str]] = {_text(f"{place}.triggers", trigger): [] for trigger in triggers}
        for i, tag in enumerate(tags):
            at = f"{place}.tags[{i}]"
            content = "schema" if isinstance(tag, dict) and "schema" in tag else "content"
            _check_names(at, tag, {"type", "begin", content, "end"}, {"begin", content, "end"})
            begin = _text(f"{at}.begin", tag["begin"])
            trigger = next((trigger for trigger in begun if begin.startswith(trigger)), None)
            if trigger is None:
                raise InvalidInput(f"{at}.begin", begin, "begin with one of the triggers")
            begun[trigger].append(self.rule(self.tagged(at, tag, depth, begin.removeprefix(trigger))))
        parts = []
        for trigger, names in begun.items():
            if names:
                self.rules.append(f"lead{len(self.rules)}[lazy]: {_TEXT} {json.dumps(trigger)}")
                parts.append(self.rule(f"lead{len(self.rules) - 1} ({' | '.join(names)})"))
        self.rules.append(f"REST{len(self.rules)}: {_TEXT}")
        return f"({' | '.join(parts)})* rest{self._rest()}"

    def _rest(self) -> int:
        number = len(self.rules) - 1
        self.rules.append(f"rest{number}: REST{number}")
        return number


_WRITERS: dict[str, tuple[tuple[str, ...], Callable[[_Writer, str, Any, int], str]]] = {
    "const_string": (("value",), _Writer.const_string),
    "json_schema": (("json_schema",), _Writer.json_schema),
    "regex": (("pattern",), _Writer.regex),
    "any_text": ((), _Writer.any_text),
    "sequence": (("elements",), _Writer.sequence),
    "or": (("elements",), _Writer.either),
    "tag": (("begin", "content", "end"), _Writer.tag),
    "triggered_tags": (("triggers", "tags"), _Writer.triggered),
}
_OPTIONAL: dict[str, tuple[str, ...]] = {}


def _check_names(place: str, form: Any, known: set[str], needed: set[str]) -> None:
    if not isinstance(form, dict):
        raise InvalidInput(place, None, "give an object")
    for name in needed - set(form):
        raise InvalidInput(f"{place}.{name}", None, "it is missing")
    for name in form:
        if name not in known:
            raise InvalidInput(f"{place}.{name}", name, f"not supported; known: {', '.join(sorted(known))}")


def _text(place: str, value: Any, *, empty: bool = False) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise InvalidInput(place, None, "give a string" + ("" if empty else ", not an empty one"))
    return value


def _quoted(place: str, value: Any, *, empty: bool = False) -> str:
    text = _text(place, value, empty=empty)
    return json.dumps(text, ensure_ascii=False) if text else ""


def _json(place: str, schema: Any) -> str:
    schema = checked_schema(json.dumps(schema))
    if not isinstance(schema, dict):
        raise InvalidInput(place, None, "give a schema: an object")
    return "%json " + json.dumps({**schema, **_STYLE})
