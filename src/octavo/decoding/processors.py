"""Logits processors by name: samplers that an operator's package adds. No request brings code.

A processor is a pure function of the tokens so far, so whoever goes on with a request elsewhere gets the same:

    def shy(token_ids, num_prompt_tokens):       # prompt, then output: neither to be kept nor changed
        return {17: -2.0, 4: -math.inf}          # added to the logits of these ids, after all penalties

A package offers one as an entry point of the group `octavo.logits_processors`: every process finds it there.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import entry_points

from octavo.backends.history import LogitsProcessor
from octavo.core.errors import InvalidInput

__all__ = ["GROUP", "processor"]

GROUP = "octavo.logits_processors"


@lru_cache(maxsize=64)
def processor(name: str) -> LogitsProcessor:
    """The processor of this name. Raises ``InvalidInput`` for one that no installed package offers."""
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        remedy = f"give one of {', '.join(sorted(found))}" if found else "no package here offers one; leave it out"
        raise InvalidInput("logits_processors", name, remedy)
    loaded: LogitsProcessor = found[name].load()
    return loaded
