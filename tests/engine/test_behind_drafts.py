"""What fails behind a draft is nothing until its row is really drawn: a request ends as it would without drafts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from engine_harness import Choice, Collector, Oracle, assert_idle, make_core, make_request, run_to_end, tiny_parts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_jump_forward import BACKENDS

from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams
from octavo.decoding.grammar import GrammarFault
from octavo.engine import slots

PROMPT, VOCAB = (1, 9, 31), tiny_parts("llama").config.vocab_size
GRAMMAR = Grammar("regex", "[a-e]{12,20}")
CONSTRAINED = SamplingParams(max_tokens=12, seed=5, logprobs=1, grammar=GRAMMAR)
PROCESSED = SamplingParams(max_tokens=8, seed=5, ignore_eos=True, presence_penalty=0.5, logits_processors=("odd",))
PLAIN = SamplingParams(max_tokens=8, seed=5, ignore_eos=True, logprobs=0)


class Teller(Oracle):
    """Proposes ``path`` for as long as the output goes along it."""

    def __init__(self, path: Sequence[int]) -> None:
        super().__init__(lambda name, choice: (), 7, 0)
        self.path, self.drafted = list(path), 0

    def drafts(self, running: Sequence[Any]) -> dict[tuple[str, int], list[int]]:
        """What is left of the path."""
        said = {branch.key: branch.token_ids[branch.num_prompt_tokens :] for branch in running}
        return {key: self.path[len(ids) :] for key, ids in said.items() if ids == self.path[: len(ids)]}

    def committed(self, rows: Any, results: Any, seconds: float) -> None:
        """Count what was verified."""
        self.drafted += sum(row.num_drafts for row in rows)


def outcome(backend: str, params: SamplingParams, path: Sequence[int] = (), break_down: Any = None) -> Choice:
    """What a request comes to beside another one, with drafts along ``path``."""
    core, collector = make_core(backend=backend, page_size=16 if backend == "native" else 4), Collector()
    core.forcing = None
    if path:
        core.speculator = Teller(path)
    if break_down is not None:
        break_down(core.executor.__self__)  # type: ignore[attr-defined]
    core.submit(make_request("r", PROMPT, params), 0.0)
    core.submit(make_request("other", (7, 8) * 4, PLAIN), 0.0)
    run_to_end(core, collector)
    assert_idle(core)
    assert collector.choices["other", 0].finish_reason == "length"
    if path:
        assert core.speculator.drafted > 0
    return collector.choices["r", 0]


class Failing:
    """A matcher that fails for ever once it stands behind ``bad``, or has made ``most`` masks."""

    def __init__(self, matcher: Any, bad: Sequence[int], where: str, most: int) -> None:
        self.matcher, self.bad, self.where, self.most = matcher, list(bad), where, most
        self.ids: list[int] = []
        self.masks, self.dead = 0, False

    @property
    def length(self) -> int:
        return len(self.ids)

    def mask(self) -> bytes:
        self.masks += 1
        self._look(self.masks > self.most or (self.where == "mask" and self.ids == self.bad))
        return self.matcher.mask()

    def accept(self, ids: Sequence[int]) -> None:
        for token in ids:
            self.ids.append(token)
            self._look(self.where == "accept" and self.ids == self.bad)
            self.matcher.accept([token])

    def rollback(self, count: int) -> None:
        self._look(False)
        self.matcher.rollback(count)
        del self.ids[len(self.ids) - max(count, 0) :]

    def _look(self, fails: bool) -> None:
        self.dead = self.dead or fails
        if self.dead:
            raise GrammarFault("it failed on purpose")


def failing(bad: Sequence[int], where: str, most: int) -> Callable[[Any], None]:
    """Has the matchers of a runner fail."""

    class Compiler:
        def __init__(self, real: Any) -> None:
            self.real = real

        def matcher(self, grammar: Grammar) -> Failing:
            return Failing(self.real.matcher(grammar), bad, where, most)

        apart = matcher

    def put(runner: Any) -> None:
        followed = runner._constraints._followed
        followed._grammars = Compiler(followed._grammars)

    return put


@functools.cache
def said(backend: str, params: SamplingParams) -> list[int]:
    """The tokens without drafts and without failures."""
    choice = outcome(backend, params)
    assert choice.error is None and len(choice.tokens) >= 6
    return choice.tokens


def wrong_for(tokens: Sequence[int]) -> int:
    """Another token than the last of these that the grammar allows in its place."""
    matcher = make_core().grammars.matcher(GRAMMAR)
    matcher.accept(tokens[:-1])
    mask = matcher.mask()
    return next(i for i in range(1, 8 * len(mask)) if i != tokens[-1] and mask[i >> 3] >> (i & 7) & 1)


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(BACKENDS),
    st.integers(3, 5),
    st.booleans(),
    st.sampled_from(("accept", "mask", "nowhere")),
    st.sampled_from((2, 3, 99)),
)
def test_a_grammar_that_fails_behind_a_draft(backend: str, place: int, drawn: bool, where: str, most: int) -> None:
    tokens = said(backend, CONSTRAINED)
    bad = tokens[:place] if drawn else [*tokens[: place - 1], wrong_for(tokens[:place])]
    path = [*bad, *tokens[place:]]
    plain = outcome(backend, CONSTRAINED, break_down=failing(bad, where, most))
    assert outcome(backend, CONSTRAINED, path, failing(bad, where, most)) == plain
    if drawn and where != "nowhere":
        assert (plain.finish_reason, plain.tokens) == ("error", tokens[:place])
    else:
        assert plain == outcome(backend, CONSTRAINED)


def _raise(tokens: Sequence[int]) -> Mapping[int, float]:
    raise ZeroDivisionError("on purpose")


ODD: dict[str, Callable[[Sequence[int]], Mapping[int, float]]] = {
    "raises": _raise,
    "no number": lambda tokens: {3: math.nan},
    "no token": lambda tokens: {10**6: 1.0},
    "bans all": lambda tokens: dict.fromkeys(range(VOCAB), -math.inf),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("odd", ODD)
def test_a_processor_that_fails_behind_a_draft(
    backend: str, drawn: bool, odd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad: list[int] = []

    def process(tokens: Sequence[int], num_prompt_tokens: int) -> Mapping[int, float]:
        return ODD[odd](tokens) if bad and tokens[num_prompt_tokens:] == bad else {}

    monkeypatch.setattr(slots, "processor", lambda name: process)
    tokens = said(backend, PROCESSED)
    bad += tokens[:3] if drawn else [*tokens[:2], (tokens[2] + 1) % VOCAB]
    plain = outcome(backend, PROCESSED)
    assert outcome(backend, PROCESSED, [*bad, *tokens[3:]]) == plain
    assert (plain.error is not None, plain.tokens) == (drawn, tokens[:3] if drawn else tokens)


@pytest.mark.parametrize("drawn", [False, True])
def test_logits_that_are_not_finite_behind_a_draft(drawn: bool) -> None:
    tokens = said("reference", PLAIN)
    bad = tokens[2] if drawn else next(i for i in range(VOCAB) if i not in (*tokens, *PROMPT))

    def spoil(runner: Any) -> None:
        model = runner.model

        class Spoiled:
            def forward(self, ops: Any, weights: Any, batch: Any) -> Any:
                logits = model.forward(ops, weights, batch)
                rows = [batch.token_ids[row] == bad and batch.positions[row] == 5 for row in batch.logit_rows]
                return [[math.nan] * len(row) if rows[i] else row for i, row in enumerate(logits)]

        runner.model = Spoiled()

    plain = outcome("reference", PLAIN, break_down=spoil)
    assert outcome("reference", PLAIN, [*tokens[:2], bad, *tokens[3:]], spoil) == plain
    assert (plain.error is not None, plain.tokens) == (drawn, tokens[:3] if drawn else tokens)
