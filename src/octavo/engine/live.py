"""What the engine does right now, for a live view: plain JSON values of bounded size. Looking changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from octavo.core.pages import Owner, OwnerKind, PageAllocator
from octavo.core.prefix_node import PrefixNode
from octavo.core.request import Branch
from octavo.engine.core import EngineCore
from octavo.engine.metrics import Metrics, RequestTimes, StepRecord
from octavo.engine.stats import engine_stats

__all__ = ["snapshot"]

MOST_PAGES = 2048  # of the lowest ids, which are the first to be taken
MOST_ROWS = 64  # each of running and waiting sequences
MOST_STEPS = 64
MOST_NODES = 96
MOST_ENDED = 12
_SEARCHED = 256  # last requests among which those that have ended are looked for


def snapshot(core: EngineCore, now: float) -> dict[str, Any]:
    """Between two steps: who waits and runs, the last steps and requests, pages and prefix tree.

    names   request names; everything else says a request by its place here
    tenants whose each is; None: not known any more
    rows    [name, choice, state, tokens known, tokens resident, outputs, cached, reason, seconds here], running first
    steps   [number, ended, milliseconds, tokens scheduled, tokens drawn, [name of each row]], oldest first
    ended   [name, seconds to first token, seconds per output token, prompt tokens, outputs, cached], last first
    pages   {total, runs}; a run is [code, pages]: 0 free, 1 kept by the cache alone (or a lease), else
            2 + 3 * (1 + row of its first owner, or -1) + (0 its own, 1 the cache's too, 2 several sequences')
    tree    [columns above, columns, locks] of each node, parents first; one column is a page of each group
    """
    names = _Names()
    roster, metrics = core.scheduler.roster, core.metrics
    listed = [*roster.running[:MOST_ROWS], *roster.waiting[:MOST_ROWS]]
    prefix = core.kv.prefix
    return {
        "now": now,
        "page_size": core.kv.page_size,
        "stats": {**engine_stats(core), **metrics.gaps.summary()},
        "rows": [_row(branch, names, now) for branch in listed],
        "steps": _steps(metrics, names),
        "ended": _ended(metrics, names),
        "pages": _pages(core.kv.allocator, {branch.key: row for row, branch in enumerate(listed)}),
        "tree": [[node.start, len(node.columns), node.locks] for node in _nodes(prefix.roots())],
        "names": names.found,
        "tenants": [_tenant(metrics, name) for name in names.found],
    }


class _Names:
    """Request names in the order in which they are met."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, name: str) -> int:
        return self._places.setdefault(name, len(self._places))

    @property
    def found(self) -> list[str]:
        return list(self._places)


def _row(branch: Branch, names: _Names, now: float) -> list[Any]:
    tokens = [branch.num_tokens, branch.num_resident_tokens, branch.num_output_tokens, branch.num_cached_tokens]
    reason, waited = branch.waiting_reason.value, round(now - branch.request.arrival, 3)
    return [names.place(branch.key[0]), branch.choice, branch.state.value, *tokens, reason, waited]


def _steps(metrics: Metrics, names: _Names) -> list[list[Any]]:
    last = list(islice(reversed(metrics.steps), MOST_STEPS))[::-1]
    return [_step(step, names) for step in last]


def _step(step: StepRecord, names: _Names) -> list[Any]:
    rows = [names.place(name) for name in step.active[:MOST_ROWS]]
    took = round(1e3 * (step.ended - step.started), 3)
    return [step.step, step.ended, took, step.scheduled_tokens, step.output_tokens, rows]


def _ended(metrics: Metrics, names: _Names) -> list[list[Any]]:
    last = islice(reversed(metrics.requests.items()), _SEARCHED)
    over = islice(((name, times) for name, times in last if times.finished is not None), MOST_ENDED)
    return [[names.place(name), times.ttft, times.tpot, *_tokens(times)] for name, times in over]


def _tenant(metrics: Metrics, name: str) -> str | None:
    times = metrics.requests.get(name)
    return None if times is None else times.tenant


def _tokens(times: RequestTimes) -> tuple[int, int, int]:
    return times.num_prompt_tokens, times.num_output_tokens, times.num_cached_tokens


def _pages(allocator: PageAllocator, rows: Mapping[object, int]) -> dict[str, Any]:
    runs: list[list[int]] = []
    for page in range(min(allocator.num_pages, MOST_PAGES)):
        code = _code(allocator.owners(page), rows)
        if runs and runs[-1][0] == code:
            runs[-1][1] += 1
        else:
            runs.append([code, 1])
    return {"total": allocator.num_pages, "runs": runs}


def _code(owners: Mapping[Owner, int], rows: Mapping[object, int]) -> int:
    if not owners:
        return 0
    branches = [owner.key for owner in owners if owner.kind is OwnerKind.BRANCH]
    if not branches:
        return 1
    sharing = 2 if len(branches) > 1 else 1 if len(owners) > 1 else 0
    return 2 + 3 * (1 + rows.get(branches[0], -1)) + sharing


def _nodes(roots: Iterable[PrefixNode]) -> Iterable[PrefixNode]:
    stack = [child for root in roots for child in root.children.values()][::-1]
    for _ in range(MOST_NODES):
        if not stack:
            return
        node = stack.pop()
        yield node
        stack += list(node.children.values())[::-1]
