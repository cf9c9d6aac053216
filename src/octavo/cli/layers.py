"""Settings from three places beside their defaults: a flag, else OCTAVO_<FLAG> in the environment, else a YAML file.

A value is one text in all of them, read by the type of its field; so a file is a flat mapping of flags' names to
scalars, and YAML's own types, tags, anchors and aliases have no part in it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["PREFIX", "Given", "converted", "from_environment", "from_file", "shown_config"]

PREFIX = "OCTAVO_"
# what else is told by the environment; the last is for tests and builds
OTHER_VARIABLES = ("config", "api_key", "home", "native_isa", "native_pin", "native_library", "peers")
_MAX_FILE = 64 << 10  # bytes
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class Given:
    """A value as it was written, and where."""

    text: str
    origin: str


def from_environment(variables: Mapping[str, str], names: Iterable[str]) -> dict[str, Given]:
    """The settings of these names (max_seq_len) among the variables; an empty variable is none.

    Raises ``InvalidInput`` for a variable that is nearly one of them.
    """
    known, found = set(names), {}
    for variable, text in sorted(variables.items()):
        name = variable[len(PREFIX) :].lower()
        if not variable.startswith(PREFIX) or not text or name in OTHER_VARIABLES:
            continue
        if name in known:
            found[name] = Given(text, variable)
        elif near := difflib.get_close_matches(name, known, n=1, cutoff=0.8):
            raise InvalidInput(variable, text, f"is not read; did you mean {PREFIX}{near[0].upper()}? Else unset it")
    return found


def from_file(path: Path, names: Iterable[str]) -> dict[str, Given]:
    """The settings of these names in a YAML file, their dashes written or not.

    Raises ``InvalidInput`` with the line for what is no flat mapping of known names to scalars, or over 64 KiB.
    """
    known, found = set(names), dict[str, Given]()
    for key, text, line in _pairs(path, _read(path)):
        name, place = key.replace("-", "_"), f"{path.name} line {line}"
        if name not in known:
            near = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0].replace('_', '-')}?" if near else "octavo serve --help lists them"
            raise InvalidInput(f"{place}: {key[:64]}", text, f"there is no such setting; {hint}")
        if name in found:
            raise InvalidInput(f"{place}: {key}", text, f"is given already, in {found[name].origin}; keep one of them")
        found[name] = Given(text, place)
    return found


def _read(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_MAX_FILE + 1)
    if len(data) > _MAX_FILE:
        raise InvalidInput("config", str(path), f"is no file of settings: it has more than {_MAX_FILE >> 10} KiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput("config", str(path), f"is not UTF-8 at byte {error.start}") from error


def _pairs(path: Path, text: str) -> Iterator[tuple[str, str, int]]:
    """Key, value, line. Events of the parser are looked at one by one, so nothing is built, nor built in depth."""
    import yaml

    key: str | None = None
    depth = documents = 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            line = event.start_mark.line + 1
            _check_plain(path, event, line)
            documents += isinstance(event, yaml.DocumentStartEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if documents > 1 or depth > 1 or isinstance(event, yaml.SequenceStartEvent):
                raise _refused(path, line, "is one document of lines like  port: 8000  without lists or nesting")
            if not isinstance(event, yaml.ScalarEvent):
                continue
            if depth == 0 and event.value:
                raise _refused(path, line, "needs lines like  port: 8000")
            if key is None:
                key = event.value if depth else None
                continue
            yield key, "" if event.value in ("~", "null") and event.implicit[0] else event.value, line
            key = None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "what stands there is no text"
        raise _refused(path, 1 if mark is None else mark.line + 1, f"is no YAML: {problem}") from error


def _check_plain(path: Path, event: Any, line: int) -> None:
    for attribute, what in (("anchor", "anchors and aliases"), ("tag", "tags")):
        if getattr(event, attribute, None) is not None:
            raise _refused(path, line, f"takes no {what}; write the value itself")


def _refused(path: Path, line: int, remedy: str) -> InvalidInput:
    return InvalidInput("config", f"{path.name} line {line}", remedy)


def converted(name: str, given: Given, kind: type) -> Any:
    """The value that a text stands for. Raises ``InvalidInput``."""
    text = given.text.strip()
    try:
        return _WORDS[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise InvalidInput(label(name, given), given.text, f"give {wanted}{_links(given)}") from None


def label(name: str, given: Given) -> str:
    """How a message names a setting: where it was given."""
    return given.origin if given.origin.startswith(PREFIX) else f"{given.origin}: {name.replace('_', '-')}"


def _links(given: Given) -> str:
    is_link = given.origin.startswith(PREFIX) and given.text.startswith("tcp://")
    return "; Kubernetes sets this for a service named octavo: set enableServiceLinks: false" if is_link else ""


def _written(value: Any) -> str:
    """A scalar of YAML that reads back as the same text."""
    if not isinstance(value, str):
        return str(value).lower()
    plain = (char if char.isprintable() and char not in '"\\' else f"\\U{ord(char):08x}" for char in value)
    return f'"{"".join(plain)}"'


def shown_config(configs: Iterable[Any], origins: Mapping[str, str]) -> str:
    """Each value and where it is from, by the name of its flag, as a file that ``from_file`` reads."""
    rows: dict[str, str] = {}
    for config in configs:
        for field in dataclasses.fields(config):
            value, name = getattr(config, field.name), field.name
            if field.default is True:
                name, value = f"no_{name}", not value
            rows.setdefault(f"{name.replace('_', '-')}: {_written(value)}", origins.get(name, "default"))
    width = max(map(len, rows))
    return "\n".join(f"{row:<{width}}  # {origin}" for row, origin in rows.items())
