"""Rounds in which we and the peers take turns at one row after the other.

The first round warms up and finds who counts: the two fastest peers of a row stay, unless the second is slower than the
first by more than the noise of these machines; the one speed of each other stays in the record. A row may leave out at
once who was too slow in an earlier row of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bars import DISTURBED, MISSING, Sample, Value, ratio, speed

__all__ = ["Contest", "Duel", "PeerFailed", "Run"]

NOISE = 0.85  # of the best peer's speed
MOST = 2
Run = Callable[[bool], Sample]


class PeerFailed(Exception):
    """A peer that was named did not run; the message is its own."""


@dataclass
class Duel:
    """One row: who runs it. `own` and each of `peers` measure once; they are told whether the sample is kept."""

    key: str
    own: Run
    peers: Mapping[str, Run]
    missing: str = MISSING
    after: Duel | None = None  # whose slow peers do not run here
    samples: list[Sample] = field(default_factory=list)
    theirs: dict[str, list[Sample]] = field(default_factory=dict)
    slower: dict[str, float] = field(default_factory=dict)  # than the best, in the first round

    def round(self, keep: bool, failures: list[str]) -> None:
        """Each once. A peer that fails is out."""
        if not keep and self.after is not None:
            self.slower.update({name: 0.0 for name in self.after.slower if name in self.peers})
        sample = self.own(keep)
        if keep:
            self.samples.append(sample)
        found: dict[str, Sample] = {}
        for name in [name for name in self.peers if name not in self.slower]:
            try:
                found[name] = self.peers[name](keep)
                if not keep and found[name].state == DISTURBED:  # nobody is out by one bad moment
                    found[name] = self.peers[name](keep)
            except PeerFailed as error:
                failures.append(f"{self.key}, {name}: {error}")
                self.slower[name] = 0.0
        if keep:
            for name, sample in found.items():
                self.theirs.setdefault(name, []).append(sample)
        elif found:
            speeds = sorted((sample.value for sample in found.values()), reverse=True)
            least = max(NOISE * speeds[0], speeds[:MOST][-1])
            self.slower.update({name: sample.value for name, sample in found.items() if sample.value < least})

    @property
    def best(self) -> str:
        """The fastest peer by median; empty without one."""
        return max(self.theirs, key=lambda name: speed(self.theirs[name]), default="")

    def value(self) -> Value:
        """Own speed over that of the best peer."""
        return ratio(self.samples, self.theirs.get(self.best, []), self.missing, name=self.best)

    def record(self) -> dict[str, Any]:
        """All samples, as plain values."""
        theirs = {name: [sample.record() for sample in samples] for name, samples in self.theirs.items()}
        own = [sample.record() for sample in self.samples]
        return {"row": self.key, "own": own, "peers": theirs, "slower_in_the_first_round": self.slower}


@dataclass
class Contest:
    """All duels of one model."""

    duels: Sequence[Duel]
    say: Callable[[str], None]
    failures: list[str] = field(default_factory=list)

    def rounds(self, count: int, name: str) -> None:
        """A warm-up, then `count` rounds over all rows."""
        for at in range(count + 1):
            self.say(f"{name}: round {at} of {count}" if at else f"{name}: warming up")
            for duel in self.duels:
                duel.round(at > 0, self.failures)

    def values(self) -> dict[str, Value]:
        """Every row's."""
        return {duel.key: duel.value() for duel in self.duels}
