"""Running a recording again: the same core, given the same inputs, must make the same decisions in the same order.

    input      arrive, ask_cancel, ask_stop, observed, drafts    -> the scheduler, as they came
               decision -> plan,  tokens -> commit,  rollback -> rollback,  each at the recorded time
    decision   what the scheduler records now is held against what it recorded then, event by event

The results of steps are those recorded (the scheduler alone is proved), or those of a model that runs again; then its
tokens are held against the recorded ones as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.batch import DrawnRows, RowResult, ScheduleDecision, ScheduledRow, StepResult, StepRows, TokenLogprobs
from octavo.core.errors import CorruptPages, InvalidInput, OctavoError, RowError
from octavo.core.event_table import BY_NAME, Role
from octavo.core.facts import kv_of, request_of, scheduler_config_of
from octavo.core.gang_move import facts_of_move, move_of
from octavo.core.scheduler import ContinuousBatchScheduler
from octavo.core.speculation import guess_of
from octavo.core.timeline import plain

__all__ = ["Difference", "Replayer", "recorded_result", "scheduler_for", "tokens_of"]

Executor = Callable[[ScheduleDecision], StepResult]
_MOVE = ("parents", "tokens", "endings")
_DRIVERS = ("decision", "ahead", "tokens", "rollback")


@dataclass(frozen=True)
class Difference:
    """The first event that did not come out as it was recorded."""

    number: int  # of the recorded event, in its epoch; that of the next one if it is ``None``
    step: int  # the last one begun
    recorded: Mapping[str, Any] | None  # None: the replay did more
    replayed: Mapping[str, Any] | None  # None: the replay did less

    def __str__(self) -> str:
        both = self.recorded is not None and self.replayed is not None
        if both and self.recorded["kind"] == self.replayed["kind"]:  # type: ignore[index]
            return f"event {self.number}, step {self.step}: {_changes(self.recorded, self.replayed)}"  # type: ignore[arg-type]
        return (
            f"event {self.number}, step {self.step}: recorded {_said(self.recorded)}, replayed {_said(self.replayed)}"
        )


def _said(event: Mapping[str, Any] | None) -> str:
    if event is None:
        return "nothing"
    values = ", ".join(f"{name} {value!r}" for name, value in event.items() if name not in ("kind", "t"))
    return f"{event['kind']} ({values})"[:400]


def _changes(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> str:
    names = [name for name in recorded if recorded[name] != replayed.get(name)]
    changes = [f"{name} was {recorded[name]!r}, is {replayed.get(name)!r}"[:400] for name in names]
    return f"{recorded['kind']}: " + "; ".join(changes)


def scheduler_for(
    facts: Mapping[str, Any], *, num_pages: int | None = None, **changes: Any
) -> ContinuousBatchScheduler:
    """A scheduler like the recorded one, over pages without content. ``changes`` are fields of its configuration.

    Raises ``InvalidInput`` for facts of another version, and for changes that are none.
    """
    config = scheduler_config_of(facts, **changes)
    kv = kv_of(facts, num_pages)
    return ContinuousBatchScheduler(kv, config, vocab_size=facts["vocab_size"], model=facts["model"])


class Replayer:
    """Feeds the events of one epoch, after its ``start``, to a fresh scheduler; `difference` is the first one found.

    ``executor`` runs the model again. ``on_step(decision, event)`` is told of each decision with rows as it is
    committed; ``event`` is the recorded ``tokens``.
    """

    def __init__(
        self,
        scheduler: ContinuousBatchScheduler,
        executor: Executor | None = None,
        on_step: Callable[[ScheduleDecision, Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.on_step = on_step
        self.difference: Difference | None = None
        self.num_steps = self.num_tokens = self.num_events = 0
        self._moves: list[Mapping[str, Any]] = []  # of gangs, with the results that come next
        self._decisions: deque[ScheduleDecision] = deque()  # in flight, or ready to run behind it
        self._number = 0
        self._recorded: deque[tuple[int, dict[str, Any]]] = deque()  # not yet held against anything
        self._replayed: deque[dict[str, Any]] = deque()
        scheduler.timeline.listen(self._hear)

    def _hear(self, kind: str, t: float, values: Mapping[str, Any]) -> None:
        if BY_NAME[kind].role is Role.DECISION:
            self._replayed.append({"kind": kind, "t": t, **plain(kind, values)})

    def feed(self, event: Mapping[str, Any]) -> bool:
        """Take the next event; False once a difference was found. Raises ``InvalidInput`` for what is no event."""
        if self.difference is not None:
            return False
        kind, self._number = event["kind"], event["n"]
        self.num_events += 1
        if BY_NAME[kind].role is Role.DECISION:
            values = {name: value for name, value in event.items() if name not in ("v", "process", "epoch", "n")}
            self._recorded.append((event["n"], values))
        action = getattr(self, f"_on_{kind}", None)
        if action is not None:
            action(event)
        if kind in _DRIVERS:
            self._compare()
            if kind in ("decision", "ahead") and self.difference is None:
                self._compare_rest()  # the decision is the last event of its plan
        return self.difference is None

    # ---- what each input does

    def _on_arrive(self, event: Mapping[str, Any]) -> None:
        try:
            self.scheduler.submit(request_of(event))
        except InvalidInput as error:
            self._differ(event, {"kind": "refuse", "request": event["request"], "reason": str(error)})

    def _on_ask_cancel(self, event: Mapping[str, Any]) -> None:
        self.scheduler.cancel(event["request"], event["reason"])

    def _on_ask_stop(self, event: Mapping[str, Any]) -> None:
        self.scheduler.stop(event["request"], event["choice"], event["tokens"], event["stop_reason"])

    def _on_observed(self, event: Mapping[str, Any]) -> None:
        self.scheduler.observe(event["seconds"])

    def _on_drafts(self, event: Mapping[str, Any]) -> None:
        self.scheduler.propose(dict(map(guess_of, event["drafts"])))

    def _on_held(self, event: Mapping[str, Any]) -> None:
        self.scheduler.hold((request, choice) for request, choice in event["held"])

    def _on_moved(self, event: Mapping[str, Any]) -> None:
        self.scheduler.observe_swap(event["tier"], event["pages"], event["seconds"])

    def _on_lost(self, event: Mapping[str, Any]) -> None:
        self.scheduler.lose_pages(event["pages"])

    def _on_flush(self, event: Mapping[str, Any]) -> None:
        self.scheduler.flush_cache()

    def _on_decision(self, event: Mapping[str, Any]) -> None:
        decision = self.scheduler.plan(event["t"], event["budget"])
        self._decisions = deque([decision])
        self.num_steps += bool(decision.rows)

    def _on_ahead(self, event: Mapping[str, Any]) -> None:
        self.num_steps += self.scheduler.plan_ahead(event["t"])

    def _on_gang(self, event: Mapping[str, Any]) -> None:
        self._moves.append(event)

    def _on_tokens(self, event: Mapping[str, Any]) -> None:
        self._compare()
        event, self._moves = {**event, "moves": self._moves}, []
        decision = self._in_flight(event)
        if decision is None:
            return
        result = recorded_result(self.scheduler, decision, event)
        if self.executor is not None and not event["errors"]:
            result = self.executor(decision)
            tokens, recorded = [list(row.token_ids) for row in result.rows], tokens_of(event)
            if tokens != recorded:
                self._differ(_row_of(decision, recorded, tokens), _row_of(decision, tokens, recorded))
                return
            told = [plain("gang", {"request": move.request_id, **facts_of_move(move)}) for move in result.moves]
            moves = [{name: move[name] for name in ("request", *_MOVE)} for move in event["moves"]]
            if told != moves:
                self._differ({"kind": "gang", "moves": moves}, {"kind": "gang", "moves": told})
                return
        self.num_tokens += sum(map(len, tokens_of(event)))
        if self.on_step is not None:
            self.on_step(decision, event)
        behind = self.scheduler.advance(result)
        if behind is not None:
            self._decisions.append(behind)
        self.scheduler.commit(result, event["t"])

    def _on_rollback(self, event: Mapping[str, Any]) -> None:
        self._compare()
        if self._in_flight(event) is not None:
            self.scheduler.rollback(_error_of(event), event["t"])

    def _on_end(self, event: Mapping[str, Any]) -> None:
        self._compare()
        if self.difference is None:
            self._compare_rest()

    def _in_flight(self, event: Mapping[str, Any]) -> ScheduleDecision | None:
        decision = self._decisions.popleft() if self._decisions else None
        if self.difference is not None:
            return None
        if decision is None or decision.step != event["step"] or not decision.rows:
            self._differ(event, None)
            return None
        return decision

    # ---- holding one against the other

    def _compare(self) -> None:
        while self._recorded and self._replayed and self.difference is None:
            (number, recorded), replayed = self._recorded.popleft(), self._replayed.popleft()
            if recorded != replayed:
                self._number = number
                self._differ(recorded, replayed)

    def _compare_rest(self) -> None:
        if self._recorded:
            self._number = self._recorded[0][0]
            self._differ(self._recorded[0][1], None)
        elif self._replayed:
            self._differ(None, self._replayed[0])

    def _differ(self, recorded: Mapping[str, Any] | None, replayed: Mapping[str, Any] | None) -> None:
        self.difference = Difference(self._number, self.scheduler.steps, recorded, replayed)


def tokens_of(event: Mapping[str, Any]) -> list[list[int]]:
    """The tokens of each row, as a ``tokens`` event has them."""
    rows = [[] if token is None else [token] for token in event["tokens"]]
    for at, rest in event.get("more") or ():
        rows[at] += rest
    return rows


def _row_of(decision: ScheduleDecision, mine: list[list[int]], other: list[list[int]]) -> dict[str, Any]:
    """The first row whose tokens differ, as an event to show."""
    at = next((i for i, pair in enumerate(zip(mine, other, strict=False)) if pair[0] != pair[1]), len(other))
    row = decision.rows[min(at, len(decision.rows) - 1)]
    where = {"request": row.request_id, "choice": row.choice, "output": row.output_index}
    ids, others = (rows[at] if at < len(rows) else [] for rows in (mine, other))
    if max(len(ids), len(others)) > 1:
        return {"kind": "tokens", "row": at, **where, "tokens": ids}
    return {"kind": "tokens", "row": at, **where, "token": ids[0] if ids else None}


def recorded_result(
    scheduler: ContinuousBatchScheduler, decision: ScheduleDecision, event: Mapping[str, Any]
) -> StepResult:
    """The result of a step as its ``tokens`` event has it, with the ``moves`` of gangs put in; logprobs and pooled
    states that were asked for are 0.
    """
    errors = dict(event["errors"] or ())
    tokens, drawn = tokens_of(event), event["drawn"]
    columns = isinstance(decision.rows, StepRows)
    rows = [
        RowResult(error=errors[i]) if i in errors else _row_result(scheduler, decision.rows[i], ids)
        for i, ids in enumerate(tokens)
        if i >= drawn or not columns
    ]
    requests = [(move, scheduler.get(move["request"])) for move in event["moves"]]
    moves = tuple(move_of(move, request.params) for move, request in requests if request is not None)
    if drawn and columns:
        return StepResult(decision.step, DrawnRows([token for (token,) in tokens[:drawn]], rows), moves)
    return StepResult(decision.step, rows, moves)


def _row_result(scheduler: ContinuousBatchScheduler, row: ScheduledRow, drawn: list[int]) -> RowResult:
    logprobs = tuple(TokenLogprobs(t, 0.0, 1) for t in drawn) if row.flags.logprobs >= 0 else ()
    prompt: tuple[TokenLogprobs, ...] = ()
    request = scheduler.get(row.request_id)
    if row.flags.prompt_logprobs >= 0 and request is not None:
        predicted = request.prompt_token_ids[row.start + 1 : row.start + 1 + row.num_scheduled_tokens]
        prompt = tuple(TokenLogprobs(t, 0.0, 1) for t in predicted)
    return RowResult(tuple(drawn), logprobs, prompt, bytes(4) if row.flags.hidden else b"")


def _error_of(event: Mapping[str, Any]) -> Exception:
    """An error with the recorded name, text and rows or host pages."""
    name, _, text = event["error"].partition(": ")
    if event.get("corrupt") is not None:
        return type(name, (CorruptPages,), {})(event["corrupt"], text)  # type: ignore[no-any-return]
    if event["rows"] is None:
        return type(name, (OctavoError,), {})(text)  # type: ignore[no-any-return]
    return type(name, (RowError,), {})(event["rows"], text)  # type: ignore[no-any-return]
