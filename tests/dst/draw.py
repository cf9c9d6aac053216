"""Draws a scenario from a seed: sizes, switches, clients, requests, faults."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from dst.faults import KINDS
from dst.scenario import SWITCHES, VOCAB, Ask, Fault, Scenario
from octavo.core.config import PREEMPTIONS
from octavo.core.kv import KVCacheManager, KVGroup
from octavo.core.policies import POLICIES

STEP_US = (1_000, 8_000)  # how long a step takes
LINK_US = (0, 30_000)  # how long a message takes
TENANTS = ("", "t1", "t2", "t3")
_CANCEL_STATES = ("inbox", "waiting", "prefilling", "decoding", "recompute", "in flight", "ended", "unknown")
_FAULT_KINDS = ("kill", "kill", "clock", "shrink", "grab", "step", "step", "step", "poison", "flush")


def draw(seed: int, events: int = 300) -> Scenario:
    """The scenario of a seed."""
    rng = Random(seed)
    page_size = rng.choice((1, 2, 4, 4, 8, 16))
    context = page_size * rng.choice((3, 5, 8)) + rng.choice((-1, 0, 1)) if page_size > 2 else rng.choice((6, 13, 24))
    context = min(context, 64)
    windows = rng.choice(((0,), (0,), (0,), (5, 0), (3,), (page_size, 0)))
    switches = tuple(name for name in SWITCHES if rng.random() < 0.25)
    config = _config(rng, page_size, context, switches)
    asks = _asks(rng, events, page_size, context)
    faults = _faults(rng, asks)
    num_pages = least_pages(page_size, windows, config) + rng.choice((0, 0, 0, 1, 2, 4, 10, 60))
    scenario = Scenario(
        seed=seed,
        events=events,
        page_size=page_size,
        num_pages=num_pages,
        windows=windows,
        config=config,
        switches=switches,
        overlap=rng.random() < 0.4,
        prefix_cache=rng.random() < 0.9,
        cache_bound=rng.choice((None, None, None, 0, 2, num_pages // 2)),
        snapshot_every=rng.choice((0, 1, 3, 7)),
        grab_fails=rng.choice((None, None, None, None, (rng.randrange(1, 60), rng.choice((1, 1, 2, 5))))),
        cancel_at_end=rng.random() < 0.3,
        script=tuple(sorted([*asks, *faults], key=lambda item: item.time)),
        host_pages=rng.choice((0, 1, 3, 8, 60)),  # drawn last: what came before is as it was
    )
    scenario = _with_settings(_with_gangs(scenario, Random(f"gangs {seed}")), Random(f"settings {seed}"))
    rng = Random(f"drafts {seed}")
    return replace(scenario, drafts=rng.choice((0, 0, 1, 2, 7)), lies=rng.choice((0, 1, 3, 8)))


def _with_gangs(scenario: Scenario, rng: Random) -> Scenario:
    """Some of the requests become gangs, in half of the runs; the pool has room for some of them."""
    if rng.random() < 0.5:
        return scenario
    script = [_ganged(item, rng) if isinstance(item, Ask) and rng.random() < 0.4 else item for item in scenario.script]
    config = dict(scenario.config)
    if "never_batch" not in scenario.switches:  # steps that hold a gang, or a gang less one
        config["max_running_requests"] = rng.choice((config["max_running_requests"], 4, 8))
        config["max_batched_tokens"] = rng.choice((config["max_batched_tokens"], 4, 5))
    pages = scenario.num_pages * rng.choice((1, 2, 2, 3))
    return replace(scenario, script=tuple(script), num_pages=pages, config=config)


def _ganged(ask: Ask, rng: Random) -> Ask:
    most = rng.choice((ask.params["max_tokens"], 8, 12, None))
    params = {**ask.params, "n": rng.choice((1, 2, 2, 3, 4)), "prompt_logprobs": None, "max_tokens": most}
    return replace(ask, gang=True, params={**params, "min_tokens": 0})


def _with_settings(scenario: Scenario, rng: Random) -> Scenario:
    """Prices and weights of tenants, how those that are preempted come back, a disk, and pages that go bad."""
    prices = {name: rng.choice((0, 1, 1, 2, 5)) for name in ("prompt_price", "cached_price", "output_price")}
    weights = [[tenant, rng.choice((1, 2, 5))] for tenant in TENANTS if rng.random() < 0.5]
    config = {
        **scenario.config,
        "policies": rng.choice(({}, {**prices, "weights": weights}, {"weights": weights})),
        "preemption": rng.choice(PREEMPTIONS),
        "host_mb_per_s": rng.choice((0, 0, 1, 1000)),
    }
    end = scenario.script[-1].time + 1
    bad = [Fault(rng.randrange(end), "corrupt", rng.randrange(8)) for _ in range(rng.choice((0, 0, 1, 3)))]
    script = sorted([*scenario.script, *bad], key=lambda item: item.time)
    return replace(scenario, config=config, script=tuple(script), disk_pages=rng.choice((0, 3, 30)))


def least_pages(page_size: int, windows: tuple[int, ...], config: dict[str, Any]) -> int:
    """Pages with which one sequence of full length always fits."""
    groups = tuple(KVGroup((layer,), window=window) for layer, window in enumerate(windows))
    kv = KVCacheManager(1, page_size, groups)
    return kv.num_pages_needed(config["max_seq_len"] + page_size, config["max_prefill_chunk"])


def draw_policy(rng: Random) -> str:
    """The name of one of all policies, or of two or three of them."""
    count = rng.choice((1, 1, 2, 3))
    return ",".join(rng.sample(sorted(POLICIES), count))


def _config(rng: Random, page_size: int, context: int, switches: tuple[str, ...]) -> dict[str, Any]:
    config = {
        "max_running_requests": rng.choice((1, 2, 3, 4, 8)),
        "max_prefill_chunk": rng.choice((1, 2, 3, page_size, 64)),
        "max_batched_tokens": rng.choice((1, 4, 7, 16, 64, 64)),
        "max_seq_len": context,
        "policy": draw_policy(rng),
        "max_preemptions": rng.choice((0, 1, 3, 8)),
        "prefix_wait_steps": rng.choice((0, 2, 64)),
        "bypass_limit": rng.choice((1, 3, 64)),
        "stall_steps": rng.choice((1, 4, 16)),
        "max_token_gap_ms": rng.choice((0, 0, 0, 3, 12)),
    }
    if "never_batch" in switches:
        config["max_running_requests"] = 1
    elif "always_batch" in switches:
        config["max_running_requests"], config["max_batched_tokens"] = 8, 64
    if "chunk_1" in switches:
        config["max_prefill_chunk"] = 1
    return config


def _asks(rng: Random, events: int, page_size: int, context: int) -> list[Ask]:
    clients = rng.choice((1, 2, 4, 8, 16, 64))
    count = rng.randint(1, max(2, events // 6))
    gap = rng.choice((500, 4_000, 15_000, 60_000))  # a burst, or at leisure
    lengths = (0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size, context - 1, context)
    alphabet = rng.choice((2, 3, VOCAB))
    stems = [[rng.randrange(alphabet) for _ in range(context + 1)] for _ in range(rng.choice((1, 2, 4)))]
    asks, time = [], 0
    for number in range(count):
        time += int(rng.expovariate(1) * gap)
        length = rng.choice(lengths) if rng.random() < 0.7 else rng.randint(1, context)
        prompt = list(rng.choice(stems)[: max(0, length)])
        if prompt and rng.random() < 0.5:  # shares a prefix, and then goes its own way
            place = rng.randrange(len(prompt))
            prompt[place:] = [rng.randrange(alphabet) for _ in prompt[place:]]
        asks.append(_ask(rng, f"r{number}", time, rng.randrange(clients), prompt, context))
    return asks


def _ask(rng: Random, name: str, time: int, client: int, prompt: list[int], context: int) -> Ask:
    max_tokens = rng.choice((0, 1, 2, 3, 5, 8, 8, 12, context, None))
    ends = rng.choice((0, 0, 0, 2, 15))
    params: dict[str, Any] = {
        "max_tokens": max_tokens,
        "n": rng.choice((1, 1, 1, 1, 2, 5)),
        "seed": rng.choice((None, 0, 1, 2)),
        "logprobs": rng.choice((None, None, None, 0)),
        "prompt_logprobs": rng.choice((None, None, None, None, 0)),
        "ignore_eos": rng.random() < 0.2,
        "stop_token_ids": [rng.randrange(VOCAB) for _ in range(ends)],
        "min_tokens": rng.choice((0, 0, 0, 1, 2)) if max_tokens is None or max_tokens >= 2 else 0,
    }
    slow = rng.random() < 0.15
    return Ask(
        name=name,
        time=time,
        client=client,
        prompt=tuple(prompt),
        params=params,
        namespace=rng.choice(("", "", "", "salt a", "salt b")),
        tenant=rng.choice(TENANTS),
        priority=rng.choice((0, 0, -1, 1)),
        deadline=rng.choice((None, None, None, rng.randrange(1_000, 400_000))),
        eos=tuple(rng.randrange(VOCAB) for _ in range(ends)),
        stop_after=rng.choice((None, None, None, rng.randint(1, 6))),
        resend=rng.choice((None, None, None, 0, rng.randrange(200_000))),
        cancel=_cancel(rng),
        read_every=rng.randrange(5_000, 90_000) if slow else 0,
        patience=rng.choice((1, 4, 16)) if slow else 1 << 30,
    )


def _cancel(rng: Random) -> tuple[str, int] | None:
    kind = rng.random()
    if kind < 0.7:
        return None
    if kind < 0.8:
        return ("after", rng.choice((0, rng.randrange(100_000), rng.randrange(400_000))))
    return (rng.choice(_CANCEL_STATES), rng.randrange(3))


def _faults(rng: Random, asks: list[Ask]) -> list[Fault]:
    if rng.random() < 0.3:
        return []
    end = max(asks[-1].time, 50_000) * 5 // 4
    kinds = [kind for kind in _FAULT_KINDS if rng.random() < 0.4]
    faults = []
    for _ in range(rng.randint(0, 8)):
        if kinds:
            kind = rng.choice(kinds)
            value, extra = {
                "kill": (rng.randrange(1, 60_000), 0),
                "clock": (rng.choice((-3600, 3600)), 0),
                "shrink": (rng.randint(1, 12), rng.randrange(1_000, 200_000)),
                "grab": (rng.choice((1, 1, 3)), 0),
                "step": (rng.randrange(64), rng.randrange(len(KINDS))),
                "poison": (rng.randrange(len(asks)), 0),
                "flush": (0, 0),
            }[kind]
            faults.append(Fault(rng.randrange(end), kind, value, extra))
    return faults
