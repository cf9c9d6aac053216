"""Values that a JSON schema allows, as a Hypothesis strategy: the part of the language that our document uses."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

__all__ = ["values"]

_PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=6)


def values(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values of `schema`, whose references lead into `root`."""
    if "$ref" in schema:
        return values(resolved(schema, root), root)
    if "anyOf" in schema:
        return st.one_of(*(values(one, root) for one in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    kinds = schema.get("type", ["null", "boolean", "integer", "string"])
    return st.one_of(*(_of_type(kind, schema, root) for kind in ([kinds] if isinstance(kinds, str) else kinds)))


def resolved(schema: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A schema, or what it refers to."""
    if "$ref" not in schema:
        return schema
    found: Any = root
    for name in schema["$ref"].removeprefix("#/").split("/"):
        found = found[name]
    return dict(found)


def _of_type(kind: str, schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    if kind == "integer":
        return st.integers(schema.get("minimum", -9), schema.get("maximum", 9))
    if kind == "number":
        return st.floats(schema.get("minimum", -9.0), schema.get("maximum", 9.0))
    if kind == "string":
        return _string(schema)
    if kind == "array":
        least = schema.get("minItems", 0)
        items = values(schema.get("items", {}), root)
        return st.lists(items, min_size=least, max_size=min(least + 2, schema.get("maxItems", 9)))
    return _object(schema, root) if kind == "object" else st.none() if kind == "null" else st.booleans()


def _string(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        return st.from_regex(schema["pattern"].replace("$", r"\Z"))
    return _PLAIN.filter(lambda text: len(text) >= schema.get("minLength", 0))


def _object(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    properties, needed = schema.get("properties", {}), set(schema.get("required", ()))
    if not properties:
        more = schema.get("additionalProperties", {})
        names = _string(schema.get("propertyNames", {}))
        return st.dictionaries(names, values(more if isinstance(more, dict) else {}, root), max_size=2)
    always = {name: values(properties[name], root) for name in properties if name in needed}
    maybe = st.sets(st.sampled_from(sorted(properties)), max_size=4)
    return maybe.flatmap(
        lambda names: st.fixed_dictionaries({**always, **{name: values(properties[name], root) for name in names}})
    )
