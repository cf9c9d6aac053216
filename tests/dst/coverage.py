"""Which legal edges of the request state table a run takes, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from octavo.core import request as module
from octavo.core.request import ALLOWED

EDGES = [(state.value, target.value) for state in ALLOWED for target in sorted(ALLOWED[state], key=str)]


@contextmanager
def counted_edges(counter: Counter[tuple[str, str]]) -> Iterator[None]:
    """Count every edge that a branch takes."""
    original = module.apply_transition

    def apply(state: Any, target: Any, kv_blocks: int) -> tuple[Any, int]:
        answer = original(state, target, kv_blocks)
        counter[state.value, target.value] += 1
        return answer

    module.apply_transition = apply
    try:
        yield
    finally:
        module.apply_transition = original
