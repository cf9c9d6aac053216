"""Random worlds and requests for the null model, and a run that checks every event against what may be said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

from builders import VOCAB, Bench, make_kv, make_request
from hypothesis import strategies as st
from null_model import lying_drafts, next_token, null_tokens, prefix_hashes, prompt_logprob

from octavo.core.batch import StepResult
from octavo.core.errors import InvalidInput
from octavo.core.events import EventKind, TokenEvent
from octavo.core.request import Request

MOST_STEPS = 3000


@dataclass
class Plan:
    """One request of a random run, and what happens to it."""

    prompt: list[int]
    params: dict
    priority: int = 0
    bulk: bool = False
    eos: list[int] = field(default_factory=list)
    arrival: int = 0
    cancel_at: int | None = None
    stop_after: int | None = None  # the text layer finds a stop string in token number ...


@dataclass
class World:
    """Sizes of a random run."""

    num_pages: int
    page_size: int
    windows: tuple[int, ...]
    config: dict
    budget: int
    prefix_cache: bool
    drafts: int = 0  # most that are proposed for a branch
    lies: int = 0  # of 8 drafts, how many are wrong
    holds: int = 0  # of 8 plans, how many leave a branch out


tokens = st.integers(1, 3)
PARAMS = st.fixed_dictionaries(
    {
        "max_tokens": st.one_of(st.none(), st.integers(0, 6)),
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "seed": st.integers(0, 3),
        "logprobs": st.sampled_from([None, None, 0, 2]),
        "prompt_logprobs": st.sampled_from([None, None, None, 1]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=20),
    }
)
PLANS = st.builds(
    Plan,
    prompt=st.lists(tokens, min_size=1, max_size=14),
    params=PARAMS,
    priority=st.integers(-1, 1),
    bulk=st.booleans(),
    eos=st.lists(st.integers(0, VOCAB - 1), max_size=20),
    arrival=st.integers(0, 12),
    cancel_at=st.one_of(st.none(), st.none(), st.integers(0, 20)),
    stop_after=st.one_of(st.none(), st.none(), st.integers(1, 4)),
)


@st.composite
def worlds(draw):
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    windows = draw(st.sampled_from([(0,), (0,), (5, 0), (3,)]))
    context = 20
    least = -(-context // page_size) * len(windows)
    config = {
        "max_running_requests": draw(st.integers(1, 6)),
        "max_prefill_chunk": draw(st.sampled_from([1, 2, 3, 5, 64])),
        "max_batched_tokens": draw(st.sampled_from([1, 4, 7, 64])),
        "max_seq_len": context,
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "max_preemptions": draw(st.sampled_from([0, 1, 3])),
        "prefix_wait_steps": draw(st.sampled_from([0, 2, 64])),
        "bypass_limit": draw(st.sampled_from([1, 3, 64])),
        "stall_steps": draw(st.sampled_from([1, 4])),
    }
    extra = draw(st.sampled_from([0, 0, 1, 3, 30]))
    budget, prefix_cache = draw(st.sampled_from([1, 5, 64])), draw(st.booleans())
    drafts, lies = draw(st.sampled_from([0, 0, 1, 2, 7])), draw(st.sampled_from([0, 1, 3, 8]))
    holds = draw(st.sampled_from([0, 0, 3, 6]))
    return World(least + extra, page_size, windows, config, budget, prefix_cache, drafts, lies, holds)


def request_of(plan: Plan, name: str) -> Request:
    return make_request(
        name, plan.prompt, priority=plan.priority, bulk=plan.bulk, eos_token_ids=plan.eos, **plan.params
    )


def expected_output(plan: Plan, choice: int, max_seq_len: int) -> list[int]:
    """What a choice says when nothing but its own rules ends it."""
    most = max_seq_len - len(plan.prompt)
    if plan.params["max_tokens"] is not None:
        most = min(most, plan.params["max_tokens"])
    out = null_tokens(plan.prompt, most, plan.params["seed"], choice, VOCAB)
    ends = set(plan.params["stop_token_ids"]) | set(() if plan.params["ignore_eos"] else plan.eos)
    for i, token in enumerate(out):
        if token in ends:
            return out[: i + 1]
    return out


class Run:
    """Drives one world and checks every event against what may be said."""

    def __init__(self, world: World, plans: list[Plan], **pool: int) -> None:
        self.world = world
        self.plans = {f"r{i}": plan for i, plan in enumerate(plans)}
        cache = {"enable_prefix_cache": world.prefix_cache, **pool}
        kv = make_kv(world.num_pages, world.page_size, world.windows, **cache)
        self.bench = Bench(kv, **world.config)
        self.scheduler, self.model = self.bench.scheduler, self.bench.model
        self.refused: set[str] = set()
        self.cancelling: set[str] = set()
        self.cancelled: set[str] = set()  # applied
        self.blamed: set[str] = set()  # whose failure was injected
        self.computed: dict[tuple[str, int], int] = {}
        self.held: set[tuple[str, int]] = set()  # left out of the next plan
        self.clock = 0

    def live_keys(self) -> list[tuple[str, int]]:
        found = [self.scheduler.get(name) for name in self.plans]
        return [branch.key for request in found if request for branch in request.branches]

    def play(self) -> Run:
        last = max((plan.arrival for plan in self.plans.values()), default=0)
        while self.clock <= last or self.scheduler.has_work:
            assert self.clock < MOST_STEPS, "no progress"
            self.tick()
        self.check_end()
        return self

    def inputs(self) -> tuple[list[Callable[[], None]], list[Callable[[], None]]]:
        """What arrives at this moment: before the plan, and between plan and commit."""
        early: list[Callable[[], None]] = []
        late: list[Callable[[], None]] = []
        for i, (name, plan) in enumerate(self.plans.items()):
            side = early if (i + self.clock) % 2 else late
            if plan.arrival == self.clock:
                side.append(lambda name=name, plan=plan: self.submit(name, plan))
            if plan.cancel_at is not None and plan.arrival + plan.cancel_at == self.clock:
                side.append(lambda name=name: self.cancel(name))
        return early, late

    def tick(self) -> None:
        early, late = self.inputs()
        for act in early:
            act()
        self.propose()
        decision = self.scheduler.plan(self.clock, self.world.budget)
        self.check_decision(decision)
        for act in late:
            act()
        asked = set(self.cancelling)
        try:
            result = self.model(decision) if decision.rows else StepResult(decision.step, ())
        except Exception as error:
            if isinstance(error, AssertionError):
                raise
            events = self.scheduler.rollback(error, self.clock)
        else:
            events = self.scheduler.commit(result, self.clock)
        if decision.rows:
            self.cancelled |= asked
        self.take(events)
        self.scheduler.audit()
        self.check_counters()
        self.clock += 1

    def propose(self) -> None:
        """Whoever runs may get drafts, some of them wrong; whoever lives may be left out of the plan."""
        running, world = self.scheduler.running(), self.world
        self.held = {key for key in self.live_keys() if crc32(f"{key} {self.clock}".encode()) % 8 < world.holds}
        self.scheduler.hold(sorted(self.held))
        self.scheduler.propose(lying_drafts(running, world.drafts, world.lies, self.clock, VOCAB))

    def submit(self, name: str, plan: Plan) -> None:
        try:
            self.scheduler.submit(request_of(plan, name))
        except InvalidInput as error:
            assert error.field in ("prompt_token_ids", "max_tokens")
            self.refused.add(name)

    def cancel(self, name: str) -> None:
        self.scheduler.cancel(name)
        self.scheduler.cancel(name)
        self.cancelling.add(name)

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            if event.kind is EventKind.TOKEN:
                assert event.request_id not in self.cancelled
                plan = self.plans[event.request_id]
                if plan.stop_after == event.index + 1:
                    for _ in range(2):
                        self.scheduler.stop(event.request_id, event.choice, event.index, "END")
            self.bench.events.append(event)

    def check_decision(self, decision) -> None:
        config = self.world.config
        assert decision.num_scheduled_tokens <= min(self.world.budget, config["max_batched_tokens"])
        assert decision.num_scheduled_sequences <= config["max_running_requests"]
        assert all(row.num_scheduled_tokens <= config["max_prefill_chunk"] for row in decision.rows)
        chosen = [(row.request_id, row.choice) for row in decision.rows]
        assert len(set(chosen)) == len(chosen) and not self.held & set(chosen)
        assert not self.cancelled & {row.request_id for row in decision.rows}

    def check_counters(self) -> None:
        for name in self.plans:
            request = self.scheduler.get(name)
            for branch in request.branches if request else ():
                assert branch.num_computed_tokens >= self.computed.get(branch.key, 0)
                self.computed[branch.key] = branch.num_computed_tokens
                assert branch.num_preemptions <= max(1, self.world.config["max_preemptions"])
                assert branch.num_resident_tokens <= branch.num_computed_tokens + branch.num_cached_tokens + 1

    def check_end(self) -> None:
        counts = self.scheduler.kv.audit()
        assert (counts.referenced, counts.ticketed) == (0, 0)
        self.scheduler.kv.flush_prefix_cache()
        assert self.scheduler.kv.audit().free == self.world.num_pages
        assert (self.scheduler.num_waiting, self.scheduler.num_running) == (0, 0)
        for name, plan in self.plans.items():
            if name in self.refused:
                assert not [event for event in self.bench.events if event.request_id == name]
            else:
                self.check_request(name, plan)

    def check_request(self, name: str, plan: Plan) -> None:
        events = [event for event in self.bench.events if event.request_id == name]
        assert [event.kind for event in events].count(EventKind.REQUEST_END) == 1
        assert events[-1].kind is EventKind.REQUEST_END
        usage = 0
        for choice in range(plan.params["n"]):
            usage += self.check_choice(plan, choice, [e for e in events[:-1] if e.choice == choice])
        assert events[-1].num_output_tokens == usage
        assert events[-1].num_prompt_tokens == len(plan.prompt)
        assert 0 <= events[-1].num_cached_tokens <= len(plan.prompt)

    def check_choice(self, plan: Plan, choice: int, events: list[TokenEvent]) -> int:
        *told, end = events
        assert end.kind is EventKind.CHOICE_END and all(event.kind is EventKind.TOKEN for event in told)
        assert [event.index for event in told] == list(range(len(told)))
        expected = expected_output(plan, choice, self.world.config["max_seq_len"])
        said = [event.token_id for event in told]
        assert said == expected[: len(said)]
        if end.stop_reason == "END":
            assert end.finish_reason == "stop" and end.num_output_tokens == plan.stop_after - 1 < len(told)
        else:
            assert end.num_output_tokens == len(told)
            self.check_reason(plan, end, said, expected)
        self.check_logprobs(plan, choice, told)
        self.check_prompt_logprobs(plan, events)
        return end.num_output_tokens

    def check_reason(self, plan: Plan, end: TokenEvent, said: list[int], expected: list[int]) -> None:
        if end.finish_reason in ("stop", "length"):
            assert said == expected
            last = said[-1] if said else None
            stopped = last in plan.params["stop_token_ids"]
            eos = last in plan.eos and not plan.params["ignore_eos"]
            assert (end.finish_reason == "stop") == (stopped or eos)
            assert end.stop_reason == (last if stopped and not eos else None)
        elif end.finish_reason == "error":
            assert end.error and end.request_id in self.blamed
        else:
            assert end.finish_reason == "cancelled" and plan.cancel_at is not None

    def check_logprobs(self, plan: Plan, choice: int, told: list[TokenEvent]) -> None:
        hashes = prefix_hashes([*plan.prompt, *(event.token_id for event in told)])
        for event in told:
            if plan.params["logprobs"] is None:
                assert event.logprobs is None
            else:
                before = hashes[len(plan.prompt) + event.index - 1]
                token, logprob = next_token(before, plan.params["seed"], choice, VOCAB)
                assert (event.logprobs.token_id, event.logprobs.logprob) == (token, logprob)

    def check_prompt_logprobs(self, plan: Plan, events: list[TokenEvent]) -> None:
        given = [event for event in events if event.prompt_logprobs is not None]
        if plan.params["prompt_logprobs"] is None:
            assert not given
        elif len(events) > 1 or events[-1].finish_reason in ("stop", "length"):
            assert given == events[:1]
            hashes = prefix_hashes(plan.prompt)
            wanted = [prompt_logprob(hashes[i - 1], plan.prompt[i]) for i in range(1, len(plan.prompt))]
            assert given[0].prompt_logprobs == (None, *wanted)
