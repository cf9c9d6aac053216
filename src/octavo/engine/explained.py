"""Why a request took as long as it did, out of the events that are in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.core.explain import explain
from octavo.core.history import History, history_of

__all__ = ["engine_names", "explained"]


def engine_names(history: History, request_id: str) -> list[str]:
    """The engine's requests behind a client's, oldest first: ``ID.HEX`` or, one for each prompt, ``ID.HEX-NUMBER``."""
    named = re.compile(re.escape(request_id) + r"(\.[0-9a-f]{8}(-[0-9]+)?)?")
    return [name for name in history.lives if named.fullmatch(name)]


def explained(events: Iterable[Mapping[str, Any]], request_id: str, tenant: str) -> list[dict[str, Any]]:
    """The engine's requests behind a tenant's request, oldest first, cause by cause; empty if none is known any more.

    Other tenants' requests have no names.
    """
    history = history_of(events)
    owners = {name: life.tenant for name, life in history.lives.items()}

    def shown(name: str) -> str:
        return name if owners.get(name) == tenant else "a request of another key"

    names = engine_names(history, request_id)
    return [explain(history, name, shown).to_dict() for name in names if owners[name] == tenant]
