"""How much a model is to think, in the words of the APIs: variables of its chat template, or a budget of tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from octavo.serve.errors import ApiError, invalid, safe_name
from octavo.serve.known_names import NO_THINKING

__all__ = ["WORDS", "Effort", "check_effort", "effort_of", "most_thoughts", "thinking_variables"]

WORDS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_BUDGETS = {"minimal": 512, "low": 2048, "medium": 8192}  # tokens of thought; from high on, as many as the model will
_MAX_BUDGET = 1 << 20
_KINDS = ("enabled", "adaptive", "disabled")
_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class Effort:
    """``word``: one of `WORDS`, "on", or empty where nothing is asked. ``name``: the parameter that asks."""

    word: str = ""
    budget: int | None = None  # most tokens of thought, given as a number
    name: str = ""


def effort_of(body: Any) -> Effort:
    """What ``reasoning_effort``, ``thinking`` and ``thinking_token_budget`` of a body say. Raises ``ApiError`` 400."""
    word, budget = getattr(body, "reasoning_effort", None), getattr(body, "thinking_token_budget", None)
    if word is not None and word not in WORDS:
        raise invalid("reasoning_effort", f"must be one of {', '.join(WORDS)}")
    thinking = getattr(body, "thinking", None)
    if not thinking:
        name = "reasoning_effort" if word else "thinking_token_budget"
        return _checked(Effort(word or "", budget, name))
    kind, given = _thinking(thinking)
    if budget is not None and given is not None:
        raise invalid("thinking_token_budget", "and thinking both give a budget; send one of them")
    budget = given if budget is None else budget
    return _checked(Effort("none" if kind == "disabled" else word or "on", budget, "thinking"))


def _checked(effort: Effort) -> Effort:
    if effort.budget is not None and not 0 <= effort.budget <= _MAX_BUDGET:
        raise invalid(effort.name, f"the budget must be from 0 to {_MAX_BUDGET} tokens")
    return effort


def _thinking(value: dict[str, Any]) -> tuple[str, int | None]:
    """Anthropic's spelling: its kind and its budget."""
    known = ("type", "budget_tokens", "display")
    strange = next((name for name in value if name not in known), None)
    if strange is not None:
        raise invalid("thinking", f"{safe_name(strange)} is not supported; known: {', '.join(known)}")
    if value.get("display") not in (None, "summarized"):
        raise invalid("thinking", "display can only be left out: thoughts are shown as they are")
    kind, budget = value.get("type"), value.get("budget_tokens")
    if kind not in _KINDS or type(budget) not in (int, type(None)):
        raise invalid("thinking", "must be disabled, adaptive, or enabled, with budget_tokens if you like")
    return str(kind), budget


def thinking_variables(effort: Effort, source: str) -> dict[str, Any]:
    """What a template of this source is told of it: the word where it takes one, else whether there are thoughts."""
    if not effort.word:
        return {}
    found: dict[str, Any] = {name: effort.word != "none" for name in _SWITCHES if _takes(source, name)}
    if _takes(source, "reasoning_effort"):
        found["reasoning_effort"] = "medium" if effort.word == "on" else effort.word
    return found


def most_thoughts(effort: Effort, source: str) -> int | None:
    """The most tokens of thought; None: no limit, or the template sees to it."""
    if effort.word == "none":
        return None if thinking_variables(effort, source) else 0
    if effort.budget is not None or _takes(source, "reasoning_effort"):
        return effort.budget
    return _BUDGETS.get(effort.word)


def check_effort(effort: Effort, source: str, has_marks: bool) -> None:
    """Refuse to control what a model does not do. Raises ``ApiError`` 400."""
    asks = effort.budget is not None or effort.word not in ("", "none")
    if asks and not has_marks and (effort.budget is not None or not thinking_variables(effort, source)):
        raise ApiError(400, f"{effort.name}: {NO_THINKING}.", param=effort.name, code="unsupported_parameter")


def _takes(source: str, name: str) -> bool:
    """Whether a template reads a variable of this name."""
    return re.search(rf"\{{[%{{][^}}]*(?<![\w.'\"]){name}(?![\w'\"])", source) is not None
