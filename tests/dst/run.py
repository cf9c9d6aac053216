"""Plays seeds and scenarios, and says what came of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb

from dst.coverage import counted_edges
from dst.draw import draw
from dst.scenario import Scenario
from dst.simulator import Simulator
from octavo.core.errors import InvariantBroken


@dataclass
class Outcome:
    """What became of one scenario."""

    code: str | None = None  # the invariant that was broken, or what was raised where
    message: str = ""
    events: int = 0
    steps: int = 0
    kills: int = 0
    edges: Counter[tuple[str, str]] = field(default_factory=Counter)


def play(scenario: Scenario) -> Outcome:
    """Play a scenario to its end or its first failure."""
    outcome = Outcome()
    with counted_edges(outcome.edges):
        simulator = Simulator(scenario)
        try:
            simulator.play()
        except Exception as error:
            outcome.code, outcome.message = code_of(error), f"{type(error).__name__}: {error}"
    outcome.events, outcome.steps, outcome.kills = simulator.num_events, simulator.num_steps, simulator.num_kills
    return outcome


def play_seed(seed: int, events: int = 300) -> Outcome:
    """Play what a seed draws."""
    return play(draw(seed, events))


def kept_runs() -> list[Scenario]:
    """The runs of kept_seeds.txt, in order."""
    lines = (Path(__file__).parent / "kept_seeds.txt").read_text("utf-8").splitlines()
    return [_kept_run(line) for line in lines if line and not line.startswith("#")]


def _kept_run(line: str) -> Scenario:
    if line.startswith("{"):
        return Scenario.from_json(line)
    _, events, seed = line.split()
    return draw(int(seed), int(events))


def code_of(error: Exception) -> str:
    """The invariant's name, or what was raised and where."""
    code = getattr(error, "code", "")
    if code:
        return str(code)
    if isinstance(error, InvariantBroken):
        return "audit"
    place = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {place.name}"
