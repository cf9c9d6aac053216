"""How many drafts pay, on machines of which all is known: seconds come from a formula, and drafts are right by dice."""

from __future__ import annotations

import random

import pytest

from octavo.decoding.speculation.control import DraftControl, Taken

MOST = 8


class Machine:
    """A step takes ``begin`` and ``each`` for every row beyond those that are ``free``; with drafts, ``extra`` more."""

    def __init__(self, begin: float, each: float, free: int = 0, extra: float = 0.0, noise: float = 0.0) -> None:
        self.begin, self.each, self.free, self.extra, self.noise = begin, each, free, extra, noise
        self.dice = random.Random(7)

    def seconds(self, rows: int, drafts: int) -> float:
        """Of a step that nothing disturbs."""
        return self.begin + self.each * max(0, rows + drafts - self.free) + self.extra * (drafts > 0)

    def disturbance(self) -> float:
        """By what a step takes longer."""
        return 1.0 + self.noise * (self.dice.random() + 20 * (self.dice.random() < 0.01))


def gain(machine: Machine, rows: int, chances: list[float], steps: int = 1500) -> float:
    """Tokens a second against none drafted; branch i's drafts are right with ``chances[i % n]``."""
    control, dice = DraftControl(), random.Random(3)
    branches = [Taken(control.chance) for _ in range(rows)]
    tokens = spent = off = 0.0
    for _ in range(steps):
        counts = control.share(rows, branches, MOST)
        said = 0
        for i, count in enumerate(counts):
            taken = 0
            while taken < count and dice.random() < chances[i % len(chances)]:
                taken += 1
            if count:
                branches[i].saw(count, taken)
                control.saw(count, taken)
            said += taken
        longer = machine.disturbance()
        seconds = longer * machine.seconds(rows, sum(counts))
        control.measured(rows, sum(counts), rows + said, seconds)
        tokens, spent, off = tokens + rows + said, spent + seconds, off + longer * machine.seconds(rows, 0)
    return tokens / spent / (rows * steps / off)


MEMORY_BOUND = Machine(0.020, 0.0002)
COMPUTE_BOUND = Machine(0.005, 0.0015)
STEEP = Machine(0.004, 0.002, free=1, extra=0.003)
NOISY = Machine(0.010, 0.001, noise=0.2)
MACHINES = [MEMORY_BOUND, COMPUTE_BOUND, STEEP, NOISY]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("chances", [[0.0], [0.3], [0.6], [0.0, 0.95], [0.95]])
def test_never_slower_than_none(machine: Machine, rows: int, chances: list[float]) -> None:
    assert gain(machine, rows, chances, 600 if rows > 4 else 1500) >= 0.98


@pytest.mark.parametrize("outputs", [8, 200])
@pytest.mark.parametrize("each", [0.0001, 0.02])
@pytest.mark.parametrize("chance", [0.0, 0.9])
def test_reading_before_the_first_draft_has_to_be_gained_as_well(outputs: int, each: float, chance: float) -> None:
    """A draft model that reads each prompt in eight steps, of which nothing comes yet: 0.01 s a step."""
    control, dice, machine = DraftControl(), random.Random(3), MEMORY_BOUND
    tokens = spent = 0.0
    for _ in range(30000 // outputs):
        branch, said, unread = Taken(control.chance), 0, 8
        while said < outputs:
            [count] = control.share(1, [branch], MOST)
            reads, taken = bool(count and unread), 0
            unread -= reads
            count *= not unread and not reads
            while taken < count and dice.random() < chance:
                taken += 1
            if count:
                branch.saw(count, taken)
                control.saw(count, taken)
            seconds = machine.seconds(1, count) + each * count
            control.measured(1, count, 1 + taken, seconds, each * count, 0.01 * reads)
            tokens, spent, said = tokens + 1 + taken, spent + seconds + 0.01 * reads, said + 1 + taken
    assert tokens / spent * machine.seconds(1, 0) >= 0.98


def test_much_faster_where_drafts_are_right_and_cheap() -> None:
    assert gain(MEMORY_BOUND, 1, [0.95]) > 5.0
    assert gain(COMPUTE_BOUND, 1, [0.95]) > 1.8
    assert gain(MEMORY_BOUND, 16, [0.95], 400) > 2.5


def test_a_branch_that_others_spoil_nothing_for() -> None:
    """Of two sorts of branches only the one that guesses well keeps its drafts."""
    control, branches = DraftControl(), [Taken(0.6) for _ in range(4)]
    control.measured(4, 0, 4, 0.010)
    for _ in range(40):
        counts = control.share(4, branches, MOST)
        for i, count in enumerate(counts):
            branches[i].saw(count, count if i % 2 else 0) if count else None
        control.measured(4, sum(counts), 4 + counts[1] + counts[3], 0.010 + 0.0005 * sum(counts))
    counts = control.share(4, branches, MOST)
    assert counts[1] == counts[3] == MOST and counts[0] + counts[2] <= 2


def test_what_was_measured_once_may_change() -> None:
    """Drafts that cost much once (a disturbed step) are tried again."""
    control, branch = DraftControl(), [Taken(0.9)]
    control.measured(1, 0, 1, 0.010)
    for _ in range(12):
        control.measured(1, 4, 5, 0.100)
    assert sum(control.share(1, branch, MOST)[0] for _ in range(3)) <= 1
    drafted = 0
    for _ in range(4000):
        [count] = control.share(1, branch, MOST)
        if count:
            branch[0].saw(count, count)
        drafted += count
        control.measured(1, count, 1 + count, 0.010 + 0.0001 * count)
    assert drafted > 4000
