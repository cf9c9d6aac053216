"""Parts of a JSON schema that no value fits because each must hold another one: found before anything is compiled.

{"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}       {"n": {"n": {"n": ... never ends
"""

from __future__ import annotations

import urllib.parse
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["DeadEnds"]

_HOLDERS = frozenset(("array", "object"))


class DeadEnds:
    """Which of a schema's parts nothing fits. ``children``: those directly within each part, by its id.

    A least fixpoint, as of the symbols of a grammar that derive a word: a part ends if what it must hold ends. Where
    two keywords exclude each other, a part may be taken for one that ends.
    """

    def __init__(self, schema: Any, parts: Sequence[Any], children: Mapping[int, Sequence[Any]]) -> None:
        """``parts``: the dictionaries among the schemas, each before those within it."""
        self._schema = schema
        self._known = {id(part) for part in parts}
        self._ending: set[int] = set()
        users: dict[int, list[Any]] = {}
        for part in parts:
            for used in (*children.get(id(part), ()), self.target(part)):
                users.setdefault(id(used), []).append(part)
        waiting = deque(reversed(parts))
        while waiting:
            part = waiting.popleft()
            if id(part) not in self._ending and self._may_end(part):
                self._ending.add(id(part))
                waiting += users.get(id(part), ())

    def __bool__(self) -> bool:
        return len(self._ending) < len(self._known)

    def ends(self, part: Any) -> bool:
        """Whether something fits."""
        return part is not False and (id(part) not in self._known or id(part) in self._ending)

    def target(self, part: Mapping[str, Any]) -> Any:
        """What a part's reference stands for; True if it has none, or none that can be found."""
        found, ref = self._schema, part.get("$ref")
        if not isinstance(ref, str):
            return True
        for step in urllib.parse.unquote(ref).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (KeyError, IndexError, ValueError, TypeError):
                return True
        return found

    def without(self, value: Any) -> Any:
        """A schema, or what holds schemas, with false in the place of what nothing fits."""
        if isinstance(value, dict):
            return {key: self.without(item) for key, item in value.items()} if self.ends(value) else False
        return [self.without(item) for item in value] if isinstance(value, list) else value

    def _may_end(self, part: Mapping[str, Any]) -> bool:
        if not self.ends(self.target(part)) or not all(map(self.ends, part.get("allOf", ()))):
            return False
        if not all(any(map(self.ends, part[name])) for name in ("anyOf", "oneOf") if name in part):
            return False
        kinds = part.get("type", "null")
        kinds = frozenset([kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else ["null"])
        if "const" in part or "enum" in part or not kinds <= _HOLDERS:
            return True
        return ("array" in kinds and self._array_ends(part)) or ("object" in kinds and self._object_ends(part))

    def _array_ends(self, part: Mapping[str, Any]) -> bool:
        least, first = _count(part.get("minItems")), part.get("prefixItems", [])
        return all(map(self.ends, first[:least])) and (least <= len(first) or self.ends(part.get("items", True)))

    def _object_ends(self, part: Mapping[str, Any]) -> bool:
        named, required = part.get("properties", {}), part.get("required", ())
        others = any(
            map(self.ends, (part.get("additionalProperties", True), *part.get("patternProperties", {}).values()))
        )
        if not all(self.ends(named[name]) if name in named else others for name in required if isinstance(name, str)):
            return False
        return others or _count(part.get("minProperties")) <= sum(map(self.ends, named.values()))


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
