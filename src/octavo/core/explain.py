"""Why a request took as long as it did: named causes that add up to its time, and who was served meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.history import CAUSES, History, Life

__all__ = ["Cause", "Explanation", "explain", "waited_behind"]

_MOST_NAMES = 3


@dataclass(frozen=True)
class Cause:
    """One of `history.CAUSES`: its seconds, and what is known about it."""

    name: str
    seconds: float
    detail: str


@dataclass(frozen=True)
class Explanation:
    """A request's time from arrival to end, cause by cause, in the order in which they come about."""

    life: Life
    causes: tuple[Cause, ...]

    @property
    def total(self) -> float:
        """Seconds of all causes together."""
        return sum(cause.seconds for cause in self.causes)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        life = self.life
        return {
            "request": life.request,
            "wall_s": life.wall,
            "ended": life.end is not None,
            "finish_reason": life.reason,
            "error": life.error,
            "prompt_tokens": life.prompt,
            "cached_tokens": life.cached,
            "output_tokens": life.outputs,
            "draft_tokens": life.drafted,
            "accepted_draft_tokens": life.accepted,
            "ttft_s": None if life.first_token is None else life.first_token - life.arrival,
            "longest_gap_s": life.longest_gap,
            "causes": [vars(cause) for cause in self.causes],
        }


def explain(history: History, request: str, shown: Callable[[str], str] = str) -> Explanation:
    """Raises ``InvalidInput`` for a request that the recording does not know. ``shown``: what a request is called."""
    life = history.lives.get(request)
    if life is None:
        known = ", ".join(list(history.lives)[:_MOST_NAMES])
        raise InvalidInput("request", request, f"is not in the recording; it has {len(history.lives)}: {known} ...")
    causes = [Cause(name, life.sums[name], _detail(history, life, name, shown)) for name in CAUSES if name in life.sums]
    return Explanation(life, tuple(causes))


def waited_behind(history: History, life: Life, cause: str) -> dict[str, float]:
    """Seconds of a waiting cause by the request that was served meanwhile, most first: steps by their tokens.

    What is missing to the cause's whole was between steps.
    """
    blame: dict[str, float] = {}
    for span in life.spans:
        if span.cause != cause:
            continue
        for step in history.steps:
            shared = min(step.end, span.end) - max(step.start, span.start)
            if shared <= 0.0:
                continue
            total = sum(step.shares)
            for name, tokens in zip(step.names, step.shares, strict=True):
                blame[name] = blame.get(name, 0.0) + shared * tokens / total
    blame.pop(life.request, None)
    return dict(sorted(blame.items(), key=lambda item: (-item[1], item[0])))


def _detail(history: History, life: Life, cause: str, shown: Callable[[str], str]) -> str:
    if cause in ("queued", "pages", "arriving"):
        return _behind(waited_behind(history, life, cause), shown)
    if cause == "prefix":
        return "computed by " + ", ".join(dict.fromkeys(map(shown, life.awaited)))
    if cause == "preempted":
        by = ", ".join(dict.fromkeys(map(shown, life.preempted_by))) or "nobody: to give up shared pages"
        return f"for {by}; {_behind(waited_behind(history, life, cause), shown)}"
    if cause == "prefill":
        return f"{life.prompt} tokens, {life.cached} of them from the prefix cache"
    if cause == "decode":
        guesses = f", {life.accepted} of {life.drafted} drafts among them" if life.drafted else ""
        failed = f"; drafts are off: {life.drafts_off}" if life.drafts_off else ""
        return f"{life.steps} step{'s' * (life.steps != 1)}, {life.outputs} tokens in all{guesses}{failed}"
    return CAUSES[cause]


def _behind(blame: dict[str, float], shown: Callable[[str], str]) -> str:
    if not blame:
        return "nobody was served meanwhile"
    named = [f"{shown(name)} ({seconds:.3f} s)" for name, seconds in list(blame.items())[:_MOST_NAMES]]
    rest = list(blame.values())[_MOST_NAMES:]
    return "behind " + ", ".join(named) + (f", {len(rest)} others ({sum(rest):.3f} s)" if rest else "")
