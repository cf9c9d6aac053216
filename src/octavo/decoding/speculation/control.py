"""How many drafts pay: measured, step by step, so that speculation is never slower than none.

A step of B plain decodes takes t(B) and yields B tokens. A draft more costs e and is taken with a chance p that its
branch's past tells, the j-th of a row with p^j. Tokens a second are most where exactly those drafts are computed whose
chance is above  e * tokens / seconds  of the step as it then is (a knapsack whose goal is a ratio: best first). Under
load t(B) grows and that bar with it, up to 1: nothing is drafted.

Nothing is taken on trust: t(B) comes from plain steps, e from steps with drafts at the same B, whose number at most
doubles from one to the next. What a B has gained is kept; where it is nothing, drafts rest for longer and longer.
No clock is read here: seconds come in.
"""

from __future__ import annotations

from math import inf, log

__all__ = ["DraftControl", "Taken"]

FIRST_DRAFTS = 4  # of one step, before any were measured
GROWTH = 2
NEWEST = 1 / 8  # what the newest step counts in a mean
REFRESH = 256  # steps with drafts after which a plain one is measured again
MOST_SIZES = 1024  # numbers of rows that are remembered
LEAST_GAIN = 1.03  # tokens a second against plain steps: below it drafts rest
PROOF = 8  # steps with drafts before a verdict
REST = (16, 4096)  # steps: the first rest, and the longest


class Taken:
    """The chance of a branch's next draft to be taken, by its newest ones. Rests where that is low."""

    __slots__ = ("_pause", "_seen", "_taken", "rest")

    def __init__(self, chance: float) -> None:
        self._taken, self._seen = 2.0 * chance, 2.0
        self._pause = 4
        self.rest = 0  # steps without drafts that are still to come

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
        self.seen = self.drafts = self.squares = self.over = self.product = 0.0  # sums over steps with drafts
        self.most = 0  # drafts of one step
        self.gained = self.spent = 0.0  # tokens, and seconds in plain steps' worth, of steps with drafts lately
        self.num_verified = 0
        self.rest, self.next_rest = 0, REST[0]
        self.since_plain = 0

    def cost(self) -> tuple[float, float]:
        """Seconds that drafts cost at all, and each of them: a line through what was measured, nowhere falling."""
        if not self.seen:
            return 0.0, 0.0
        mean, over = self.drafts / self.seen, self.over / self.seen
        variance = self.squares / self.seen - mean * mean
        each = (self.product / self.seen - mean * over) / variance if variance > 0.25 else over / mean
        each = min(max(each, 0.0), max(over / mean, 0.0))
        return max(over - each * mean, 0.0), each


class DraftControl:
    """Decides for a step; learns from it afterwards."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self.chance = 0.6  # of a draft of anybody, lately
        self.verify_seconds = 0.0  # that steps with drafts took beyond plain ones
        self.saved_seconds = 0.0  # that plain steps would have taken for the tokens they yielded besides

    def share(self, rows: int, branches: list[Taken], most: int) -> list[int]:
        """How many drafts each of ``branches`` may have, at most ``most``, in a step of ``rows`` decodes in all."""
        size, none = self._sizes.get(rows), [0] * len(branches)
        if size is None or not size.num_plain or size.since_plain >= REFRESH:
            return none
        if size.rest:
            size.rest -= 1
            return none
        room = GROWTH * size.most or FIRST_DRAFTS
        bar = self._bar(rows, size, branches, most)
        if bar == inf:  # look again later whether that still holds
            size.rest, size.next_rest = size.next_rest, min(2 * size.next_rest, REST[1])
            bar, room = 0.0, 1
        allowed = self._above(bar, branches, most)
        for i, branch in enumerate(branches):
            if branch.rest:
                branch.rest -= 1
                allowed[i] = int(not branch.rest)  # a single one, to see
            elif not allowed[i]:
                branch.pause()
            allowed[i] = min(allowed[i], room)
            room -= allowed[i]
        return allowed

    def _bar(self, rows: int, size: _Size, branches: list[Taken], most: int) -> float:
        """The chance above which a draft pays. Raised by what the drafts above it yield, until it stands."""
        begin, each = size.cost()
        bar = each * rows / size.plain
        for _ in range(4):
            counts = self._above(bar, branches, most)
            drafts = sum(counts)
            if not drafts:
                return inf
            tokens = rows + sum(_yield(b.chance, count) for b, count in zip(branches, counts, strict=True))
            seconds = size.plain + begin + each * drafts
            if tokens * size.plain <= LEAST_GAIN * rows * seconds:
                return inf
            higher = each * tokens / seconds
            if higher <= bar * 1.01:
                break
            bar = higher
        return bar

    def _above(self, bar: float, branches: list[Taken], most: int) -> list[int]:
        if bar >= 1.0:
            return [0] * len(branches)
        floor = log(max(bar, 1e-3))
        return [0 if b.rest else min(most, int(floor / log(b.chance))) if b.chance > 0.0 else 0 for b in branches]

    def measured(
        self, rows: int, drafts: int, tokens: int, seconds: float, drafting: float = 0.0, owed: float = 0.0
    ) -> None:
        """A step of ``rows`` decodes and nothing else took so long, with so many drafts, and yielded so many tokens.

        ``drafting`` of the seconds went into the drafts. ``owed`` seconds, beside them, went into getting ready for
        drafts of this step and later ones: they have to be gained as well.
        """
        if not 0.0 < seconds < inf:
            return
        if rows not in self._sizes and len(self._sizes) >= MOST_SIZES:
            self._sizes.clear()
        size = self._sizes.setdefault(rows, _Size())
        if owed > 0.0 and size.num_plain:
            size.spent += rows * owed / size.plain
        if drafts:
            self._verified(size, rows, drafts, tokens, seconds, drafting)
            return
        if owed > 0.0 and size.num_plain:
            self._counted(size)
        size.num_plain += 1
        size.since_plain = 0
        known = size.plain if size.num_plain > 3 else inf
        size.plain += (min(seconds, 2.0 * known) - size.plain) * max(NEWEST, 1.0 / size.num_plain)

    def _verified(self, size: _Size, rows: int, drafts: int, tokens: int, seconds: float, drafting: float) -> None:
        is_first, size.most = not size.most, max(size.most, drafts)
        size.since_plain += 1
        if is_first:  # it costs what later ones do not
            size.num_verified += 1
            return
        keep = 1.0 - NEWEST / 2
        if size.seen:  # what disturbs a step makes it longer: of a long time part is believed, a short one at once
            begin, each = size.cost()
            expected = begin + each * drafts
            seconds = min(seconds, 2.0 * (size.plain + expected))
            if 2.0 * (seconds - size.plain) < expected:
                keep, size.next_rest = 0.25, REST[0]
        over = seconds - size.plain
        self.verify_seconds += over - drafting
        self.saved_seconds += (tokens - rows) * size.plain / rows
        for name, value in (("seen", 1.0), ("drafts", drafts), ("squares", drafts * drafts), ("over", over)):
            setattr(size, name, keep * getattr(size, name) + value)
        size.product = keep * size.product + drafts * over
        size.gained, size.spent = keep * size.gained + tokens, keep * size.spent + rows * seconds / size.plain
        self._counted(size)

    def _counted(self, size: _Size) -> None:
        """A step in which drafts cost something."""
        size.num_verified += 1
        if size.num_verified % PROOF == 0:
            self._judge(size)

    def _judge(self, size: _Size) -> None:
        if size.gained >= LEAST_GAIN * size.spent:
            size.next_rest = REST[0]
            return
        size.rest, size.next_rest = size.next_rest, min(2 * size.next_rest, REST[1])
        size.gained = size.spent = 0.0

    def saw(self, drafted: int, taken: int) -> None:
        """What became of a branch's drafts: how one that is new is judged."""
        for right in [True] * taken + [False] * (taken < drafted):
            self.chance += (right - self.chance) / 64


def _yield(chance: float, drafts: int) -> float:
    """Drafts of a row that are taken, of ``drafts``: the sum of chance^j (Leviathan et al. 2023, without the 1)."""
    return chance * (1.0 - chance**drafts) / (1.0 - chance)
