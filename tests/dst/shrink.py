"""The smallest scenario that still breaks the same invariant: fewer events (delta debugging), then smaller sizes.

Delta debugging: Zeller and Hildebrandt, 2002.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from dst.run import play
from dst.scenario import Ask, Fault, Scenario

Fails = Callable[[Scenario], bool]
MOST_TRIES = 3000


def shrink(scenario: Scenario, code: str, most_tries: int = MOST_TRIES) -> Scenario:
    """Play smaller and smaller scenarios that end with the same ``code``."""
    left = [most_tries]

    def fails(candidate: Scenario) -> bool:
        left[0] -= 1
        return left[0] >= 0 and play(candidate).code == code

    while left[0] > 0:
        before = scenario
        scenario = _fewer_events(scenario, fails)
        for smaller in (_smaller_worlds, _smaller_asks):
            scenario = _greedy(scenario, smaller, fails)
        if scenario == before:
            break
    return scenario


def _fewer_events(scenario: Scenario, fails: Fails) -> Scenario:
    """Delta debugging of the script: drop halves, quarters, ..., single events."""
    size = max(1, len(scenario.script) // 2)
    while size:
        place = 0
        while place < len(scenario.script):
            script = scenario.script[:place] + scenario.script[place + size :]
            candidate = replace(scenario, script=script)
            if fails(candidate):
                scenario = candidate
            else:
                place += size
        size //= 2
    return scenario


def _greedy(scenario: Scenario, candidates: Callable[[Scenario], Iterator[Scenario]], fails: Fails) -> Scenario:
    """Take every step that still fails, until none does."""
    progress = True
    while progress:
        progress = False
        for candidate in candidates(scenario):
            if candidate != scenario and fails(candidate):
                scenario, progress = candidate, True
                break
    return scenario


def _smaller_worlds(scenario: Scenario) -> Iterator[Scenario]:
    for name in scenario.switches:
        yield replace(scenario, switches=tuple(other for other in scenario.switches if other != name))
    plain = {"grab_fails": None, "snapshot_every": 0, "cache_bound": None, "cancel_at_end": False, "overlap": False}
    plain |= {"host_pages": 0, "disk_pages": 0}
    for name, value in plain.items():
        yield replace(scenario, **{name: value})
    if len(scenario.windows) > 1:
        yield replace(scenario, windows=(0,))
    for pages in (scenario.num_pages // 2, scenario.num_pages - 1):
        if pages > 0:
            yield replace(scenario, num_pages=pages)
    if "," in scenario.config["policy"]:
        for name in scenario.config["policy"].split(","):
            yield replace(scenario, config={**scenario.config, "policy": name})
    elif scenario.config["policy"] != "fcfs":
        yield replace(scenario, config={**scenario.config, "policy": "fcfs"})


def _smaller_asks(scenario: Scenario) -> Iterator[Scenario]:
    for place, item in enumerate(scenario.script):
        for smaller in _smaller_ask(item) if isinstance(item, Ask) else _smaller_fault(item):
            yield replace(scenario, script=(*scenario.script[:place], smaller, *scenario.script[place + 1 :]))


def _smaller_ask(ask: Ask) -> Iterator[Ask]:
    plain: dict[str, Any] = {
        "namespace": "", "tenant": "", "priority": 0, "deadline": None, "eos": (), "stop_after": None, "resend": None,
        "cancel": None, "read_every": 0, "client": 0, "gang": False,
    }  # fmt: skip
    for name, value in plain.items():
        yield replace(ask, **{name: value})
    for name, value in {"n": 1, "seed": 0, "logprobs": None, "prompt_logprobs": None, "stop_token_ids": []}.items():
        yield replace(ask, params={**ask.params, name: value})
    for length in (len(ask.prompt) // 2, len(ask.prompt) - 1):
        if length > 0:
            yield replace(ask, prompt=ask.prompt[:length])
    if ask.params["max_tokens"]:
        yield replace(ask, params={**ask.params, "max_tokens": ask.params["max_tokens"] - 1, "min_tokens": 0})
    if ask.time:
        yield replace(ask, time=ask.time // 2)


def _smaller_fault(fault: Fault) -> Iterator[Fault]:
    if fault.value > 1:
        yield replace(fault, value=fault.value // 2)
    if fault.extra:
        yield replace(fault, extra=0)
