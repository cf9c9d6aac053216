"""What a route takes and gives, said at its handler: the OpenAPI document is made of it (`openapi.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any, TypeVar

import msgspec

from octavo.serve.known_names import Names

__all__ = ["Description", "described", "description_of"]

_Handler = TypeVar("_Handler", bound=Callable[..., Any])
_MARK = "_octavo_described"


@dataclass(frozen=True)
class Description:
    """`takes`: the kinds of body that it reads, any one of them. `needs`: their fields that have to be there.

    `runs`: it has the engine work, so it can be refused for want of room; streamed where the body has `stream`.
    `gives`: the kind of its JSON answer, or the media type of another; `unwell`: statuses that have the same shape.
    `parts`: parameters that are bodies of their own. `query`: parameters of the address, with their schemas.
    `form`: fields of a form that it reads instead of a body, with their schemas. `refuses`: statuses of its own.
    """

    takes: tuple[type[msgspec.Struct], ...] = ()
    names: Names = field(default_factory=Names)
    needs: tuple[str, ...] = ()
    runs: bool = False
    gives: type[msgspec.Struct] | str | None = None
    unwell: tuple[int, ...] = ()
    parts: Mapping[str, tuple[type[msgspec.Struct], Names]] = field(default_factory=dict)
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    form: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refuses: tuple[int, ...] = ()

    @property
    def streams(self) -> bool:
        """Whether a body can ask for a stream."""
        return self.runs and any("stream" in kind.__struct_fields__ for kind in self.takes)


def described(*takes: type[msgspec.Struct], **more: Any) -> Callable[[_Handler], _Handler]:
    """Say what a handler takes and gives: `Description`."""

    def mark(handler: _Handler) -> _Handler:
        setattr(handler, _MARK, Description(takes, **more))
        return handler

    return mark


def description_of(endpoint: Any) -> Description:
    """What was said of a route's endpoint; nothing said: it takes no body and gives JSON."""
    found: Description = getattr(unwrap(endpoint), _MARK, Description())
    return found
