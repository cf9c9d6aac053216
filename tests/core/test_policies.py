"""What each policy promises: shares, bounds, deadlines, the optimal hit rate."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from builders import Bench, make_kv, make_request
from hypothesis import given
from hypothesis import strategies as st
from null_model import null_tokens
from scheduling_examples import EXAMPLES

from octavo.core.errors import InvalidInput
from octavo.core.events import EventKind
from octavo.core.policies import PolicySettings, Scene, make_policy, service_order
from octavo.core.policies import fair as fair_module
from octavo.core.request import Request

CACHE_OFF = {"enable_prefix_cache": False}


def scene(waiting=(), running=(), now=0.0, **settings):
    return Scene(make_kv(), waiting, running, now, 4, PolicySettings(**settings))


def order(policy, branches, now=0.0, limit=64, **settings):
    policy.prepare(scene(branches, now=now, **settings))
    return [branch.request.request_id for branch in service_order(branches, policy, limit)]


def waiting(name, index, **values):
    [branch] = make_request(name, **values).branches
    branch.arrival_index = index
    return branch


# ---- fair


class Flood:
    """Tenants with more to do than fits, and the service that each has had after every step."""

    def __init__(self, policy, seed, lengths, pool=24, **config):
        self.rng, self.lengths = random.Random(seed), lengths
        weights = tuple(config.pop("weights", {}).items())
        settings = PolicySettings(weights=weights)
        self.bench = Bench(make_kv(pool, 4, **CACHE_OFF), policy=policy, policies=settings, max_seq_len=64, **config)
        self.names, self.requests = 0, {tenant: [] for tenant in lengths}
        self.most_prompt = 0

    def fill(self, tenant, least):
        """At least so many of a tenant's requests wait."""
        have = sum(b.request.tenant == tenant for b in self.bench.scheduler._roster.waiting)
        for _ in range(max(0, least - have)):
            self.names += 1
            low, high = self.lengths[tenant]
            prompt = [self.rng.randrange(90) for _ in range(self.rng.randint(low, high))]
            self.most_prompt = max(self.most_prompt, len(prompt))
            request = make_request(f"{tenant}{self.names}", prompt, tenant=tenant, max_tokens=self.rng.randint(1, 12))
            self.requests[tenant].append(request)
            self.bench.submit(request)

    def service(self, tenant):
        """Prompt tokens computed, and twice the tokens of output."""
        branches = [branch for request in self.requests[tenant] for branch in request.branches]
        prompts = sum(min(branch.num_computed_tokens, branch.num_prompt_tokens) for branch in branches)
        return prompts + 2 * sum(branch.num_output_tokens for branch in branches)

    def differences(self, weights=(1, 1), steps=250):
        """Service over weight of the first tenant, less that of the second, after each step."""
        first, second = self.lengths
        found = []
        for _ in range(steps):
            self.fill(first, 3)
            self.fill(second, 3)
            self.bench.step(16)
            found.append(self.service(first) / weights[0] - self.service(second) / weights[1])
        return found


@given(
    seed=st.integers(0, 2**32),
    long=st.integers(1, 40),
    short=st.integers(1, 12),
    slots=st.integers(1, 6),
    chunk=st.sampled_from([3, 16]),
)
def test_two_backlogged_tenants_never_drift_apart(seed, long, short, slots, chunk):
    """The paper's bound, in every interval: 2 max(prompt_price * longest prompt, output_price * tokens in the pool)."""
    flood = Flood("fair", seed, {"a": (1, long), "b": (1, short)}, max_running_requests=slots, max_prefill_chunk=chunk)
    found = flood.differences(steps=120)
    assert max(found) - min(found) <= 2 * max(flood.most_prompt, 2 * 24 * 4)


def test_service_follows_weights():
    lengths = {"a": (1, 20), "b": (1, 20)}
    flood = Flood("fair", 1, lengths, max_running_requests=3, weights={"a": 3, "b": 1})
    found = flood.differences(weights=(3, 1), steps=600)
    assert max(found) - min(found) <= 2 * 2 * 24 * 4
    assert flood.service("a") / flood.service("b") == pytest.approx(3, rel=0.05)


def test_first_come_has_no_such_bound():
    """The one with the longer queue gets everything."""
    drift = {}
    for policy in ("fcfs", "fair"):
        flood = Flood(policy, 3, {"a": (10, 30), "b": (1, 5)}, max_running_requests=3)
        flood.fill("a", 60)
        found = flood.differences(steps=200)
        drift[policy] = max(found) - min(found)
    assert drift["fair"] <= 2 * 2 * 24 * 4 < drift["fcfs"]


@given(seed=st.integers(0, 2**32), slots=st.integers(2, 6), policy=st.sampled_from(["fair", "priority,fair"]))
def test_a_flood_does_not_hurt_a_quiet_tenant(seed, slots, policy):
    """Alone a short request takes 3 steps; beside a flood of long ones it waits for no more than the step in flight."""
    flood = Flood(policy, seed, {"loud": (20, 40), "quiet": (1, 3)}, max_running_requests=slots, max_prefill_chunk=8)
    for _ in range(12):
        flood.fill("loud", 20)
        flood.bench.step(16)
    for number in range(5):
        request = make_request(f"q{number}", [number + 1, 2, 3], tenant="quiet", max_tokens=3)
        flood.bench.submit(request)
        steps = 0
        while request.live_branches:
            flood.fill("loud", 20)
            flood.bench.step(16)
            steps += 1
        assert steps <= 4
        for _ in range(3):
            flood.bench.step(16)


def test_nobody_banks_credit():
    """A tenant that was away for long gets its share from then on, and nothing for the past."""
    flood = Flood("fair", 5, {"a": (5, 10), "b": (5, 10)}, max_running_requests=3)
    for _ in range(150):
        flood.fill("a", 3)
        flood.bench.step(16)
    before = flood.service("a")
    for _ in range(100):
        flood.fill("a", 3)
        flood.fill("b", 3)
        flood.bench.step(16)
    assert abs(flood.service("a") - before - flood.service("b")) <= 2 * 2 * 24 * 4


@pytest.mark.parametrize("first", ["a", "b"])
def test_what_an_idle_machine_gave_is_owed_to_nobody(first):
    """Found by simulation: who came to an empty machine was served until it had what another had had alone before."""
    flood = Flood("fair", 6, {"a": (5, 10), "b": (5, 10)}, max_running_requests=3)
    flood.fill("a", 60)
    flood.bench.run()
    flood.fill(first, 9)
    flood.bench.step(16)
    found = flood.differences(steps=150)
    assert max(found) - min(found) <= 2 * 2 * 24 * 4


def test_what_was_done_elsewhere_is_not_charged_again():
    """A restored request pays for what it gets here."""
    policy = make_policy("fair")
    request = Request("r", [1] * 30, tenant="a")
    request.branches[0].admissions = 1
    request.branches[0].append(5, None)
    policy.arrived(request, scene())
    policy.prepare(scene(request.branches))
    assert policy.key(request.branches[0])[0] == 0
    request.branches[0].append(6, None)
    policy.prepare(scene(request.branches))
    assert policy.key(request.branches[0])[0] == 2


def test_counters_of_the_absent_are_bounded(monkeypatch):
    monkeypatch.setattr(fair_module, "MOST_ABSENT", 3)
    policy = make_policy("fair")
    for number in range(9):
        request = make_request(f"r{number}", tenant=f"t{number}")
        policy.arrived(request, scene())
        policy.ended(request.branches[0])
    assert list(policy._settled) == list(policy._absent) == ["t6", "t7", "t8"] and not policy._live


def test_prices_and_weights_are_checked():
    for values in ({"ageing_s": -1}, {"prompt_price": -1}, {"output_price": 1.5}, {"weights": (("a", 0),)}):
        with pytest.raises(InvalidInput, match=next(iter(values))):
            PolicySettings(**values)


# ---- put together


def test_names_are_put_together():
    assert make_policy("priority, fair").name == "priority,fair"
    for names in ("", "fair,", "fair,fair", "fairest", None, "priority;fair"):
        with pytest.raises(InvalidInput, match="policy"):
            make_policy(names)


def test_the_first_decides_and_the_next_breaks_its_ties():
    few, many = waiting("few", 3, priority=1, max_tokens=2), waiting("many", 2, priority=1, max_tokens=9)
    urgent = waiting("urgent", 4, priority=0, max_tokens=50)
    for branch in (few, many, urgent):
        branch.request.token_limit = len(branch.token_ids) + branch.params.max_tokens
    assert order(make_policy("priority,shortest"), [many, few, urgent]) == ["urgent", "few", "many"]
    assert order(make_policy("priority"), [few, many, urgent]) == ["urgent", "many", "few"]
    assert order(make_policy("shortest"), [urgent, many, few]) == ["few", "many", "urgent"]


def test_a_fair_tenant_takes_no_place_of_a_higher_priority():
    chain = make_policy("priority,fair")
    victims = [waiting(f"v{i}", i, tenant="loud", priority=i % 2) for i in range(4)]
    for victim in victims:
        victim.rank = chain.parts[0].rank(victim)
    for priority, allowed in ((0, [True] * 4), (1, [False, True] * 2)):
        head = waiting("head", 9, tenant="quiet", priority=priority)
        chain.prepare(Scene(make_kv(), [head], victims, 0.0, 4, PolicySettings()))
        assert [chain.displaces(head, victim) for victim in victims] == allowed


def test_ageing_by_tenant_keeps_each_tenants_places():
    policy = make_policy("fair,shortest")
    loud = [waiting(f"loud{i}", i, tenant="loud", max_tokens=9 - i) for i in range(3)]
    quiet = [waiting(f"quiet{i}", 5 + i, tenant="quiet", max_tokens=9 - i) for i in range(2)]
    for branch in loud + quiet:
        branch.request.token_limit = len(branch.token_ids) + branch.params.max_tokens
    policy.arrived(loud[0].request, scene())
    policy.parts[0]._settled["loud"] = 100
    assert order(policy, loud + quiet) == ["quiet1", "quiet0", "loud2", "loud1", "loud0"]
    loud[0].bypassed = 7
    assert order(policy, loud + quiet, limit=7) == ["quiet1", "quiet0", "loud0", "loud2", "loud1"]


# ---- priority


def test_waiting_makes_urgent():
    old, new = waiting("old", 1, priority=2, arrival=0.0), waiting("new", 2, priority=0, arrival=110.0)
    assert order(make_policy("priority"), [old, new], now=110.0) == ["new", "old"]
    assert order(make_policy("priority"), [old, new], now=120.0) == ["old", "new"]
    assert order(make_policy("priority"), [old, new], now=1e6, ageing_s=0) == ["new", "old"]
    assert order(make_policy("priority"), [old, new], now=25.0, ageing_s=10) == ["old", "new"]


# ---- deadline


def test_earliest_deadline_first():
    branches = [waiting("none", 1), waiting("late", 2, deadline=9.0), waiting("soon", 3, deadline=3.0)]
    assert order(make_policy("deadline"), branches) == ["soon", "late", "none"]


@pytest.mark.parametrize("policy", ["fcfs", "deadline"])
def test_past_its_deadline_a_request_ends_and_costs_nothing_more(policy):
    bench = Bench(policy=policy, max_running_requests=1)
    bench.submit(make_request("runs", max_tokens=50, deadline=2.0), make_request("waits", deadline=3.0))
    bench.submit(make_request("free"))
    scheduler = bench.scheduler
    for now in (0.0, 1.0, 1.9):
        scheduler.step(64, now)
    assert {row.request_id for decision in bench.model.decisions for row in decision.rows} == {"runs"}
    scheduler.step(64, 2.0)
    scheduler.step(64, 3.0)
    bench.events += scheduler.drain_events()
    for name in ("runs", "waits"):
        assert bench.reason(name) == "timeout" and "deadline" in bench.end(name).error
    bench.run()
    assert bench.reason("free") == "length"


def test_what_cannot_be_done_in_time_is_not_begun():
    bench = Bench(policy="deadline", max_running_requests=1)
    bench.scheduler._planner.least_seconds = lambda branch: 1.0 * branch.num_missing_tokens
    bench.submit(make_request("hopeless", [1] * 9, deadline=8.0), make_request("fine", [1] * 3, deadline=8.5))
    bench.run()
    assert bench.reason("hopeless") == "rejected" and "9.000 s" in bench.end("hopeless").error
    assert bench.reason("fine") == "length"
    assert all(row.request_id == "fine" for decision in bench.model.decisions for row in decision.rows)


def test_deadlines_of_the_ended_are_forgotten():
    bench = Bench()
    bench.scheduler._roster.requests.clear()
    for number in range(5000):
        bench.scheduler._roster._watch(make_request(f"r{number}", deadline=1e9))
    assert len(bench.scheduler._roster._deadlines) < 4200


# ---- longest cached prefix


def prompts_of(seed, branching, depth):
    """Prompts that are the paths of a random tree from root to leaf, shuffled."""
    rng = random.Random(seed)
    paths = [[]]
    for level in range(depth):
        grown = []
        for path in paths:
            for child in range(rng.randint(1, branching)):
                grown.append(path + [level * branching + child] + [rng.randrange(90) for _ in range(rng.randint(0, 3))])
        paths = grown
    rng.shuffle(paths)
    return paths


def edges_of(prompts):
    """Tokens of the tree that the prompts are paths of: what has to be computed once at least."""
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})


def computed(policy, prompts, pages):
    kv = make_kv(pages, 1)
    bench = Bench(kv, policy=policy, max_running_requests=1, max_seq_len=64, bypass_limit=10_000)
    for number, prompt in enumerate(prompts):
        bench.submit(make_request(f"r{number}", [*prompt, 91 + number % 5], max_tokens=1))
    bench.run()
    return bench.model.rows_computed


@given(seed=st.integers(0, 2**32), branching=st.integers(2, 4))
def test_longest_prefix_first_has_the_optimal_hit_rate(seed, branching):
    """With a cache that holds the longest request each edge of the tree is computed once (RadixAttention's theorem)."""
    prompts = prompts_of(seed, branching, 3)
    longest = max(map(len, prompts)) + 2
    assert computed("prefix", prompts, longest) == edges_of(prompts) + len(prompts)


def test_first_come_computes_shared_edges_again():
    prompts = prompts_of(11, 4, 3)
    longest = max(map(len, prompts)) + 2
    assert computed("fcfs", prompts, longest) > 1.3 * computed("prefix", prompts, longest)


# ---- whatever the policy


@pytest.mark.parametrize(
    "names", ["deadline", "fair", "prefix", "shortest", "priority,fair", "fair,prefix", "fair,shortest"]
)
@given(seed=st.integers(0, 2**32))
def test_everybody_ends_with_their_own_tokens(names, seed):
    """Random tenants, priorities and deadlines in a small pool: all end with the null model's tokens."""
    rng = random.Random(seed)
    bench = Bench(
        make_kv(rng.randint(8, 20), 4), policy=names, max_running_requests=rng.randint(1, 4), max_seq_len=32,
        max_prefill_chunk=rng.choice([2, 64]), bypass_limit=rng.choice([1, 64]), max_preemptions=rng.choice([0, 8]),
    )  # fmt: skip
    prompts = {}
    for number in range(12):
        prompts[f"r{number}"] = [rng.randrange(4) for _ in range(rng.randint(1, 20))]
        values = {"tenant": rng.choice("abc"), "priority": rng.randrange(3), "n": rng.choice([1, 1, 2])}
        if rng.random() < 0.2:
            values["deadline"] = 1e9
        bench.submit(make_request(f"r{number}", prompts[f"r{number}"], **values))
        if rng.random() < 0.5:
            bench.step(rng.choice([1, 7, 64]))
    bench.run()
    for name, prompt in prompts.items():
        assert bench.tokens(name) == null_tokens(prompt, 3, 7)
        assert bench.reason(name) == "length"
    ends = [event for event in bench.events if event.kind is EventKind.REQUEST_END]
    assert len(ends) == 12


# ---- the page


def test_the_page_tells_what_the_scheduler_does():
    page = (Path(__file__).parents[2] / "docs" / "scheduling.md").read_text(encoding="utf-8")
    for name, example in EXAMPLES.items():
        assert f"<!-- example: {name} -->\n```text\n{example()}\n```\n" in page, name
