"""One life of the engine process: the product's core over the null model, fed by messages, watched at every step."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from dst.drafts import Drafts
from dst.fairness import Fairness
from dst.faults import KINDS, Faults
from dst.inline import Escaped, InlineThread, Killed, escaping
from dst.invariants import Broken, audit_all, audit_idle, audit_touched
from dst.ledger import Ledger, token_limit
from dst.liar import Liar
from dst.model import SimModel
from dst.odd import OddKV, OddScheduler, PoisonedPages
from dst.scenario import VOCAB, Ask, Fault, keyed
from dst.shares import Shares
from octavo.core.batch import ScheduleDecision, StepResult
from octavo.core.errors import InvalidInput
from octavo.core.kv import KVGroup
from octavo.core.pages import Owner, OwnerKind
from octavo.core.params import SamplingParams
from octavo.core.request import FinishReason, Request
from octavo.core.timeline import Timeline
from octavo.engine.core import EngineCore
from octavo.engine.metrics import Metrics

if TYPE_CHECKING:
    from dst.simulator import Simulator

IDLE_US = 1_000
log = logging.getLogger("octavo")
log.addHandler(logging.NullHandler())  # bounds on gaps that no step can keep are odd, but legal
log.propagate = False


class EngineProcess:
    """From its start to its death. ``epoch`` is stamped on all that it says."""

    def __init__(self, simulator: Simulator, epoch: int) -> None:
        self.sim, self.epoch = simulator, epoch
        scenario = self.scenario = simulator.scenario
        groups = tuple(KVGroup((layer,), window=window) for layer, window in enumerate(scenario.windows))
        self.kv = OddKV(
            scenario.num_pages,
            scenario.page_size,
            groups,
            store=PoisonedPages(),
            enable_prefix_cache=scenario.prefix_cache,
            prefix_cache_max_pages=scenario.cache_bound,
            host_pages=scenario.host_pages if scenario.prefix_cache else 0,
            disk_pages=scenario.disk_pages if scenario.prefix_cache and scenario.host_pages else 0,
            switches=scenario.switches,
            grab_fails=scenario.grab_fails if epoch == 1 else None,
        )
        self.kv.salt = self.salt
        self.faults = Faults()
        self.ledger = Ledger(self.faults.blamed, scenario.pages_can_fail)
        self.model = SimModel(self.kv, self.faults, self._namespace, self.salt)
        self.model.width_of = self.faults.is_gang = self._width
        self.model.always_draws = bool(keyed(scenario.seed, 5) % 2)
        config = scenario.scheduler_config
        self.scheduler = OddScheduler(
            self.kv, config, vocab_size=VOCAB, timeline=Timeline(256), switches=scenario.switches
        )
        metrics = Metrics(max_batched_tokens=config.max_batched_tokens, page_size=scenario.page_size, page_bytes=1)
        self.core = EngineCore(self.scheduler, self.execute, metrics, clock=simulator.seconds)
        if scenario.overlap:
            self.core._thread = InlineThread(self)
        if scenario.drafts:
            self.core.speculator = Liar(self)
        self.fairness = Fairness(self.scheduler, scenario.pages_can_fail)
        self.drafts = Drafts(self.scheduler)
        self.shares: Shares | None = None
        if scenario.keeps_shares:
            has_gangs = any(ask.gang for ask in scenario.asks)
            longest = max(len(ask.prompt) * (ask.params["n"] if ask.gang else 1) for ask in scenario.asks)
            self.shares = Shares(self.scheduler, longest, has_gangs)
        self.dead = False
        self.turning = self.scheduled = False
        self.turns = self.idle_turns = 0
        self.num_leased_pages = 0
        self._leases = 0
        self._cancelling: dict[str, int] = {}  # request -> turn after which nothing of it may be left
        self._late: list[str] = []  # requests past their deadline after the last step
        self._touched: list[tuple[str, int]] = []  # branches of the last step

    def salt(self, namespace: str) -> int:
        """Where the null model's hashes begin."""
        return 0 if not namespace else keyed(*namespace.encode())

    def _namespace(self, request_id: str) -> str:
        return self.ledger.entries[request_id].ask.namespace

    def _width(self, request_id: str) -> int:
        ask = self.ledger.entries[request_id].ask
        return int(ask.params["n"]) if ask.gang else 0

    # -- messages

    def submit(self, ask: Ask, snapshot: dict[str, Any] | None) -> None:
        """A request arrives, new or resumed. One of an id that is known is a message that came twice."""
        limit = self._limit(ask)
        try:
            if snapshot is None:
                self.core.submit(self._request(ask), self.sim.wall())
            else:
                self.core.restore(json.loads(json.dumps(snapshot)), self.sim.wall())
        except InvalidInput as error:
            if error.field == "request_id":
                return
            if limit is not None and not hasattr(error, "retry_after"):
                raise Broken("I8", f"{ask.name} was refused: {error}") from error
            self.sim.send_refusal(self, ask)
            return
        if limit is None:
            raise Broken("I11", f"{ask.name} was accepted, and can never be served")
        seed = self.scheduler.get(ask.name).branches[0].seed
        self.ledger.open(ask, limit, seed, self.salt(ask.namespace), snapshot)
        self._on_state(ask, "inbox")
        self.poke()

    def _limit(self, ask: Ask) -> int | None:
        config, n = self.scheduler.config, ask.params["n"]
        if not ask.gang:
            return token_limit(ask, config.max_seq_len, self.kv.capacity_tokens(config.max_prefill_chunk))
        if n > min(config.max_running_requests, config.max_batched_tokens) or ask.params["max_tokens"] == 0:
            return None  # no step could draw from it
        return token_limit(ask, config.max_seq_len, self.kv.capacity_tokens(config.max_prefill_chunk, n))

    def _request(self, ask: Ask) -> Request:
        return Request(
            ask.name,
            ask.prompt,
            SamplingParams(**ask.params),
            tenant=ask.tenant,
            priority=ask.priority,
            deadline=None if ask.deadline is None else self.sim.wall() + ask.deadline / 1e6,
            arrival=self.sim.wall(),
            namespace=ask.namespace,
            eos_token_ids=ask.eos,
            gang=ask.gang,
        )

    def cancel(self, name: str, reason: str = "cancelled") -> None:
        """A cancel arrives, for whatever request there is or is not."""
        self.core.cancel(name, FinishReason(reason))
        entry = self.ledger.entries.get(name)
        if entry is not None:
            entry.cancels.add(reason)
            self._cancelling.setdefault(name, self.turns + 1)
        self.poke()

    def stop(self, name: str, choice: int, num_tokens: int) -> None:
        """The text layer has found a stop string."""
        entry = self.ledger.entries.get(name)
        if entry is not None:
            entry.stops[choice] = num_tokens
        self.core.stop(name, choice, num_tokens, "END")
        self.poke()

    def break_down(self, fault: Fault) -> None:
        """A fault of the script that happens inside the engine."""
        if fault.kind == "grab":
            self.kv.fail_next(fault.value)
        elif fault.kind == "step":
            self.faults.next.append((KINDS[fault.extra % len(KINDS)], fault.value))
        elif fault.kind == "poison":
            self.faults.poisoned.add(f"r{fault.value}")
        elif fault.kind == "corrupt":
            self.faults.corrupt.append(fault.value)
        elif fault.kind == "flush":
            self.kv.flush_prefix_cache()
        elif fault.kind == "shrink":
            self._shrink(fault)

    def _shrink(self, fault: Fault) -> None:
        """Somebody else holds pages for a while."""
        count = min(fault.value, self.kv.allocator.num_free)
        if not count:
            return
        self._leases += 1
        lease, holder = f"lease {self._leases}", Owner(OwnerKind.LEASE, "holder")
        pages = self.kv.allocator.take(count, holder)
        self.kv.allocator.lease(pages, lease, self.sim.wall() + fault.extra / 1e6)
        for page in pages:
            self.kv.allocator.drop_owner(page, holder)
        self.num_leased_pages += count
        self.sim.at(self.sim.now + fault.extra, self._give_back, lease, count)

    def _give_back(self, lease: str, count: int) -> None:
        if not self.dead:
            self.kv.allocator.end_lease(lease)
            self.num_leased_pages -= count

    # -- the loop

    def poke(self) -> None:
        """Something has come: have a turn soon, unless one is coming anyway."""
        if not (self.scheduled or self.turning or self.dead):
            self.scheduled = True
            wait = 0
            if "always_batch" in self.scenario.switches and len(self.scheduler._roster.requests) < 4:
                wait = 20_000
            self.sim.at(self.sim.now + wait, self.turn)

    def turn(self) -> None:
        """One step of the engine, during which other events go on."""
        self.scheduled = False
        if self.dead or not self.core.has_work:
            return
        self.turning = True
        self._touched = []
        now = self.sim.wall()
        try:
            events = self.core.step(now)
        except Killed:
            return
        except Escaped as escaped:
            raise escaped.args[0] from None
        self.turning = False
        self.turns += 1
        self._after(events, now)
        if self.core.has_work and not (self.dead or self.scheduled):
            self.scheduled = True
            self.sim.at(self.sim.now + (IDLE_US if self.core.idle else 0), self.turn)

    def execute(self, decision: ScheduleDecision) -> StepResult:
        """The model runs; meanwhile the world goes on."""
        self.look_at(decision)
        self.wait()
        return self.run_model(decision)

    def look_at(self, decision: ScheduleDecision) -> None:
        """A step begins: is anybody in it, or left out, who should not be?"""
        with escaping(self.faults):
            self._touched = [(row.request_id, row.choice) for row in decision.rows]
            self._check_budgets(decision)
            for name, turn in self._cancelling.items():
                if turn <= self.turns and not self.scenario.overlap and any(key[0] == name for key in self._touched):
                    raise Broken("I9", f"{name} is scheduled after its cancel")
            self.fairness.planned(decision)
            self.drafts.planned(decision)
            self._watch_states("in flight", decision)

    def _check_budgets(self, decision: ScheduleDecision) -> None:
        config, longest = self.scheduler.config, max((row.num_scheduled_tokens for row in decision.rows), default=0)
        if decision.num_scheduled_tokens > config.max_batched_tokens or longest > config.max_prefill_chunk:
            raise Broken("I11", f"a step of {decision.num_scheduled_tokens} tokens, {longest} of them in one row")
        if decision.num_scheduled_sequences > config.max_running_requests:
            raise Broken("I11", f"a step of {decision.num_scheduled_sequences} sequences")

    def wait(self) -> None:
        """What happens while a step runs."""
        with escaping(self.faults):
            self.sim.pump(self.sim.now + self.sim.step_time(self))
        if self.dead:
            raise Killed

    def run_model(self, decision: ScheduleDecision) -> StepResult:
        """The result of a step, or the error that the script has for it."""
        with escaping(self.faults):
            result = self.model(decision)
            self.fairness.executed()
            if self.shares is not None:
                self.shares.stepped(decision)
        return result

    def _after(self, events: Any, now: float) -> None:
        events = list(events)
        self.ledger.take(events)
        self.fairness.stepped(progress=bool(events or self.num_leased_pages) or not self.core.idle)
        self._check_cancels()
        self._check_deadlines(min(now, self.sim.wall()))  # the clock may have jumped back meanwhile
        self._check_metrics()
        if self.core._thread is None or self.core._thread.decision is None:
            self.drafts.rested()
        self._watch_states("", None)
        self.sim.deliver(self, events)
        every = self.scenario.snapshot_every
        if every and self.turns % every == 0 and self.sim.wants_snapshots:
            self.sim.send_snapshots(self, [request.snapshot() for request in self.scheduler._roster.requests.values()])

    def _check_cancels(self) -> None:
        """A cancel that a plan or commit has seen leaves nothing of its request."""
        for name in [name for name, turn in self._cancelling.items() if turn <= self.turns]:
            del self._cancelling[name]
            entry = self.ledger.entries[name]
            entry.gone = True
            if not entry.closed or self.scheduler.get(name) is not None:
                raise Broken("I9", f"{name} lives on after its cancel")
            if any(key[0] == name for key in self.kv._branches):
                raise Broken("I9", f"{name} keeps pages after its cancel")

    def _check_deadlines(self, now: float) -> None:
        """A plan leaves nothing of what is past its deadline; what came after it is ended by the next one."""
        requests = self.scheduler._roster.requests.values()
        late = [each.request_id for each in requests if each.deadline is not None and each.deadline <= now]
        for name in late:
            if name in self._late:
                raise Broken("I12", f"{name} lives past its deadline")
        self._late = late

    def _check_metrics(self) -> None:
        metrics = self.core.metrics
        if metrics.output_tokens != self.ledger.num_tokens:
            raise Broken("I23", f"{metrics.output_tokens} tokens counted, {self.ledger.num_tokens} told")

    # -- cancels that wait for a state

    def _watch_states(self, moment: str, decision: ScheduleDecision | None) -> None:
        for ask in list(self.sim.watched):
            request = self.scheduler._roster.requests.get(ask.name)
            state, choice = ask.cancel
            if moment == "in flight":
                if state == moment and any(row.request_id == ask.name for row in decision.rows):
                    self._fire(ask)
            elif request is not None:
                branch = request.branches[choice % len(request.branches)]
                if branch.state.value == state:
                    self._fire(ask)
        if decision is not None and "abort_at_end" in self.scenario.switches:
            self._abort_at_end(decision)

    def _on_state(self, ask: Ask, state: str) -> None:
        if ask.cancel is not None and ask.cancel[0] == state and ask in self.sim.watched:
            self._fire(ask)

    def _fire(self, ask: Ask) -> None:
        self.sim.watched.remove(ask)
        self.cancel(ask.name)

    def _abort_at_end(self, decision: ScheduleDecision) -> None:
        for row in decision.rows:
            entry = self.ledger.entries[row.request_id]
            last = max(1, len(entry.expected[row.choice].tokens)) - 1
            if row.flags.sample and row.output_index == last and keyed(self.scenario.seed, len(row.request_id)) % 3:
                self.cancel(row.request_id)

    # -- looking

    def maps(self) -> dict[str, Any]:
        """All that is keyed by request, and must be empty at idle."""
        scheduler, kv = self.scheduler, self.kv
        parts = getattr(scheduler.policy, "parts", [scheduler.policy])
        return {
            **{f"{part.name}'s tenants": getattr(part, "_live", ()) for part in parts},
            "requests": scheduler._roster.requests,
            "waiting": scheduler._roster.waiting,
            "running": scheduler._roster.running,
            "queued ids": scheduler._queued_ids,
            "inbox": scheduler._inbox,
            "isolation groups": scheduler._isolation._groups,
            "branches": kv._branches,
            "unsettled": kv.unsettled,
            "coming": kv._coming._coming,
            "copies": kv._copies._planned,
            "deferred": kv._deferred,
            "steps": kv._steps,
            "events": scheduler.events,
        }

    def audit(self, full: bool) -> None:
        """Check what the last event touched, or everything."""
        if self.dead:
            return
        audit_touched(self, self._touched)
        if full:
            audit_all(self)
        if not self.core.has_work and not self.turning:
            if full:
                audit_idle(self)
            for name, entry in self.ledger.entries.items():
                if not entry.closed:
                    raise Broken("I8", f"{name} has no end, and the engine has nothing to do")
