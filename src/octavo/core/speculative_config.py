"""What a server is asked to do about speculation: names and limits, known before a proposer is."""

from __future__ import annotations

import json
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.params import VERIFIERS

__all__ = ["DRAFT_MODEL", "METHODS", "asked_of", "check_method"]

METHODS = ("ngram", "suffix")
DRAFT_MODEL = "draft_model"
OF_DRAFT_MODEL = ("model", "quantization")
MOST = 64  # drafts, and tokens that are looked up


def asked_of(config: str) -> dict[str, Any]:
    """What a ``speculative_config`` in the spelling of vLLM asks for: a JSON object. Raises ``InvalidInput``."""
    if not config:
        return {}
    try:
        found = json.loads(config)
    except ValueError:
        found = None
    lookup = ("prompt_lookup_min", "prompt_lookup_max")
    known = ("method", "num_speculative_tokens", *lookup, "verifier", "tree", *OF_DRAFT_MODEL)
    if not isinstance(found, dict):
        raise InvalidInput("speculative_config", config, 'give a JSON object: {"method": "ngram"}')
    for name in found:
        if name not in known:
            raise InvalidInput(f"speculative_config.{name}", found[name], f"is not known; known are {', '.join(known)}")
    if found.get("verifier", VERIFIERS[0]) not in VERIFIERS:
        raise InvalidInput("speculative_config.verifier", found["verifier"], f"give one of {', '.join(VERIFIERS)}")
    if not isinstance(found.get("tree", False), bool):
        raise InvalidInput("speculative_config.tree", found["tree"], "give true or false")
    if "model" in found:
        found.setdefault("method", DRAFT_MODEL)
    elif found.get("method") == DRAFT_MODEL:
        raise InvalidInput("speculative_config.model", None, "name the draft model: a known name, hub id, folder, file")
    for name in (name for name in OF_DRAFT_MODEL if name in found):
        if found.get("method") != DRAFT_MODEL or not isinstance(found[name], str) or not found[name]:
            raise InvalidInput(f"speculative_config.{name}", found[name], f"give a name, with method {DRAFT_MODEL}")
    return found


def check_method(method: str, most: int, shortest: int, longest: int, tree: bool) -> None:
    """Raises ``InvalidInput`` for what no speculator can be made of."""
    limits = {"num_speculative_tokens": most, "prompt_lookup_min": shortest, "prompt_lookup_max": longest}
    for name, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            raise InvalidInput(name, value, f"give 1 to {MOST}")
    if method not in ("", *METHODS, DRAFT_MODEL):
        raise InvalidInput("speculative", method, f"give one of {', '.join((*METHODS, DRAFT_MODEL))}, or nothing")
    if tree and method != "suffix":
        raise InvalidInput("speculative_config.tree", tree, "goes with suffix: others guess one continuation")
