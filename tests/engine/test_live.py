"""The live view's snapshot: it says what the pages, queues and steps say, stays small, and changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine_harness import make_core, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.pages import OwnerKind
from octavo.core.params import SamplingParams
from octavo.engine import live
from octavo.engine.core import EngineCore
from octavo.engine.live import snapshot


def pages_of(seen: dict[str, Any]) -> list[int]:
    """The code of each page that is shown."""
    return [code for code, length in seen["pages"]["runs"] for _ in range(length)]


def check(core: EngineCore, seen: dict[str, Any]) -> None:
    """Everything that a snapshot says, asked of the engine itself."""
    roster, kv = core.scheduler.roster, core.kv
    listed = [*roster.running, *roster.waiting]
    assert [(seen["names"][row[0]], row[1], row[2]) for row in seen["rows"]] == [
        (*b.key, b.state.value) for b in listed
    ]
    assert [row[3:7] for row in seen["rows"]] == [
        [b.num_tokens, b.num_resident_tokens, b.num_output_tokens, b.num_cached_tokens] for b in listed
    ]
    for page, code in enumerate(pages_of(seen)):
        owners = [owner for owner, _ in kv.describe(page).owners]
        branches = [owner.key for owner in owners if owner.kind is OwnerKind.BRANCH]
        if not branches:
            assert code == (1 if owners else 0)
            continue
        row, sharing = divmod(code - 2, 3)
        assert listed[row - 1].key == branches[0]
        assert sharing == (2 if len(branches) > 1 else int(len(owners) > 1))
    assert [step[0] for step in seen["steps"]] == [step.step for step in core.metrics.steps][-live.MOST_STEPS :]
    nodes = {(node.start, len(node.columns), node.locks) for node in kv.prefix.nodes()}
    assert {tuple(node) for node in seen["tree"]} == nodes


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_snapshot_says_what_is(data: st.DataObject) -> None:
    core = make_core(num_pages=40, max_running_requests=4, max_prefill_chunk=8)
    for index in range(data.draw(st.integers(1, 7))):
        prompt = [*range(1, data.draw(st.integers(2, 9))), data.draw(st.integers(9, 12))]
        params = SamplingParams(n=data.draw(st.integers(1, 2)), max_tokens=6, ignore_eos=True, seed=index)
        core.submit(make_request(f"r{index}", prompt, params, tenant="ann"), 0.0)
    while core.has_work:
        core.step(0.0)
        seen = snapshot(core, 1.0)
        check(core, seen)
        assert json.loads(json.dumps(seen)) == json.loads(json.dumps(snapshot(core, 1.0)))
    assert {seen["names"][row[0]] for row in seen["ended"]} <= {f"r{index}" for index in range(7)}
    assert len(seen["ended"]) and not seen["rows"] and set(seen["tenants"]) == {"ann"}


def test_a_snapshot_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST_PAGES", "MOST_ROWS", "MOST_STEPS", "MOST_NODES", "MOST_ENDED"):
        monkeypatch.setattr(live, name, 3)
    core = make_core(num_pages=200, max_running_requests=5)
    for index in range(10):
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        core.submit(make_request(f"r{index}", [index + 1] * 9, params), 0.0)
    while core.has_work:
        core.step(0.0)
        seen = snapshot(core, 0.0)
        assert len(pages_of(seen)) == 3 and seen["pages"]["total"] == 200
        assert len(seen["rows"]) <= 6 and len(seen["tree"]) <= 3 and len(seen["ended"]) <= 3
        assert len(seen["steps"]) <= 3 and all(len(step[5]) <= 3 for step in seen["steps"])
    assert len(seen["tree"]) == len(seen["ended"]) == len(seen["steps"]) == 3
