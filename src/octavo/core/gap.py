"""A bound on the gap between two tokens of a request: how much prefill fits into a step beside those that decode.

    bound - margin - what the decodes cost by themselves = what chunks of prompts may cost in this step

Both are foretold by the step model; what steps took beyond it lately (a drift, followed within 16 steps) is taken off.
The margin is what few of them take beyond that: of the later half of all, since the first ones tell how little was
known then. Until the step model is fitted a chunk is small, and later at most twice what has lately been measured.
A step with prefill to do always does at least one token of it, so no prompt starves: where decodes alone exceed the
bound, that token comes on top, and the step is counted. Without a running decode nothing has a gap, and there is no
bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, sqrt

from octavo.core.batch import StepRows
from octavo.core.request import Branch, RequestState
from octavo.core.step_model import FRESH, StepModel, StepWork, Tail

__all__ = ["Allowance", "GapControl", "allowed", "spend", "take"]

SHARE_ABOVE = 0.001  # of the steps looked at that may be above the margin: what p99.9 leaves
SHARE_BEYOND = 0.0003  # of those to come, if overruns fall off as the largest ones do; real ones fall off more slowly
LEAST_MARGIN = 0.08  # of the bound
MOST_MARGIN = 0.5  # of the bound: a machine that stands still for longer is not helped by smaller chunks
FIRST_MARGIN = 0.3  # of the bound, until FRESH steps have shown how far off the model is; then less and less
CAUTION = 0.25  # of the margin more when no step was seen, and less and less up to
SURE_AFTER = 1024  # steps
DRIFT = 1 / 16  # of the newest error in what the model is off by lately
MOST_ERROR = 0.2  # of the bound: what one step may say of it
MOST_DRIFT = 0.5  # of the bound
FIRST_CHUNK = 16  # tokens of prefill in a step of which nothing is known
GROWTH = 2  # times the largest chunk lately measured is the largest one trusted


class Allowance:
    """What one step may spend on prefill. ``seconds`` is what is left of it."""

    def __init__(self, model: StepModel, seconds: float) -> None:
        self._model = model
        self.seconds = seconds
        known = model.is_fitted
        self._tokens = max(FIRST_CHUNK, int(known * GROWTH * model.most_prefill))
        self._scored = max(FIRST_CHUNK, int(known * GROWTH * model.most_scored))
        self._attention = known * GROWTH**2 * model.most_attention
        self.granted = 0
        self.wanted = 0

    @property
    def is_spent(self) -> bool:
        """True if no more prefill begins in this step."""
        return self.granted > 0 and (self.granted < self.wanted or self._tokens < 1)

    def fit(self, start: int, wanted: int, scored: bool = False) -> int:
        """How many of ``wanted`` tokens from position ``start`` on fit; the step's first one always does."""
        known = max(FIRST_CHUNK, int(sqrt(start * start + 2.0 * self._attention) - start))
        tokens = min(wanted, known, self._tokens, self._scored if scored else wanted, self._affordable(start, scored))
        return max(tokens, int(self.granted == 0))

    def take(self, start: int, tokens: int, wanted: int, scored: bool = False) -> None:
        """Spend on ``tokens`` tokens, of ``wanted``."""
        self.seconds -= self._model.predict(StepWork().with_chunk(start, tokens, scored)) - self._model.coefficients[0]
        self._tokens -= tokens
        self._scored -= tokens * scored
        self.granted += tokens
        self.wanted += wanted

    def verify(self, start: int, drafts: int) -> int:
        """How many of the drafts behind a decode at ``start`` the seconds left are enough for; these are spent."""
        alone = self._model.predict(StepWork(1, start + 1))
        while drafts:
            cost = self._model.predict(StepWork().with_chunk(start, 1 + drafts)) - alone
            if cost <= self.seconds:
                self.seconds -= max(cost, 0.0)
                break
            drafts -= 1
        return drafts

    def _affordable(self, start: int, scored: bool) -> int:
        """The most tokens c with  chunk + c * each + positions_read(start, c) * read  <=  seconds."""
        _, _, _, chunk, prefill, read, score = self._model.coefficients
        left = self.seconds - chunk
        if left <= 0.0:
            return 0
        each = prefill + score * scored + read * (start + 0.5)
        root = sqrt(each * each + 2.0 * read * left) + each
        return int(min(2.0 * left / root, 1e9)) if root > 0.0 else 10**9


class GapControl:
    """Sizes the prefill of each step for a bound in seconds. It reads no clock."""

    def __init__(self, bound: float, model: StepModel) -> None:
        self.bound = bound
        self.model = model
        self.tail = Tail(part=0.5)  # seconds above what was expected, of steps in which prefill ran beside decodes
        self.drift = 0.0  # seconds that the model was off by lately
        self.steps_limited = 0  # whose prefill was cut
        self.steps_hopeless = 0  # whose decodes alone were predicted above the bound
        self.tokens_held_back = 0  # of prefill, to later steps
        self.seconds_lost = 0.0  # by the model: beyond what larger chunks would have taken for the same tokens
        self.seconds_limited = 0.0  # of the steps that were cut, by the model

    @property
    def margin(self) -> float:
        """Seconds kept free for what the model does not foresee."""
        first = FIRST_MARGIN * FRESH / max(self.tail.seen, FRESH)
        least = self.bound * max(first, LEAST_MARGIN)
        caution = 1.0 + CAUTION * max(0.0, 1.0 - self.tail.seen / SURE_AFTER)
        seen = max(self.tail.above(SHARE_ABOVE), self.tail.beyond(SHARE_BEYOND))
        return min(max(caution * seen, least), MOST_MARGIN * self.bound)

    @property
    def budget(self) -> float:
        """Seconds by the model that a step may take."""
        return self.bound - self.margin - self.drift

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from one measured step, before the model does."""
        if not work.decodes or self.model.num_chunked < FRESH or not 0.0 < seconds < inf:
            return
        beyond = min(seconds, 2.0 * self.bound) - self.model.predict(work) - self.drift
        if work.prefill:
            self.tail.add(beyond)
        most, drift = MOST_ERROR * self.bound, MOST_DRIFT * self.bound
        self.drift += DRIFT * min(max(beyond, -most), most)
        self.drift = min(max(self.drift, -drift), drift)

    def open_for(self, columns: StepRows | None, rest: Sequence[Branch]) -> Allowance | None:
        """The allowance of a step of plain decodes and those of ``rest`` that decode; None (no bound) without any."""
        contexts = [branch.num_tokens for branch in rest if branch.state is RequestState.DECODING]
        starts = [] if columns is None else columns.starts
        decodes = len(contexts) + len(starts)
        return self.open(decodes, sum(contexts) + sum(starts) + len(starts)) if decodes else None

    def open(self, decodes: int, context: int) -> Allowance:
        """The allowance of a step in which ``decodes`` (at least one) rows read ``context`` positions."""
        model = self.model
        cost = model.predict(StepWork(decodes, context))
        if cost + self.drift > self.bound:
            self.steps_hopeless += 1
        return Allowance(model, self.budget - cost)

    def affordable(self, decodes: int, context: int, start: int) -> int:
        """Tokens from position ``start`` on that a step with these decodes has room for; at least 1."""
        cost = self.model.predict(StepWork(decodes, context))
        return Allowance(self.model, self.budget - cost).fit(start, 10**9)

    def close(self, work: StepWork, allowance: Allowance) -> None:
        """Note the price of a step that was planned under an allowance."""
        if allowance.granted >= allowance.wanted:
            return
        held_back = allowance.wanted - allowance.granted
        self.steps_limited += 1
        self.tokens_held_back += held_back
        taken = self.model.predict(work)
        grown = work.prefill + held_back
        attention = work.attention * grown // max(work.prefill, 1)
        larger = self.model.predict(work._replace(prefill=grown, attention=attention))
        tokens = work.decodes + work.prefill
        self.seconds_limited += taken
        self.seconds_lost += max(0.0, taken - tokens * larger / (tokens + held_back))


def allowed(allowance: Allowance | None, branch: Branch, wanted: int) -> int:
    """How many of ``wanted`` tokens of a branch the allowance leaves; a decode is what it protects."""
    if allowance is None or branch.state is RequestState.DECODING:
        return wanted
    return allowance.fit(branch.num_resident_tokens, wanted, branch.wants_prompt_logprobs)


def spend(allowance: Allowance | None, branch: Branch, tokens: int, wanted: int) -> None:
    """Note that a branch gets ``tokens`` tokens of the ``wanted``."""
    if allowance is not None and branch.state is not RequestState.DECODING:
        allowance.take(branch.num_resident_tokens, tokens, wanted, branch.wants_prompt_logprobs)


def take(allowance: Allowance | None, branch: Branch, wanted: int) -> int:
    """``allowed``, and spent: it may be nothing."""
    tokens = allowed(allowance, branch, wanted)
    if tokens:
        spend(allowance, branch, tokens, wanted)
    return tokens
