"""Bulk requests: after all others whatever the policy, barely noticed by them, and never forgotten."""

from __future__ import annotations

import random
from statistics import quantiles

import pytest
from builders import Bench, make_kv, make_request
from cost_run import MODEL_COST, Arrival, CostRun, quiet

from octavo.core.bulk import EVERY
from octavo.core.params import SamplingParams
from octavo.core.policies import POLICIES
from octavo.core.request import Request

CHATS = [Arrival(0.5 + 0.25 * i, 100, 60) for i in range(60)]


class Beside(CostRun):
    """The arrivals, and beside them as many bulk requests as ``most``, each replaced when it ends."""

    most = 0

    def step(self):
        scheduler = self.scheduler
        while scheduler.roster.num_bulk + len(scheduler._queued_ids) < self.most:
            self.sent = getattr(self, "sent", 0) + 1
            dice = random.Random(self.sent)
            prompt, params = [1] * dice.randint(16, 1500), SamplingParams(max_tokens=dice.randint(1, 80), seed=1)
            scheduler.submit(Request(f"bulk-{self.sent}", prompt, params, bulk=True))
        return super().step()

    def _saw(self, name):
        self.bulk_tokens = getattr(self, "bulk_tokens", 0) + name.startswith("bulk")
        if not name.startswith("bulk"):
            super()._saw(name)


def played(most, policy="fcfs", **config):
    run = Beside(MODEL_COST, quiet, config={"policy": policy, **config})
    run.most = most
    return run.play(CHATS, seconds=20)


@pytest.mark.parametrize("policy", ["fcfs", "fair", "shortest"])
def test_others_hardly_notice_a_flood(policy):
    alone, beside = played(0, policy), played(8, policy)
    assert len(alone.first_tokens) == len(beside.first_tokens) == len(CHATS)
    later = [beside.first_tokens[name] - alone.first_tokens[name] for name in alone.first_tokens]
    assert quantiles(later, n=20)[-1] < 0.1
    assert sum(beside.gaps) / len(beside.gaps) < 1.15 * sum(alone.gaps) / len(alone.gaps)
    assert beside.gap_quantile(0.8) < 1.15 * alone.gap_quantile(0.8)
    assert beside.bulk_tokens > 200


def test_slots_and_pages_are_given_up_at_once():
    for config in ({"max_running_requests": 2}, {}):
        bench = Bench(make_kv(8, 4), **config)
        bench.submit(*(make_request(f"b{i}", [i] * 7, max_tokens=9, bulk=True) for i in range(4)))
        for _ in range(4):
            bench.step()
        bench.submit(make_request("online", range(20, 32), max_tokens=2)).step()
        assert bench.tokens("online")
        bench.run()
        assert all(len(bench.tokens(f"b{i}")) == 9 for i in range(4))


@pytest.mark.parametrize("policy", POLICIES)
def test_bulk_goes_on_beside_a_stream_without_end(policy):
    bench = Bench(make_kv(256, 4), policy=policy, max_seq_len=900)
    bench.submit(make_request("online", [1], max_tokens=600), make_request("b", [2] * 90, max_tokens=20, bulk=True))
    for _ in range(EVERY * (90 // 16 + 1 + 20 + 1)):
        bench.step()
    assert len(bench.tokens("b")) == 20 and len(bench.tokens("online")) >= 180


def test_who_came_later_is_before_bulk_and_alone_it_has_every_step():
    bench = Bench(max_running_requests=1)
    bench.submit(*(make_request(f"b{i}", [i], bulk=True) for i in range(3)), make_request("online", [9]))
    bench.run()
    assert next(event.request_id for event in bench.events if event.index == 0) == "online"
    alone = Bench().submit(make_request("b", [1], max_tokens=30, bulk=True))
    for _ in range(30):
        alone.step()
    assert len(alone.tokens("b")) == 30


def test_when_pages_run_out_bulk_gives_way_though_it_came_first():
    bench = Bench(make_kv(8, 4), policy="priority")
    first = make_request("b", [1] * 4, max_tokens=24, bulk=True, priority=-9)
    second = make_request("online", [9] * 4, max_tokens=24, priority=9)
    bench.submit(first).step()
    bench.submit(second).step()
    [bulk], [online] = first.branches, second.branches
    assert bench.scheduler.roster.running == [online, bulk]
    bench.run()
    assert bulk.num_preemptions > online.num_preemptions == 0
    assert len(bench.tokens("b")) == 24


def test_planning_ahead_leaves_bulk_its_turn():
    bench = Bench(make_kv(256, 4), max_seq_len=900)
    scheduler, bench.model.always_draws = bench.scheduler, True
    scheduler.submit(make_request("online", [1], max_tokens=400))
    scheduler.submit(make_request("b", [2], max_tokens=9, bulk=True))
    decision, rows = scheduler.plan(), []
    while len(rows) < 200:
        rows.append([row.request_id for row in decision.rows])
        scheduler.plan_ahead()
        ahead = scheduler.advance(result := scheduler.executor(decision))
        scheduler.commit(result)
        decision = ahead or scheduler.plan()
    assert sum("b" in names for names in rows) == 9 and all("online" in names for names in rows)
