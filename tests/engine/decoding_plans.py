"""Requests with anything that decoding has, on engines with anything that speeds it up: what is played is drawn here.

ask         one request, in all that its bytes may depend on: prompt, parameters, adapter
engine      what they must not depend on: drafts and who makes them, jump-forward, overlap, pages, chunks, tiers, places
"""

from __future__ import annotations

import contextlib
import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decoding_asks import Ask, draw_ask
from engine_harness import FIXTURES, FORGETFUL, MAX_SEQ_LEN, MODELS, Oracle, assert_idle, without_hurry
from lying_trees import lying_tree
from test_same_bytes import PROMPTS

from octavo.backends.adapters import AdapterRoom
from octavo.core.request import Request
from octavo.core.scheduler import SchedulerConfig
from octavo.core.speculation import Guess
from octavo.decoding.grammar import GrammarCompiler, GrammarFault
from octavo.decoding.speculation import (
    DraftLimits,
    DraftModelProposer,
    NgramProposer,
    Speculator,
    make_speculator,
)
from octavo.engine.adapters import ReadAdapter
from octavo.engine.core import EngineCore
from octavo.engine.fixture import load_fixture
from octavo.engine.output import OutputDelta, OutputRouter
from octavo.engine.parts import ModelParts, build_core, parts_from_fixture

ROOM = AdapterRoom(3, 8)
ADAPTERS = ((1, 3, ("_proj",)), (2, 8, ("q_proj", "down_proj")), (3, 1, ("gate_proj", "up_proj", "v_proj")))


@dataclass(frozen=True)
class Engine:
    """What no byte depends on."""

    page_size: int
    spare_tokens: int  # pages beyond those of the longest request
    prefix_cache: bool
    host_pages: int
    overlap: bool
    jumps: bool
    drafts: str  # who makes them
    most: int
    lies: int  # of eight
    trees: bool  # drafts are trees
    places: tuple[int, ...]  # the order in which adapters are loaded
    scheduling: Mapping[str, Any]


SPECULATION = ("", "ngram", "suffix", "oracle", "oracle")


def draw_engine(rng: random.Random, page_sizes: Sequence[int], widest: int) -> Engine:
    """Half of them have hardly more pages than one request takes. ``widest``: branches that are drawn together."""
    cache = rng.random() < 0.75
    return Engine(
        page_size=rng.choice(page_sizes),
        spare_tokens=rng.choice((0, 0, 1, 4, 12, 30, 90)),
        prefix_cache=cache,
        host_pages=rng.choice((0, 0, 3, 40)) if cache else 0,
        overlap=rng.random() < 0.4,
        jumps=rng.random() < 0.7,
        drafts=rng.choice(SPECULATION),
        most=rng.choice((1, 2, 4, 8)),
        lies=rng.choice((0, 1, 3, 8)),
        trees=rng.random() < 0.7,
        places=tuple(rng.sample((1, 2, 3), 3)),
        scheduling={
            "max_prefill_chunk": rng.choice((1, 4, 9, 24)),
            "max_batched_tokens": max(widest, rng.choice((3, 12, 40))),
            "max_running_requests": max(widest, rng.randint(2, 8)),
            "preemption": rng.choice(("auto", "swap", "recompute")),
            "max_preemptions": rng.choice((0, 2, 8)),
        },
    )


PLAIN = Engine(16, 4 * MAX_SEQ_LEN, False, 0, False, False, "", 0, 0, False, (1, 2, 3), {})


class Liar(Oracle):
    """Its lies to those that follow a grammar are tokens that the grammar allows: what it would not does no harm."""

    def __init__(self, said: Any, most: int, lies: int, grammars: GrammarCompiler, trees: bool) -> None:
        super().__init__(said, most, lies, trees=trees)
        self.grammars = grammars

    def drafts(self, running: Sequence[Any]) -> dict[tuple[str, int], Guess]:
        """Some for each."""
        found = super().drafts(running)
        for branch in running:
            if branch.params.grammar is not None and self.trees:
                right, dice = self.said(*branch.key)[branch.num_output_tokens :], self.dice.randrange
                found[branch.key] = lying_tree(right, self.most + 3, max(2, self.lies), dice, self.allowed(branch))
            elif branch.params.grammar is not None:
                found[branch.key] = self._within(branch, len(found[branch.key]))
        return found

    def allowed(self, branch: Any) -> Callable[[tuple[int, ...]], Sequence[int]]:
        """What the grammar allows behind these drafts."""
        grammar = branch.params.grammar
        if grammar is None:
            return super().allowed(branch)

        def after(path: tuple[int, ...]) -> list[int]:
            matcher = self.grammars.matcher(grammar)
            with contextlib.suppress(GrammarFault):
                matcher.accept([*branch.output_token_ids, *path])
                return within(matcher.mask(), branch.end_ids)
            return []

        return after

    def _within(self, branch: Any, count: int) -> list[int]:
        matcher, right, found = self.grammars.matcher(branch.params.grammar), self.said(*branch.key), []
        with contextlib.suppress(GrammarFault):
            matcher.accept(branch.output_token_ids)
            while len(found) < count:
                mask, at = matcher.mask(), branch.num_output_tokens + len(found)
                allowed = within(mask, branch.end_ids)
                lies = self.dice.random() * 8 < self.lies or at >= len(right) or right[at] not in allowed
                if not allowed:
                    break
                found.append(self.dice.choice(allowed) if lies else right[at])
                matcher.accept(found[-1:])
        return found


def within(mask: bytes, end_ids: Collection[int]) -> list[int]:
    """The tokens that a mask allows and that end nothing."""
    return [i for i in range(8 * len(mask)) if mask[i >> 3] >> (i & 7) & 1 and i not in end_ids]


@dataclass
class Answer:
    """All that was told of one choice."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Any, ...] = ()
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    hidden: bytes = b""

    def add(self, delta: OutputDelta) -> None:
        """One step's share."""
        assert self.finish_reason is None, f"after the end: {delta}"
        self.text += delta.text
        self.tokens += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.finish_reason, self.stop_reason, self.error = delta.finish_reason, delta.stop_reason, delta.error
        self.hidden = delta.hidden


Answers = dict[tuple[str, int], Answer]


@dataclass
class Stage:
    """A model on a backend, and what each ask comes to on a plain engine, alone. ``folders``: of `ADAPTERS`."""

    quiet: ModelParts  # for requests alone: places of adapters belong to a native model
    parts: ModelParts
    folders: Sequence[str]
    page_sizes: Sequence[int]
    asks: Sequence[Ask]  # few: what they come to alone has to be known
    known: dict[Ask, list[Answer]] = field(default_factory=dict)
    _read: dict[tuple[int, int], ReadAdapter] = field(default_factory=dict)
    _alone: Session | None = None

    def core(self, parts: ModelParts, engine: Engine, longest: int, widest: int = 1) -> EngineCore:
        """An engine that audits its pages, with all adapters and room for ``widest`` sequences of so many tokens."""
        groups = [replace(group, window=0) for group in parts.model.kv_groups()]
        counts, voting = (*[longest] * widest, engine.spare_tokens), parts.config.voting
        page_size = min(engine.page_size, voting.block) if voting else engine.page_size
        pages = [group.most_columns(count, page_size, None) for group in groups for count in counts]
        core = build_core(
            parts,
            num_pages=sum(pages),
            page_size=page_size,
            scheduling=SchedulerConfig(max_seq_len=MAX_SEQ_LEN, **engine.scheduling),
            prefix_cache=engine.prefix_cache,
            host_pages=0 if parts.config.forgets else engine.host_pages,
            clock=lambda: 0.0,
            audit=True,
            overlap=engine.overlap,
            adapters=ROOM,
        )
        for number in engine.places:
            core.load_adapter(f"a{number}", self.folders[number - 1], self.adapter(core, parts, number))
        if not engine.jumps:
            core.forcing = None
        return without_hurry(core)

    def adapter(self, core: EngineCore, parts: ModelParts, number: int) -> ReadAdapter:
        """An adapter as the parts want it, read once."""
        key = (id(parts), number)
        if key not in self._read:
            self._read[key] = core.served_adapters.read(self.folders[number - 1])
        return self._read[key]

    def request(self, name: str, ask: Ask) -> Request:
        """The request that an ask is."""
        parts = self.parts
        digest = self._read[id(self.quiet), ask.adapter].digest if ask.adapter else ""
        ids = parts.config.eos_token_ids
        space = parts.namespace("", digest)
        return Request(name, PROMPTS[ask.prompt], ask.params, adapter=digest, namespace=space, eos_token_ids=ids)

    def alone(self, ask: Ask) -> list[Answer]:
        """What each choice comes to by itself, whole prompt at once, nothing cached, nothing guessed."""
        if self._alone is None:
            self._alone = Session(self.core(self.quiet, PLAIN, MAX_SEQ_LEN), {})
        if ask not in self.known:
            session, name = self._alone, f"alone {len(self.known)}"
            session.submit(self.request(name, ask))
            while session.core.has_work:
                session.step()
            self.known[ask] = [session.answers[name, choice] for choice in range(ask.params.num_branches)]
        return self.known[ask]


def make_stage(
    model: str, adapter_folder: Callable[..., str], *, asks: int, page_sizes: Sequence[int], **options: Any
) -> Stage:
    """A tiny model on a backend (``options`` of `parts_from_fixture`); adapters and asks are drawn from its name."""

    def parts(threads: Mapping[str, int]) -> ModelParts:
        name, eviction = FORGETFUL.get(model) or (MODELS[model], None)
        return parts_from_fixture(
            load_fixture(FIXTURES / name), adapters=ROOM, eviction=eviction, **{**options, **threads}
        )

    quiet, played = parts({"threads": 1} if "threads" in options else {}), parts({})
    shapes = quiet.model.projections()
    folders = [adapter_folder(shapes, seed, rank=rank, ends=ends) for seed, rank, ends in ADAPTERS]
    rng = random.Random(f"{model} {options}")
    drawn = [draw_ask(rng) for _ in range(asks)]
    if model == "h2o":  # refuses beams
        drawn = [ask for ask in drawn if not ask.params.use_beam_search]
    return Stage(quiet, played, folders, page_sizes, drawn)


def play_all(stages: Sequence[Stage], count: int, seen: Counter[str], kind: Callable[..., Play] | None = None) -> None:
    """Combination after combination; one that fails tells its number."""
    for number in range(count):
        try:
            (kind or Play)(stages[number % len(stages)], random.Random(number), seen).run()
        except BaseException as error:
            raise AssertionError(f"combination {number}: {error}"[:8000]) from error


class Session:
    """An engine and the text side of it."""

    def __init__(self, core: EngineCore, answers: Answers) -> None:
        self.core, self.answers = core, answers
        self.router = OutputRouter(core, core.grammars._model[0])  # type: ignore[union-attr]

    def submit(self, request: Request) -> None:
        """A request comes."""
        self.core.submit(request, 0.0)
        self.router.open(request)

    def restore(self, saved: Mapping[str, Any]) -> None:
        """A request comes from elsewhere."""
        self.router.open(self.core.restore(saved, 0.0))

    def step(self) -> None:
        """One step, and what it told."""
        for delta in self.router.take(self.core.step(0.0)):
            self.answers.setdefault((delta.request_id, delta.choice), Answer()).add(delta)


class Play:
    """Some asks together on one engine after another, each with its troubles."""

    def __init__(self, stage: Stage, rng: random.Random, seen: Counter[str]) -> None:
        self.stage, self.rng, self.seen = stage, rng, seen
        self.asks = {f"r{i}": rng.choice(stage.asks) for i in range(rng.randint(2, 4))}
        for ask in self.asks.values():
            stage.alone(ask)
        self.answers: Answers = {}
        self.fails: str = ""  # how the next step of several rows does
        self.engines: list[Engine] = []
        self.steps = 0
        self.session = self._open()

    def run(self) -> None:
        """To the end; every answer is what it is alone."""
        rng, waiting, left = self.rng, list(self.asks), {"preempt": 3, "fail": 2, "restart": 2}
        while waiting or self.session.core.has_work:
            if waiting and rng.random() < 0.6:
                name = waiting.pop(0)
                self.session.submit(self.stage.request(name, self.asks[name]))
            for trouble, chance in (("preempt", 0.1), ("fail", 0.06), ("restart", 0.05)):
                if left[trouble] and rng.random() < chance:
                    left[trouble] -= 1
                    getattr(self, f"_{trouble}")()
            self.session.step()
            self.steps += 1
            assert self.steps < 2000, "no progress"
        assert_idle(self.session.core)
        self.session.core.close()
        self._check()

    def _open(self) -> Session:
        asks = self.asks.values()
        longest = max(len(PROMPTS[ask.prompt]) + (ask.params.max_tokens or 0) for ask in asks)
        widest = max(ask.params.num_branches if ask.params.use_beam_search else 1 for ask in asks)
        engine = draw_engine(self.rng, self.stage.page_sizes, widest)
        core = self.stage.core(self.stage.parts, engine, longest, widest)
        core.speculator = self._speculator(engine, core)
        self._intercept(core)
        self.engines.append(engine)
        self.seen["overlap"] += engine.overlap
        return Session(core, self.answers)

    def _speculator(self, engine: Engine, core: Any) -> Any:
        trees = engine.trees and not self.stage.parts.config.forgets
        if engine.drafts == "oracle":
            return Liar(self._said, engine.most, engine.lies, core.grammars, trees)
        if engine.drafts == "ngram":
            return Speculator(NgramProposer(1, 3), engine.most)
        tree = trees and engine.drafts == "suffix"
        return make_speculator(engine.drafts, max(1, engine.most), adapts=False, tree=tree)

    def _said(self, request_id: str, choice: int) -> Sequence[int]:
        return self.stage.alone(self.asks[request_id])[choice].tokens

    def _intercept(self, core: EngineCore) -> None:
        execute = core.executor

        def run(decision: Any) -> Any:
            self._count(decision)
            if not self.fails or len({row.request_id for row in decision.rows}) < 2:  # one would be charged with it
                return execute(decision)
            when, self.fails = self.fails, ""
            self.seen[f"fail {when}"] += 1
            self.seen["rejected in a step that failed"] += any(row.num_drafts for row in decision.rows)
            if when == "after":
                execute(decision)
            raise OSError("injected")

        core.executor = run
        if core._thread is not None:
            core._thread._executor = run

    def _count(self, decision: Any) -> None:
        seen, rows = self.seen, decision.rows
        drafted = [row for row in rows if row.num_drafts]
        seen["drafts"] += bool(drafted)
        seen["drafts of two"] += len(drafted) > 1
        trees = [row for row in drafted if row.flags.parent_rows]
        seen["trees"] += bool(trees)
        seen["trees of grammars"] += any(self.asks[row.request_id].params.grammar for row in trees)
        seen["adapters"] += len({self.asks[row.request_id].adapter for row in rows}) > 1
        seen["drafts of adapters"] += any(self.asks[row.request_id].adapter for row in drafted)
        seen["drafts of grammars"] += any(self.asks[row.request_id].params.grammar for row in drafted)
        seen["beams"] += any(self.asks[row.request_id].params.use_beam_search for row in rows)
        seen["preemptions"] += len(decision.preemptions)
        seen["swaps"] += bool(decision.swap_ins)
        seen["copies"] += bool(decision.copies)
        forgets = [row for row in rows if row.compaction]
        seen["compactions"] += bool(forgets)
        seen["compactions of drafts"] += any(row.num_drafts for row in forgets)
        seen["compactions of beams"] += any(self.asks[row.request_id].params.use_beam_search for row in forgets)
        seen["compactions of adapters"] += any(self.asks[row.request_id].adapter for row in forgets)

    def _preempt(self) -> None:
        roster = self.session.core.scheduler._roster
        if roster.running:
            self.seen["forced preemption"] += 1
            roster.preempt(self.rng.choice(list(roster.running)), 0.0, "forced")

    def _fail(self) -> None:
        self.fails = self.rng.choice(("before", "after"))

    def _restart(self) -> None:
        """The engine dies, between two steps or in the midst of one; another goes on from the last snapshots."""
        old = self.session.core
        live = [name for name in self.asks if old.scheduler.get(name) is not None]
        saved = [json.loads(json.dumps(old.snapshot(name))) for name in live]
        if old.has_work and self.rng.random() < 0.6:
            before = self.seen["drafts"]
            old.step(0.0)  # nobody hears of it
            self.seen["died verifying"] += self.seen["drafts"] - before
        old.close()
        self.session, self.fails = self._open(), ""
        for each in saved:
            self.seen["restored"] += 1
            self.session.restore(each)

    def _check(self) -> None:
        for name, ask in self.asks.items():
            wanted = self.stage.alone(ask)
            found = [self.answers.get((name, choice), Answer()) for choice in range(len(wanted))]
            if len(wanted) > 1 and any(answer.error for answer in wanted):
                assert any(answer.error for answer in found), f"{name}: {found}"
                found, wanted = common(found, wanted), common(wanted, found)
            for choice, (got, expected) in enumerate(zip(found, wanted, strict=True)):
                assert got == expected, f"{name}/{choice}: {got}, not {expected} as {ask} on {self.engines}"
        self.seen["played"] += 1


def common(answers: Sequence[Answer], others: Sequence[Answer]) -> list[Answer]:
    """What both say. An error of one choice ends the others of its request, wherever they are."""
    counts = [min(len(one.tokens), len(two.tokens)) for one, two in zip(answers, others, strict=True)]
    return [
        Answer(tokens=answer.tokens[:count], logprobs=answer.logprobs[:count])
        for answer, count in zip(answers, counts, strict=True)
    ]


class DraftModelPlay(Play):
    """Drafts come from a draft model, where there are any: the model itself without its adapters."""

    def _speculator(self, engine: Engine, core: Any) -> Any:
        parts, pages = self.stage.quiet, core.kv.allocator.num_pages
        proposer = DraftModelProposer(
            parts.model,
            parts.backend,
            parts.weights,
            num_pages=pages if pages % 3 else 4,
            page_size=core.kv.page_size,
            limits=DraftLimits(9, 2, 40, 5) if pages % 2 else DraftLimits(64, 8, MAX_SEQ_LEN, 64),
        )
        return Speculator(proposer, max(1, engine.most))
