"""How many drafts pay, on machines of which all is known: seconds come from a formula, and drafts are right by dice."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.decoding.speculation.control import DraftControl, Taken
from octavo.decoding.speculation.costs import Budget

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


@dataclass
class DraftMachine:
    """A model and its draft model. A row costs the more the more of a tile of rows it needs alone."""

    begin: float  # seconds of a step of the model
    each: float  # of a row
    tile: int  # rows that cost as much as one
    share: float  # of the model's time that the draft model takes
    chance: float
    prompt: int  # tokens
    noise: float = 0.0
    cold: float = 0.0  # by how much its first pass takes longer
    is_warm: bool = True  # its passes were measured before

    def step(self, rows: int) -> float:
        """Seconds of a forward pass of the model."""
        return self.begin + self.each * self.tile * -(-rows // self.tile)

    def run(self, rows: int, steps: int, left: int, seed: int = 1) -> float:
        """Tokens a second against those without drafts, of branches that have ``left`` tokens to come each."""
        control, dice = DraftControl(), random.Random(seed)
        control.prefill.saw(self.prompt, self.step(self.prompt))
        if self.is_warm:
            control.reading.saw(32, self.share * self.step(32))
            control.passes.saw(1, self.share * self.step(1))
            control.passes.saw(64, self.share * self.step(64))
        branches = [Taken(control.chance) for _ in range(rows)]
        for branch in branches:
            branch.unread = self.prompt
        tokens = spent = off = 0.0
        for number in range(steps):
            for branch in branches:
                branch.left = left - number
            counts = control.share(rows, branches, 4)
            drafted = [branch for branch, count in zip(branches, counts, strict=True) if count]
            unread = sum(branch.unread for branch in drafted)
            read = self.share * self.step(unread) if unread else 0.0
            control.reading.saw(unread, read) if unread else None
            depth, total = max(counts), sum(counts)
            drafting = sum(self.share * self.step(sum(c > d for c in counts)) for d in range(depth))
            drafting += self.cold * bool(depth)
            self.cold *= not depth
            said = 0
            for branch, count in zip(branches, counts, strict=True):
                taken = 0
                while taken < count and dice.random() < self.chance:
                    taken += 1
                branch.unread = 0 if count else branch.unread + 1
                branch.saw(count, taken) if count else None
                control.saw(count, taken)
                said += taken
            longer = 1.0 + self.noise * (dice.random() + 10 * (dice.random() < 0.01))
            seconds = longer * (self.step(rows + total) + drafting)
            passes = (depth, total / depth) if depth else (0, 0.0)
            control.measured(rows, total, rows + said, seconds, longer * drafting, read, passes)
            tokens, spent = tokens + rows + said, spent + seconds + read
            off += longer * self.step(rows)
        return tokens / spent / (rows * steps / off)


MACHINES_OF_TWO = st.builds(
    DraftMachine,
    begin=st.sampled_from([0.002, 0.01, 0.02]),
    each=st.sampled_from([0.0001, 0.0005, 0.002]),
    tile=st.sampled_from([1, 16]),
    share=st.sampled_from([0.02, 0.1, 0.3, 0.5, 0.9]),
    chance=st.sampled_from([0.0, 0.3, 0.6, 0.9, 0.99]),
    prompt=st.sampled_from([20, 130, 1000]),
    noise=st.sampled_from([0.0, 0.1]),
    cold=st.sampled_from([0.0, 0.01]),
    is_warm=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(MACHINES_OF_TWO, st.sampled_from([16, 64]), st.integers(0, 99))
def test_a_draft_model_that_begins_anew_loses_next_to_nothing_beside_others(
    machine: DraftMachine, rows: int, seed: int
) -> None:
    assert machine.run(rows, 200, 200, seed) >= 0.98


def seasoned(rows: int, most: int, steps: int = 40) -> DraftControl:
    """What is known after steps in which every draft of a quick draft model was right."""
    control = DraftControl()
    control.rehearsed(1, 0.0005, 64, 0.064)
    branches = [Taken(0.9) for _ in range(rows)]
    for _ in range(steps):
        counts = control.share(rows, branches, most)
        for branch, count in zip(branches, counts, strict=True):
            branch.saw(count, count) if count else None
        drafts, depth = sum(counts), max(counts)
        seconds = 0.010 + 0.0001 * drafts + 0.0005 * depth
        passes = (depth, drafts / depth) if depth else (0, 0.0)
        control.measured(rows, drafts, rows + drafts, seconds, 0.0005 * depth, 0.0, passes)
    return control


def test_a_draft_model_is_tried_for_one_branch_and_then_for_more_and_not_far_ahead() -> None:
    """Of those it is the one of which least has to be read."""
    tried, branches = [], [Taken(0.9) for _ in range(8)]
    for i, branch in enumerate(branches):
        branch.unread, branch.left = 80 - 10 * i, 500.0
    for steps in range(1, 40):
        control = seasoned(8, 6, steps)
        if not control._sizes[8].pays and any(counts := control.share(8, branches, 6)):
            tried.append(counts)
    assert tried[0][:7] == [0] * 7 and 1 <= tried[0][7] <= 2
    assert max(map(max, tried)) == 2 and sum(tried[-1]) > sum(tried[0])
    assert max(seasoned(8, 6).share(8, [Taken(0.9) for _ in range(8)], 6)) == 6


@pytest.mark.parametrize(("unread", "left", "is_read"), [(2000, 100, False), (2000, 4000, True), (100, 100, True)])
def test_what_cannot_win_back_its_reading_is_not_read(unread: int, left: int, is_read: bool) -> None:
    """A token takes 1 ms to read; four drafts that are right spare about 7 ms of a step's 10."""
    control, branch = seasoned(1, 4), Taken(0.99)
    branch.unread, branch.left = unread, float(left)
    assert control._sizes[1].pays and any(control.share(1, [branch], 4)) == is_read


def test_what_trials_lose_is_a_hundredth_of_the_time_and_debts_end() -> None:
    budget = Budget()
    for _ in range(100):
        budget.passed(0.010, 0.0, 0.010)
    assert budget.left == pytest.approx(0.010)
    budget.passed(0.010, 0.030, 0.010)
    assert budget.left == pytest.approx(0.010 + 0.0001 - 0.030)
    budget.passed(0.010, 9.0, 0.010)
    assert budget.left == pytest.approx(-0.040)
    budget.passed(0.010, -9.0, 0.010)
    assert budget.left == pytest.approx(0.080)
