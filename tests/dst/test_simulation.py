"""The simulation itself: kept runs, the first seeds, the same run twice, shrinking, the sweep of failing calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from dst.coverage import EDGES
from dst.draw import draw
from dst.run import kept_runs, play, play_seed
from dst.scenario import SWITCHES, Fault, Scenario
from dst.shrink import shrink
from dst.simulator import Simulator
from dst.sweep import FOR_EVER, fail_grab, fail_step, scenario, sweep

UNREACHED = {"admitted->cancelled", "admitted->failed"}  # nothing happens between admission and the first chunk


@pytest.mark.parametrize("world", kept_runs(), ids=lambda world: f"seed {world.seed}")
def test_kept_runs_pass(world):
    outcome = play(world)
    assert outcome.code is None, outcome.message


@pytest.mark.parametrize("first", range(1, 81, 20))
def test_first_seeds_pass(first):
    for seed in range(first, first + 20):
        outcome = play_seed(seed, 120)
        assert outcome.code is None, f"seed {seed} of 120 events: {outcome.message}"


def test_a_few_seeds_reach_every_edge_that_there_is():
    edges: Counter[tuple[str, str]] = Counter()
    for seed in [*range(100, 160), 336]:  # in the last one fails while its pages are in the host tier
        edges += play_seed(seed, 150).edges
    missing = {f"{state}->{target}" for state, target in EDGES if not edges[state, target]}
    assert missing == UNREACHED


def test_a_seed_draws_all_there_is():
    drawn = [draw(seed, 300) for seed in range(300)]
    assert {name for each in drawn for name in each.switches} == set(SWITCHES)
    assert {fault.kind for each in drawn for fault in each.faults} == {
        *("kill", "clock", "shrink", "grab", "step", "poison", "flush", "corrupt")
    }
    for name in SWITCHES:
        assert 0.15 < sum(name in each.switches for each in drawn) / len(drawn) < 0.35


def trace(simulator: Simulator) -> list:
    """All that the clients were told, and all that the last engine did."""
    told = [(name, stream.tokens, stream.ends) for name, stream in simulator.streams.items()]
    return [told, simulator.num_events, simulator.now, list(simulator.engine.scheduler.timeline)]


@pytest.mark.parametrize("seed", [3, 5, 8, 13])
def test_the_same_seed_is_the_same_run_and_travels_as_json(seed):
    world = draw(seed, 150)
    again = Scenario.from_json(world.to_json())
    assert again == world
    assert trace(Simulator(world).play()) == trace(Simulator(again).play())


@pytest.mark.parametrize("seed", range(20, 32))
def test_tokens_do_not_depend_on_how_they_were_scheduled(seed):
    """I25: the same requests with other switches, sizes and policies, without faults."""
    world = replace(draw(seed, 200), switches=(), grab_fails=None, cancel_at_end=False)
    asks = [replace(ask, deadline=None, cancel=None, read_every=0) for ask in world.asks]
    world = replace(world, script=tuple(asks), events=10_000)
    other = draw(seed + 1000, 200)
    sizes = {name: other.config[name] for name in ("max_running_requests", "max_prefill_chunk", "max_batched_tokens")}
    for config in (world.config, sizes):  # a gang of four is served in both, at full length
        config.update({name: max(4, config[name]) for name in ("max_running_requests", "max_batched_tokens")})
    world = replace(world, num_pages=world.num_pages * (4 if any(ask.gang for ask in asks) else 1))
    config = {**world.config, **sizes, "policy": other.config["policy"], "max_preemptions": 3}
    odd = replace(world, config=config, switches=("preempt_every_3", "ignore_hits"), num_pages=world.num_pages + 2)
    told = [{name: stream.tokens for name, stream in Simulator(each).play().streams.items()} for each in (world, odd)]
    cut = [
        {name: [tokens[: _kept(world, name, tokens)] for tokens in choices] for name, choices in each.items()}
        for each in told
    ]
    assert cut[0] == cut[1]


def _kept(world: Scenario, name: str, tokens: list[int]) -> int:
    """What a stop string that is found late lets through depends on when it is found."""
    [ask] = [ask for ask in world.asks if ask.name == name]
    return len(tokens) if ask.stop_after is None else min(len(tokens), ask.stop_after)


def test_a_failing_run_is_shrunk_to_what_makes_it_fail(monkeypatch):
    """A defect that only a hit can show ends as a script of two requests, or of one that is preempted."""
    from dst.odd import OddKV

    begin = OddKV.begin

    def forget(self, *args, **values):
        hit = begin(self, *args, **values)
        if hit.num_tokens > 2 and self.model is not None:
            self.model.pages.clear()
        return hit

    monkeypatch.setattr(OddKV, "begin", forget)
    failing = next(world for world in (draw(seed, 80) for seed in range(50)) if play(world).code == "I14")
    smallest = shrink(failing, "I14", most_tries=600)
    assert play(smallest).code == "I14"
    assert len(smallest.script) <= 2 and len(smallest.switches) <= 1


def test_the_dead_do_not_speak():
    """What an engine said before it was killed, and what arrives after its restart, is dropped; the rest is told."""
    world = scenario(num_pages=40)
    kills = tuple(Fault(time, "kill", 500) for time in range(4_000, 80_000, 7_000))
    for every in (0, 1, 3):
        simulator = Simulator(replace(world, script=world.script + kills, snapshot_every=every)).play()
        assert simulator.num_kills == len(kills)
        assert all(stream.done for stream in simulator.streams.values())
        assert simulator.streams["r1"].tokens == Simulator(world).play().streams["r1"].tokens


@pytest.mark.parametrize("windows", [(0,), (5, 0)])
@pytest.mark.parametrize("count", [1, FOR_EVER])
def test_every_page_grab_may_fail(windows, count):
    base = scenario(windows, num_pages=12 * len(windows))
    swept = sweep(base, fail_grab, count)
    assert swept.calls >= 10
    if count == 1:
        assert swept.failed.get("out_of_memory", 0) <= swept.calls  # nobody else pays for it
    else:
        assert swept.failed["out_of_memory"] > swept.calls


@pytest.mark.parametrize("count", [1, FOR_EVER])
def test_every_step_may_fail(count):
    swept = sweep(scenario(), fail_step, count)
    assert swept.calls >= 10 and swept.failed["error"] >= 1
