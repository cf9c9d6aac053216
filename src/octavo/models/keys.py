"""Typed, bounded reading of a model configuration with Hugging Face keys: nothing in it is trusted or executed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["ConfigKeys"]

_REQUIRED: Any = object()


class ConfigKeys:
    """A configuration by key. `prefix` names where it stands, for errors. A key that holds null counts as absent."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        if not isinstance(values, Mapping):
            raise InvalidInput(f"config: {prefix}".rstrip(". :"), values, "must be an object of keys and values")
        self.values, self.prefix = values, prefix

    def has(self, key: str) -> bool:
        """The key is there, null or not."""
        return key in self.values

    def get(self, key: str) -> Any:
        """The raw value, or None."""
        return self.values.get(key)

    def error(self, key: str, remedy: str) -> InvalidInput:
        """The error for this key's value."""
        return InvalidInput(f"config: {self.prefix}{key}", self.get(key), remedy)

    def size(self, key: str, limit: int, default: Any = _REQUIRED, least: int = 1) -> int:
        """An integer from `least` to `limit`."""
        value = self.get(key)
        if value is None and default is not _REQUIRED:
            return int(default)
        if type(value) is not int or not least <= value <= limit:
            raise self.error(key, f"give an integer from {least} to {limit}")
        return value

    def real(self, key: str, default: Any = _REQUIRED, low: float = 0.0, high: float = 1e9) -> float:
        """A finite number, `low` < value <= `high`."""
        value = self.get(key)
        if value is None and default is not _REQUIRED:
            return float(default)
        if type(value) not in (int, float) or not low < value <= high or not math.isfinite(value):
            raise self.error(key, f"give a number above {low:g}, up to {high:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(key, "give true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "give a string")
        return value

    def ids(self, key: str, limit: int) -> tuple[int, ...]:
        """No id, one or several, each from 0 to `limit` - 1; repeats are dropped."""
        value = self.get(key)
        ids = [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]
        if not all(type(item) is int and 0 <= item < limit for item in ids):
            raise self.error(key, f"give an id or a list of ids from 0 to {limit - 1}")
        return tuple(dict.fromkeys(ids))

    def group(self, key: str) -> ConfigKeys | None:
        """A nested object, or None."""
        value = self.get(key)
        return None if value is None else ConfigKeys(value, f"{self.prefix}{key}.")
