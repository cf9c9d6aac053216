"""Requests and their branches: identity, tokens, counters, and the one table of legal states.

waiting -> admitted -> prefilling -> decoding -> finished
                           |             |
                           +-> recompute | swapped -> admitted          every live state -> cancelled | failed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from octavo.core.batch import GangEnding, TokenLogprobs
from octavo.core.errors import InvalidInput
from octavo.core.params import MAX_COUNT, SamplingParams, check_float, check_ids, check_int

SNAPSHOT_VERSION = 1
MAX_ID_CHARACTERS = 256
MAX_PROMPT_TOKENS = 1 << 27


class RequestState(str, Enum):
    """Where a branch stands. A ``str``: plain strings work as keys and compare equal."""

    WAITING = "waiting"
    ADMITTED = "admitted"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    RECOMPUTE = "recompute"  # lost its pages; waits to compute them again
    SWAPPED = "swapped"  # its pages are in another tier; waits to bring them back
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class FinishReason(str, Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    REJECTED = "rejected"
    ERROR = "error"
    UNKNOWN = "unknown"


class WaitingReason(str, Enum):
    """What a branch that waits is blocked on."""

    NONE = ""  # its turn has not come
    GRAMMAR = "grammar"
    ADAPTER = "adapter"
    KV = "kv"
    PREFIX = "prefix"


_S = RequestState
TERMINAL = frozenset({_S.FINISHED, _S.CANCELLED, _S.FAILED})
QUEUED = frozenset({_S.WAITING, _S.RECOMPUTE, _S.SWAPPED})
RUNNING = frozenset({_S.ADMITTED, _S.PREFILLING, _S.DECODING})
_ABANDON = frozenset({_S.CANCELLED, _S.FAILED})
_PREEMPT = frozenset({_S.RECOMPUTE, _S.SWAPPED})
ALLOWED: dict[RequestState, frozenset[RequestState]] = {
    _S.WAITING: _ABANDON | {_S.ADMITTED},
    _S.ADMITTED: _ABANDON | {_S.PREFILLING},
    _S.PREFILLING: _ABANDON | _PREEMPT | {_S.DECODING},
    _S.DECODING: _ABANDON | _PREEMPT | {_S.FINISHED},
    _S.RECOMPUTE: _ABANDON | {_S.ADMITTED},
    _S.SWAPPED: _ABANDON | {_S.ADMITTED},
}
_FORWARD = (_S.ADMITTED, _S.PREFILLING, _S.DECODING, _S.FINISHED)


def apply_transition(state: Any, target: Any, kv_blocks: int) -> tuple[Any, int]:
    """The new state and its KV block count: 0 in a terminal state and in recompute, else unchanged.

    Raises ``InvalidInput`` (a ``ValueError``) for an edge that is not in ``ALLOWED`` or a negative count.
    """
    if not isinstance(kv_blocks, int) or kv_blocks < 0:
        raise InvalidInput("kv_blocks", kv_blocks, "must be a non-negative integer")
    if target not in ALLOWED.get(state, frozenset()):
        raise InvalidInput("target", str(target), f"illegal transition: {state} -> {target}")
    return target, 0 if target in TERMINAL or target == _S.RECOMPUTE else kv_blocks


class Branch:
    """One choice of a request: its tokens, its counters, its place in the batch. This is what is scheduled.

    ``num_computed_tokens`` is committed history and never falls; ``num_resident_tokens`` is what has K/V now.
    """

    __slots__ = (
        *("request", "choice", "key", "params", "num_prompt_tokens", "is_plain", "end_ids", "token_limit"),
        *("state", "finish_reason", "stop_reason", "error", "token_ids", "logprobs", "prompt_logprobs"),
        *("num_computed_tokens", "num_resident_tokens", "num_cached_tokens", "num_delivered_tokens", "kv_blocks"),
        *("slot", "waiting_reason", "arrival_index", "admissions", "last_step", "rank", "bypassed", "prefix_waits"),
        *("num_preemptions", "use_prefix", "needs_init", "prompt_logprobs_delivered", "hidden"),
        "mu",
    )

    def __init__(self, request: Request, choice: int) -> None:
        self.request, self.choice = request, choice
        self.key: tuple[str, int] = (request.request_id, choice)
        self.params: SamplingParams = request.params
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.is_plain = not (self.params.asks_more or request.gang)  # its tokens are all that is asked for
        self.end_ids = request.end_ids
        self.token_limit = MAX_COUNT  # the request's, set at submit
        self.state = RequestState.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.token_ids = list(request.prompt_token_ids)  # all known ones, prompt then output: change it here only
        self.logprobs: list[TokenLogprobs] = []  # one for each output token, if asked for
        self.prompt_logprobs: list[TokenLogprobs] = []  # of prompt tokens 1, 2, ...
        self.num_computed_tokens = 0
        self.num_resident_tokens = 0
        self.num_cached_tokens = 0  # of the prompt, when it was first admitted
        self.num_delivered_tokens = 0  # output tokens that an event told of
        self.kv_blocks = self.admissions = 0
        self.slot: int | None = None
        self.waiting_reason = WaitingReason.NONE
        self.arrival_index = 0  # order of submission, given by the scheduler
        self.last_step = 0  # last step that scheduled it, or that admitted it to a slot
        self.rank: tuple[float, ...] = ()  # among those that run, from the first admission on
        self.bypassed = 0  # later arrivals admitted while it waited
        self.prefix_waits = self.num_preemptions = 0
        self.use_prefix = self.needs_init = True  # init: its slot does not hold its state yet
        self.prompt_logprobs_delivered = False
        self.mu = self.params.mirostat_start  # what mirostat allows the next token
        self.hidden = b""  # its pooled state, once it is there: float32, little-endian

    def __repr__(self) -> str:
        return f"<Branch {self.key} {self.state.value} {self.num_resident_tokens}/{self.num_tokens}>"

    @property
    def seed(self) -> int:
        """The resolved seed as 64 bits; the same for all choices, which differ by their index."""
        return (self.request.seed or 0) & (2**64 - 1)

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_tokens(self) -> int:
        """All known tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Known tokens without K/V: what the scheduler hands out until it is 0."""
        return len(self.token_ids) - self.num_resident_tokens

    @property
    def is_live(self) -> bool:
        """False once the choice has ended."""
        return self.state not in TERMINAL

    @property
    def scorer(self) -> Branch:
        """Who gathers the logprobs of the prompt for this choice: the first one, unless it has ended without them."""
        first = self.request.branches[0]
        return first if first.is_live or len(first.prompt_logprobs) == self.num_prompt_tokens - 1 else self

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True while logprobs of prompt tokens are asked for, are this choice's to gather, and not all gathered."""
        if self.params.prompt_logprobs is None or len(self.prompt_logprobs) >= self.num_prompt_tokens - 1:
            return False
        return self.scorer is self

    @property
    def awaits_scores(self) -> bool:
        """True while another choice gathers the logprobs of the prompt, and so computes it: this one waits."""
        return self.params.prompt_logprobs is not None and self.scorer.wants_prompt_logprobs and self.scorer is not self

    @property
    def takes_prefix(self) -> bool:
        """False while none of its tokens may come from the cache."""
        return self.use_prefix and not self.wants_prompt_logprobs and not self.params.pools_all

    def transition(self, target: RequestState) -> None:
        """Take one legal edge; a terminal state and recompute give up K/V, slot and waiting reason.

        Raises ``InvalidInput`` for an illegal edge.
        """
        self.state, self.kv_blocks = apply_transition(self.state, target, self.kv_blocks)
        if self.state in TERMINAL or self.state in _PREEMPT:
            self.num_resident_tokens = 0
            self.slot = None
            self.needs_init = True
        if self.state not in QUEUED:
            self.waiting_reason = WaitingReason.NONE

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Walk the remaining legal edges to ``finished``. Raises ``InvalidInput`` if the choice has ended."""
        if not self.is_live:
            raise InvalidInput("state", self.state.value, "a terminal state cannot be left")
        for target in _FORWARD:
            if target in ALLOWED[self.state]:
                self.transition(target)
        self.finish_reason, self.stop_reason = reason, stop_reason

    def abandon(self, target: RequestState, reason: FinishReason, error: str | None = None) -> None:
        """End as ``cancelled`` or ``failed``. Raises ``InvalidInput`` if the choice has ended."""
        self.transition(target)
        self.finish_reason, self.error = reason, error

    def append(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Commit one sampled token."""
        self.token_ids.append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.surprised_by(logprobs.logprob)

    def surprised_by(self, logprob: float) -> None:
        """Move what mirostat allows by the last token's logprob."""
        if self.params.mirostat:
            self.mu = self.params.mirostat_after(self.mu, logprob)

    def advance(self, token_id: int) -> int:
        """Commit one sampled token after a step that computed all tokens before it; how many these are."""
        resident = len(self.token_ids)
        self.token_ids.append(token_id)
        self.num_resident_tokens = resident
        if self.num_computed_tokens < resident:
            self.num_computed_tokens = resident
        self.num_delivered_tokens = resident + 1 - self.num_prompt_tokens
        return resident

    def truncate_at(self, num_output_tokens: int) -> None:
        """Keep the first ``num_output_tokens`` output tokens. Idempotent."""
        del self.token_ids[self.num_prompt_tokens + num_output_tokens :]
        del self.logprobs[num_output_tokens:]
        self.num_resident_tokens = min(self.num_resident_tokens, self.num_tokens)
        self.num_delivered_tokens = min(self.num_delivered_tokens, self.num_output_tokens)

    def reserve_blocks(self, count: int) -> None:
        """Record ``count`` more KV blocks. Raises ``InvalidInput`` outside admitted, prefilling and decoding."""
        if self.state not in RUNNING:
            raise InvalidInput("state", self.state.value, "request does not own runtime resources")
        if isinstance(count, bool) or not isinstance(count, int) or count <= 0:
            raise InvalidInput("count", count, "reservation count must be a positive integer")
        self.kv_blocks += count

    def _snapshot(self) -> dict[str, Any]:
        return {
            "state": self.state.value,
            "output_token_ids": self.output_token_ids,
            "logprobs": [entry.to_json() for entry in self.logprobs],
            "prompt_logprobs": [entry.to_json() for entry in self.prompt_logprobs],
            "num_computed_tokens": self.num_computed_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_delivered_tokens": self.num_delivered_tokens,
            "admissions": self.admissions,
            "num_preemptions": self.num_preemptions,
            "prompt_logprobs_delivered": self.prompt_logprobs_delivered,
            "finish_reason": None if self.finish_reason is None else self.finish_reason.value,
            "stop_reason": self.stop_reason,
            "error": self.error,
            **({"mu": self.mu} if self.params.mirostat else {}),
        }

    def _restore(self, saved: Mapping[str, Any]) -> None:
        state = RequestState(saved["state"])
        self.state = state if state in TERMINAL else RequestState.WAITING
        self.token_ids += check_ids("output_token_ids", saved["output_token_ids"], MAX_COUNT)
        self.logprobs = [TokenLogprobs.from_json(entry) for entry in saved["logprobs"] if entry is not None]
        self.prompt_logprobs = [TokenLogprobs.from_json(entry) for entry in saved["prompt_logprobs"]]
        for name in ("num_computed_tokens", "num_cached_tokens", "num_delivered_tokens", "admissions"):
            setattr(self, name, check_int(name, saved[name], 0, MAX_COUNT))
        self.num_preemptions = check_int("num_preemptions", saved["num_preemptions"], 0, MAX_COUNT)
        self.prompt_logprobs_delivered = bool(saved["prompt_logprobs_delivered"])
        self.mu = check_float("mu", saved.get("mu", self.mu), -1e18, 1e18)
        reason = saved["finish_reason"]
        self.finish_reason = None if reason is None else FinishReason(reason)
        self.stop_reason, self.error = saved["stop_reason"], saved["error"]


class Request:
    """One request: identity, limits, and its ``params.num_branches`` branches.

    LOWER ``priority`` numbers are served first. Times are the caller's, in seconds. See `core.gang` and `core.bulk`.
    Raises ``InvalidInput`` for an id that is no string of 1 to 256 characters, or token ids that are no integers >= 0.
    An empty prompt is refused by the scheduler, at submit.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int] = (),
        params: SamplingParams | None = None,
        *,
        tenant: str = "",
        priority: int = 0,
        deadline: float | None = None,
        arrival: float = 0.0,
        model: str = "",
        adapter: str = "",
        namespace: str = "",
        eos_token_ids: Iterable[int] = (),
        gang: bool = False,
        bulk: bool = False,
    ) -> None:
        if not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_ID_CHARACTERS:
            raise InvalidInput("request_id", request_id, f"give a string of 1 to {MAX_ID_CHARACTERS} characters")
        if params is not None and not isinstance(params, SamplingParams):
            raise InvalidInput("params", params, "give a SamplingParams")
        self.request_id = request_id
        self.prompt_token_ids = check_ids("prompt_token_ids", prompt_token_ids, MAX_PROMPT_TOKENS)
        self.params = SamplingParams() if params is None else params.looked_up()
        self.tenant, self.model, self.adapter, self.namespace = tenant, model, adapter, namespace
        self.priority = check_int("priority", priority, -(2**31), 2**31 - 1)
        self.deadline = None if deadline is None else check_float("deadline", deadline, -1e18, 1e18)
        self.arrival = check_float("arrival", arrival, -1e18, 1e18)
        self.eos_token_ids = check_ids("eos_token_ids", eos_token_ids, 1024)
        self.gang, self.bulk = gang or self.params.use_beam_search, bulk
        self.ended: tuple[GangEnding, ...] = ()  # what the driver of a gang keeps of the past
        own_ends = () if self.params.ignore_eos else self.eos_token_ids
        self.end_ids = frozenset((*own_ends, *self.params.stop_token_ids))  # may end a choice, from min_tokens on
        self.seed = self.params.seed  # None until the scheduler draws one
        self.token_limit = MAX_COUNT  # prompt and output together; the scheduler sets it at submit
        self.branches = [Branch(self, choice) for choice in range(self.params.num_branches)]

    def __repr__(self) -> str:
        return f"<Request {self.request_id} {self.state.value} prompt={len(self.prompt_token_ids)}>"

    @property
    def live_branches(self) -> list[Branch]:
        """Branches that have not ended, by choice."""
        return [branch for branch in self.branches if branch.is_live]

    @property
    def state(self) -> RequestState:
        """The state of the branches together: the furthest live one's, else failed, cancelled or finished."""
        states = {branch.state for branch in self.branches}
        order = (_S.DECODING, _S.PREFILLING, _S.ADMITTED, _S.SWAPPED, _S.RECOMPUTE, _S.WAITING, _S.FAILED, _S.CANCELLED)
        return next((state for state in order if state in states), _S.FINISHED)

    @property
    def kv_blocks(self) -> int:
        """KV blocks that the branches name."""
        return sum(branch.kv_blocks for branch in self.branches)

    @property
    def computed_tokens(self) -> int:
        """Committed history of all branches; it survives the end."""
        return sum(branch.num_computed_tokens for branch in self.branches)

    @computed_tokens.setter
    def computed_tokens(self, count: int) -> None:
        if len(self.branches) != 1:
            raise InvalidInput("computed_tokens", count, "set num_computed_tokens of each branch")
        lowest = self.branches[0].num_computed_tokens
        self.branches[0].num_computed_tokens = check_int("computed_tokens", count, lowest, MAX_COUNT)

    def transition(self, target: RequestState) -> None:
        """Take one legal edge with all live branches. Raises ``InvalidInput`` if there is none or it is illegal."""
        live = self.live_branches
        if not live:
            raise InvalidInput("target", str(target), f"illegal transition: {self.state} -> {target}")
        for branch in live:
            apply_transition(branch.state, target, branch.kv_blocks)
        for branch in live:
            branch.transition(target)

    def reserve_blocks(self, count: int) -> None:
        """Record ``count`` more KV blocks for every live branch. Raises ``InvalidInput`` if it may own none."""
        if not self.live_branches:
            raise InvalidInput("state", self.state.value, "request does not own runtime resources")
        for branch in self.live_branches:
            branch.reserve_blocks(count)

    def snapshot(self) -> dict[str, Any]:
        """The whole request as JSON values: enough to go on with the same bytes elsewhere."""
        return {
            "version": SNAPSHOT_VERSION,
            "request_id": self.request_id,
            "prompt_token_ids": list(self.prompt_token_ids),
            "params": self.params.to_dict(),
            **{name: getattr(self, name) for name in _IDENTITY},
            "eos_token_ids": list(self.eos_token_ids),
            "seed": self.seed,
            **{name: True for name in ("gang", "bulk") if getattr(self, name)},
            **({"ended": [ending.to_json() for ending in self.ended]} if self.ended else {}),
            "branches": [branch._snapshot() for branch in self.branches],
        }

    @classmethod
    def restore(cls, saved: Mapping[str, Any]) -> Request:
        """The request of a ``snapshot``: live branches wait again and own no K/V; submit it to go on.

        Raises ``InvalidInput`` for a snapshot of another version or with a field missing or wrong.
        """
        if saved.get("version") != SNAPSHOT_VERSION:
            raise InvalidInput("version", saved.get("version"), f"give a snapshot of version {SNAPSHOT_VERSION}")
        try:
            request = cls(
                saved["request_id"],
                saved["prompt_token_ids"],
                SamplingParams.from_dict(saved["params"]),
                eos_token_ids=saved["eos_token_ids"],
                gang=bool(saved.get("gang", False)),
                **{name: saved[name] for name in _IDENTITY},
            )
            request.seed, request.bulk = saved["seed"], bool(saved.get("bulk", False))
            request.ended = tuple(map(GangEnding.from_json, saved.get("ended", ())))
            for branch, part in zip(request.branches, saved["branches"], strict=True):
                branch._restore(part)
        except InvalidInput:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidInput("snapshot", str(error), "give what Request.snapshot returned") from error
        return request


_IDENTITY = ("tenant", "priority", "deadline", "arrival", "model", "adapter", "namespace")
