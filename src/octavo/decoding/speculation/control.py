"""How many drafts pay: measured, step by step, so that speculation is never slower than none.

A step of B plain decodes takes t(B) and yields B tokens. A draft more costs e and is taken with a chance p that its
branch's past tells, the j-th of a row with p^j. Tokens a second are most where exactly those drafts are computed whose
chance is above  e * tokens / seconds  of the step as it then is (a knapsack whose goal is a ratio: best first). Under
load t(B) grows and that bar with it, up to 1: nothing is drafted. A draft model takes a pass for each depth besides,
and reads what a branch has before its first draft: that has to be won by those drafts, twice.

Nothing is taken on trust: t(B) comes from plain steps, e from steps with drafts at the same B, whose number at most
doubles from one to the next. Until eight of them have gained, each is a trial: one branch first, and only if what it
may lose is in the `Budget`: a hundredth of the time that passed, the time of eight tokens, and an eighth of what the
drafts would win if they were right as often as those of late. Where the gain is nothing, drafts rest for longer and
longer. No clock is read here: seconds come in.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

from octavo.decoding.speculation.costs import NEWEST, SHARE, Budget, Line, Rate

__all__ = ["DraftControl", "Taken"]

FIRST_DRAFTS = 2  # of one step, before any were measured
SHALLOW = 2  # drafts of a branch in a trial of a draft model beside others
GROWTH = 2
REFRESH = 256  # steps with drafts after which a plain one is measured again
MOST_SIZES = 1024  # numbers of rows that are remembered
LEAST_GAIN = 1.03  # tokens a second against plain steps: below it drafts rest
PROOF = 8  # steps with drafts before a verdict
REST = (16, 4096)  # plain steps: the first rest, and the longest
LOOK = 64  # steps after which it is seen whether a trial can be paid for
LENT = 8.0  # tokens whose time may be lost at each number of rows
SHORT = 16  # tokens that a branch lacks and that are read without asking whether they pay


class Taken:
    """The chance of a branch's next draft to be taken, by its newest ones. Rests where that is low."""

    __slots__ = ("_pause", "_seen", "_taken", "left", "rest", "unread")

    def __init__(self, chance: float) -> None:
        self._taken, self._seen = 2.0 * chance, 2.0
        self._pause = 4
        self.rest = 0  # steps without drafts that are still to come
        self.unread = 0  # tokens that a draft model would have to read first
        self.left = 0.0  # tokens that are expected to come

    @property
    def chance(self) -> float:
        """Of a draft whose predecessors were taken."""
        return min(self._taken / self._seen, 0.99)

    def saw(self, drafted: int, taken: int) -> None:
        """Of so many drafts the first ``taken`` were right; the one behind them was not, if there was one."""
        fade = 0.8
        self._taken = fade * self._taken + taken
        self._seen = fade * self._seen + taken + (taken < drafted)
        if taken:
            self._pause = 4

    def pause(self) -> None:
        """No draft pays now: try one again later, and later still if that is wrong as well."""
        self.rest, self._pause = self._pause, min(2 * self._pause, 512)


class _Size:
    """What is known of steps with one number of rows."""

    def __init__(self) -> None:
        self.plain = 0.0  # seconds
        self.num_plain = 0
        self.verify = Line()  # seconds beyond a plain step, over drafts
        self.most = 0  # drafts of one step
        self.gained = self.spent = 0.0  # tokens, and seconds in plain steps' worth, of steps with drafts lately
        self.num_verified = 0
        self.pays = False  # by the last verdict
        self.rest, self.next_rest = 0, REST[0]
        self.trial = 1  # drafts of the next step that is made only to see
        self.lost = 0.0  # seconds, of those that were lent
        self.since_plain = 0

    def start_rest(self, times: int = 1) -> None:
        """No drafts for some steps, and for twice as many the next time."""
        self.rest, self.next_rest = min(times * self.next_rest, REST[1]), min(2 * self.next_rest, REST[1])


class _Step:
    """What a step would come to: ``rows`` of which ``branches`` may have drafts."""

    def __init__(
        self, rows: int, plain: float, verify: tuple[float, float], passes: Line, branches: Sequence[Taken], read: float
    ) -> None:
        self.rows, self.plain, self.branches, self.read = rows, plain, branches, read
        self.begin, self.each = verify
        self.per_pass, self.per_guess = passes.parts
        self.has_passes = bool(passes)

    def seconds(self, counts: Sequence[int]) -> float:
        """Of a step with so many drafts for each branch."""
        drafts, depth = sum(counts), max(counts, default=0)
        return self.plain + self.begin * (drafts > 0) + (self.each + self.per_guess) * drafts + self.per_pass * depth

    def tokens(self, counts: Sequence[int], sure: bool = False) -> float:
        """That it is expected to yield; ``sure``: if drafts are as good as always right."""
        return self.rows + sum(
            _yield(0.99 if sure else branch.chance, count)
            for branch, count in zip(self.branches, counts, strict=True)
            if count
        )

    def win(self, branch: Taken, count: int) -> float:
        """Seconds that so many drafts a step save for a branch until it ends, if all others have as many."""
        more = _yield(branch.chance, count)
        cost = (self.each + self.per_guess + self.per_pass / len(self.branches)) * count
        return branch.left / (1.0 + more) * max(0.0, more * self.plain / self.rows - cost)

    def is_worth_reading(self, branch: Taken, count: int) -> bool:
        """Whether what a draft model lacks of a branch is read at a profit."""
        return branch.unread <= SHORT or 2.0 * branch.unread * self.read <= self.win(branch, count)

    def best(self, most: int, sure: bool = False) -> list[int]:
        """Drafts for each branch that make tokens a second most; none where that is hardly more than without."""
        best, rate = [0] * len(self.branches), LEAST_GAIN * self.rows / self.plain
        for depth in range(1, most + 1) if self.has_passes else (most,):
            counts = self._above(depth, sure)
            found = self.tokens(counts, sure) / self.seconds(counts)
            if found > rate:
                best, rate = counts, found
            elif any(best):
                break
        return best

    def _above(self, depth: int, sure: bool) -> list[int]:
        """Those drafts whose chance is above what one costs. That is raised by what they yield, until it stands."""
        each = self.each + self.per_guess
        bar, counts = each * self.rows / self.plain, [0] * len(self.branches)
        for _ in range(4):
            counts = self._likely(bar, depth, sure)
            if not any(counts):
                break
            higher = each * self.tokens(counts, sure) / self.seconds(counts)
            if higher <= bar * 1.01:
                break
            bar = higher
        return counts

    def _likely(self, bar: float, depth: int, sure: bool) -> list[int]:
        if bar >= 1.0:
            return [0] * len(self.branches)
        floor, counts = log(max(bar, 1e-3)), []
        for branch in self.branches:
            chance = 0.99 if sure else branch.chance
            count = 0 if branch.rest or chance <= 0.0 else min(depth, int(floor / log(chance)))
            counts.append(count if sure or self.is_worth_reading(branch, count) else 0)
        return counts


class DraftControl:
    """Decides for a step; learns from it afterwards."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self.passes = Line(flat=True)  # seconds of a pass of a draft model, over branches
        self.reading = Rate()  # seconds of a token that it reads
        self.prefill = Rate()  # of a token of a prompt that the model itself reads
        self.budget = Budget()
        self.chance = 0.6  # of a draft of anybody, lately
        self.verify_seconds = 0.0  # that steps with drafts took beyond plain ones
        self.saved_seconds = 0.0  # that plain steps would have taken for the tokens they yielded besides

    def rehearsed(self, branches: int, seconds: float, num_read: int, reading: float) -> None:
        """A draft model took so long for a draft of each of some branches, and to read so many tokens before."""
        if branches and 0.0 < seconds < inf:
            self.passes.saw(branches, seconds)
        if num_read and 0.0 < reading < inf:
            self.reading.saw(num_read, reading)

    def rests(self, rows: int) -> int:
        """How many steps of so many decodes come before `share` may allow any draft; 0: the next may."""
        size = self._sizes.get(rows)
        return 1 if size is None or not size.num_plain else size.rest

    def share(self, rows: int, branches: Sequence[Taken], most: int) -> list[int]:
        """How many drafts each of ``branches`` may have, at most ``most``, in a step of ``rows`` decodes in all."""
        size, none = self._sizes.get(rows), [0] * len(branches)
        if size is None or not size.num_plain or size.since_plain >= REFRESH or size.rest:
            return none
        step = self._step(rows, size, branches)
        wanted = step.best(most)
        pays = any(wanted)
        room = (GROWTH * size.most or FIRST_DRAFTS) if pays else size.trial
        if not pays:
            wanted = [0 if branch.rest else most for branch in branches]
        if pays and size.pays:
            return _allow(step, wanted, room, range(len(branches)))
        order = sorted(range(len(branches)), key=lambda i: branches[i].unread)
        if step.has_passes and rows > 1:
            wanted = [min(count, SHALLOW) for count in wanted]
        allowed = _allow(step, wanted, room, order)
        wait = self._wait(size, step, allowed)
        if wait:
            size.rest = wait
            return none
        if not pays and any(allowed):  # look again later whether that still holds
            size.trial = min(GROWTH * size.trial, max(size.most, FIRST_DRAFTS) * GROWTH)
            is_hopeless = self._known(rows) is not None and not any(step.best(most, sure=True))
            size.start_rest(8 if is_hopeless else 1)
        return allowed

    def _step(self, rows: int, size: _Size, branches: Sequence[Taken]) -> _Step:
        verify = self._known(rows)
        parts = (0.0, self.prefill.each(0.0)) if verify is None else verify.parts
        read = self.reading.each(self.prefill.each(size.plain / max(rows, 16)))
        return _Step(rows, size.plain, parts, self.passes, branches, read)

    def _known(self, rows: int) -> Line | None:
        """What drafts cost with so many rows, or with the number next to it where that was seen."""
        size = self._sizes[rows]
        if size.verify:
            return size.verify
        seen = [other for other, known in self._sizes.items() if known.verify]
        nearest = min(seen, key=lambda other: abs(log(other / rows)), default=None)
        return None if nearest is None else self._sizes[nearest].verify

    def _wait(self, size: _Size, step: _Step, counts: Sequence[int]) -> int:
        """Steps until a trial that yields nothing can be paid for; 0 if it can be now."""
        drafted = [(branch, count) for branch, count in zip(step.branches, counts, strict=True) if count]
        if not drafted:
            return 0
        risk = step.seconds(counts) - step.plain + step.read * sum(branch.unread for branch, _ in drafted)
        if self._known(step.rows) is None:
            risk += step.plain / 2.0
        lent = max(0.0, LENT * step.plain / step.rows - size.lost)
        lent += sum(step.win(branch, count) for branch, count in drafted) / 8.0
        missing = risk - lent - self.budget.left
        return 0 if missing <= 0.0 else 1 + int(min(missing / (SHARE * step.plain), LOOK))

    def measured(
        self,
        rows: int,
        drafts: int,
        tokens: int,
        seconds: float,
        drafting: float = 0.0,
        owed: float = 0.0,
        passes: tuple[int, float] = (0, 0.0),
    ) -> None:
        """A step of ``rows`` decodes and nothing else took so long, with so many drafts, and yielded so many tokens.

        ``drafting`` of the seconds went into the drafts, in ``passes``: their number, and branches in one, where a
        draft model made them. ``owed`` seconds, beside them, went into getting ready for drafts of this step and later
        ones: they have to be gained as well.
        """
        if not 0.0 < seconds < inf:
            return
        if rows not in self._sizes and len(self._sizes) >= MOST_SIZES:
            self._sizes.clear()
        size = self._sizes.setdefault(rows, _Size())
        if owed > 0.0 and size.num_plain:
            size.spent += rows * owed / size.plain
        if passes[0] and drafting > 0.0:
            self._drafted(drafting / passes[0], passes[1])
        if size.num_plain:
            self._account(size, rows, drafts, tokens, seconds, owed)
        if drafts:
            self._verified(size, rows, drafts, tokens, seconds, drafting if passes[0] else 0.0)
            return
        if owed > 0.0 and size.num_plain:
            self._counted(size)
        size.num_plain += 1
        size.since_plain = 0
        size.rest = max(0, size.rest - 1)
        known = size.plain if size.num_plain > 3 else inf
        size.plain += (min(seconds, 2.0 * known) - size.plain) * max(NEWEST, 1.0 / size.num_plain)

    def _drafted(self, seconds: float, branches: float) -> None:
        """A pass of a draft model took so long. What disturbs one makes it longer: of a long time part is believed."""
        if self.passes:
            begin, each = self.passes.parts
            seconds = min(seconds, 3.0 * (begin + each * branches))
        self.passes.saw(branches, seconds)

    def _account(self, size: _Size, rows: int, drafts: int, tokens: int, seconds: float, owed: float) -> None:
        """What was lost against plain steps, or gained: first of what is lent, then of the budget."""
        lost = owed
        if drafts:
            lost += min(seconds, 4.0 * size.plain) - tokens * size.plain / rows
        lent = min(max(lost, 0.0), max(0.0, LENT * size.plain / rows - size.lost))
        size.lost += lent
        self.budget.passed(seconds, lost - lent, size.plain)

    def _verified(self, size: _Size, rows: int, drafts: int, tokens: int, seconds: float, drafting: float) -> None:
        is_first, size.most = not size.most, max(size.most, drafts)
        size.since_plain += 1
        if is_first:  # it costs what later ones do not
            size.num_verified += 1
            return
        over, keep = seconds - drafting - size.plain, 1.0 - NEWEST / 2
        if size.verify:  # what disturbs a step makes it longer: of a long time part is believed, a short one at once
            begin, each = size.verify.parts
            expected = begin + each * drafts
            over = min(over, size.plain + 2.0 * expected)
            if 2.0 * over < expected:
                keep, size.next_rest = 0.25, REST[0]
        self.verify_seconds += over
        self.saved_seconds += (tokens - rows) * size.plain / rows
        size.verify.saw(drafts, over, keep)
        worth = rows * (size.plain + over + drafting) / size.plain
        size.gained, size.spent = keep * size.gained + tokens, keep * size.spent + worth
        self._counted(size)

    def _counted(self, size: _Size) -> None:
        """A step in which drafts cost something."""
        size.num_verified += 1
        if size.num_verified % PROOF == 0:
            self._judge(size)

    def _judge(self, size: _Size) -> None:
        size.pays = size.gained >= LEAST_GAIN * size.spent
        if size.pays:
            size.next_rest, size.trial = REST[0], 1
            return
        size.start_rest()
        size.gained = size.spent = 0.0

    def saw(self, drafted: int, taken: int) -> None:
        """What became of a branch's drafts: how one that is new is judged."""
        for right in [True] * taken + [False] * (taken < drafted):
            self.chance += (right - self.chance) / 64


def _allow(step: _Step, wanted: Sequence[int], room: int, order: Sequence[int]) -> list[int]:
    """What is wanted, as far as there is room, in that order. A branch that rests has a single draft at the end."""
    allowed = [0] * len(wanted)
    for i in order:
        branch, count = step.branches[i], wanted[i]
        if branch.rest:
            branch.rest -= 1
            count = int(not branch.rest and step.is_worth_reading(branch, 1))
        elif not count:
            branch.pause()
        allowed[i] = min(count, room)
        room -= allowed[i]
    return allowed


def _yield(chance: float, drafts: int) -> float:
    """Drafts of a row that are taken, of ``drafts``: the sum of chance^j (Leviathan et al. 2023, without the 1)."""
    return chance * (1.0 - chance**drafts) / (1.0 - chance)
