"""What is refused at the door: requests that could never be served as asked (`check_request`), and those for which
there is no room now (`Door`), with the time after which there may be."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.config import SchedulerConfig
from octavo.core.errors import InvalidInput
from octavo.core.forecast import Ahead, FirstTokenForecast, Forecast, Pace
from octavo.core.params import MAX_END_IDS, SamplingParams
from octavo.core.request import Request, RequestState

if TYPE_CHECKING:
    from octavo.core.kv import KVCacheManager

LONGEST_RETRY = 600  # seconds
_TOKEN_BYTES = 100  # of host memory for a token known or drawn: the number, its text, its event
_ENTRY_BYTES = 150  # for one logprob of one token


def check_request(request: Request, config: SchedulerConfig, kv: KVCacheManager, vocab_size: int | None) -> int:
    """The request's token limit (prompt and output together). Raises ``InvalidInput`` naming field, value and remedy:

    empty prompt; a request in service or ended; a prompt that leaves no room in ``max_seq_len``; ids outside the
    vocabulary; more K/V than the whole pool holds. ``max_tokens=None`` is bounded by the pool as well.
    """
    if not isinstance(request, Request):
        raise InvalidInput("request", request, "give a Request")
    if not request.prompt_token_ids:
        raise InvalidInput("prompt_token_ids", [], "give at least one token")
    live = request.live_branches
    if not live or any(branch.state is not RequestState.WAITING for branch in live):
        raise InvalidInput("request", request.state.value, "give a new request or a restored one")
    check_vocabulary(request, vocab_size)
    check_choice(request, vocab_size)
    if request.gang:
        check_gang(request, config)
    limit = token_limit(request, config, kv)
    if any(branch.num_tokens > limit - (limit > branch.num_prompt_tokens) for branch in live):
        raise InvalidInput("output_token_ids", f"{limit} tokens or more", "the request has reached its limit already")
    return limit


def token_limit(request: Request, config: SchedulerConfig, kv: KVCacheManager) -> int:
    """Tokens, prompt and output together, at which a choice ends. Raises ``InvalidInput`` if they cannot fit."""
    prompt, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
    room = config.max_seq_len - prompt
    if room < (0 if max_tokens == 0 else 1):
        remedy = f"give at most {config.max_seq_len - (max_tokens != 0)} tokens (max_seq_len is {config.max_seq_len})"
        raise InvalidInput("prompt_token_ids", f"{prompt} tokens", remedy)
    capacity = kv.capacity_tokens(config.max_prefill_chunk, len(request.branches) if request.gang else 1)
    if max_tokens is None:
        room = max(1, min(room, capacity + 1 - prompt))
    limit = prompt + (room if max_tokens is None else min(max_tokens, room))
    if max(prompt, limit - 1) > capacity:  # the last token sampled needs no K/V
        field, value = ("max_tokens", max_tokens) if prompt <= capacity else ("prompt_token_ids", f"{prompt} tokens")
        remedy = f"prompt and output need {max(prompt, limit - 1)} tokens of K/V and the pool holds {capacity}"
        raise InvalidInput(field, value, f"{remedy}: ask for fewer or configure more pages")
    return limit


def check_gang(request: Request, config: SchedulerConfig) -> None:
    """Raise ``InvalidInput`` for a gang that no step could draw from, or that asks for what gangs do not have."""
    most = min(config.max_running_requests, config.max_batched_tokens)
    width = len(request.branches)
    if width > most:
        raise InvalidInput("n", width, f"a gang is drawn in one step, which holds {most} sequences")
    if request.params.use_beam_search and len(request.end_ids) > MAX_END_IDS:
        raise InvalidInput("stop_token_ids", f"{len(request.end_ids)} ids", f"beams end at {MAX_END_IDS} at most")
    if len({(branch.is_live, branch.num_output_tokens) for branch in request.branches}) != 1:
        raise InvalidInput("branches", request.state.value, "a gang whose members live, with as many tokens each")
    if request.params.max_tokens == 0 or request.params.prompt_logprobs is not None:
        field = "prompt_logprobs" if request.params.max_tokens else "max_tokens"
        raise InvalidInput(field, getattr(request.params, field), "a gang draws, and has no logprobs of its prompt")


def check_vocabulary(request: Request, vocab_size: int | None) -> None:
    """Raise ``InvalidInput`` for a token id outside [0, vocab_size) in the prompt or the parameters."""
    if vocab_size is None:
        return
    params = request.params
    lists = {
        "prompt_token_ids": request.prompt_token_ids,
        "logit_bias": tuple(params.logit_bias),
        "allowed_token_ids": params.allowed_token_ids or (),
        "banned_token_ids": params.banned_token_ids,
        "stop_token_ids": params.stop_token_ids,
        "logprob_token_ids": params.logprob_token_ids,
    }
    for name, ids in lists.items():
        if ids and max(ids) >= vocab_size:
            position = next(i for i, token in enumerate(ids) if token >= vocab_size)
            raise InvalidInput(f"{name}[{position}]", ids[position], f"give token ids from 0 to {vocab_size - 1}")


def check_choice(request: Request, vocab_size: int | None) -> None:
    """Raise ``InvalidInput`` if a step would have no token to sample: all are banned, or end the choice too early."""
    params = request.params
    banned = set(params.banned_token_ids)
    eos = () if params.ignore_eos else request.eos_token_ids
    ends = {*params.stop_token_ids, *eos} if params.min_tokens else set()
    if params.allowed_token_ids:
        if banned.union(ends).issuperset(params.allowed_token_ids):
            remedy = "allow a token that is neither banned nor, below min_tokens, an end of the choice"
            raise InvalidInput("allowed_token_ids", f"{len(params.allowed_token_ids)} ids", remedy)
    elif vocab_size is not None and len(banned | ends) >= vocab_size:
        raise InvalidInput("banned_token_ids", f"{len(banned)} ids", "leave a token that is not banned")


def default_seed(request_id: str) -> int:
    """A seed for a request without one: 64 bits that depend on its id alone, so that a run can be repeated."""
    return int.from_bytes(hashlib.sha256(request_id.encode("utf-8", "surrogatepass")).digest()[:8], "little")


@dataclass(frozen=True)
class Limits:
    """How much may be inside at once; 0: no limit. Waiting is from arrival to first token."""

    sequences: int = 0  # that run or wait
    waiting: int = 0  # sequences
    queued_tokens: int = 0  # prompt tokens that wait, counted for each choice
    tenant_waiting: int = 0  # sequences of one tenant
    tenant_tokens: int = 0
    held_bytes: int = 0  # of host memory, for what requests inside may come to hold
    first_token_s: float = 0.0  # a request that is foretold to wait longer is refused


@dataclass(frozen=True)
class Ask:
    """What a request takes: its choices apart, its prompts in every one of them."""

    tenant: str
    sequences: int
    tokens: int = 0
    held_bytes: int = 0
    within_s: float = 0.0  # it is of no use without a first token by then; 0: whenever


@dataclass(frozen=True)
class Refusal:
    """Why a request is turned away now, and the whole seconds after which it may come again."""

    code: str
    message: str
    retry_after: int


def held_bytes(prompt_tokens: int, params: SamplingParams, room: int) -> int:
    """Host memory that a request may come to hold: tokens and logprobs of all its choices, at most.

    ``room`` is what the context leaves for output.
    """
    output = room if params.max_tokens is None else min(params.max_tokens, room)
    entries = 0
    if params.draws_logprobs:
        entries += output * (1 + (params.logprobs or 0) + len(params.logprob_token_ids))
    kept = params.num_branches * (1 + params.use_beam_search)  # as many beams that have ended
    if params.prompt_logprobs is not None:
        entries += prompt_tokens * (1 + params.prompt_logprobs)
    return kept * (_TOKEN_BYTES * (prompt_tokens + output) + _ENTRY_BYTES * entries)


@dataclass
class Guest:
    """A request inside."""

    ask: Ask
    arrived: float
    step: int = 0  # that the engine had reached then
    forecast: Forecast | None = None
    first_token: float | None = None
    first_step: int = 0


class Door:
    """Counts who is inside, lets in what fits, and tells the rest when to come again. Time comes in as an argument."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.forecasts = FirstTokenForecast()
        self.sequences = self.waiting = self.queued_tokens = self.held_bytes = 0
        self.tenants: dict[str, list[int]] = {}  # waiting sequences and tokens of each that has any

    def enter(self, ask: Ask, pace: Pace, now: float) -> Guest | Refusal:
        """Let a request in, or say why not."""
        forecast = self._forecast(ask, pace)
        refusal = self._too_many(ask, pace) or self._too_late(ask, forecast)
        if refusal is not None:
            return refusal
        self.sequences += ask.sequences
        self.held_bytes += ask.held_bytes
        self._wait(ask, 1)
        return Guest(ask, now, pace.steps, forecast)

    def refusal(self, ask: Ask, pace: Pace) -> Refusal | None:
        """What `enter` would say of a request, if it would say no."""
        return self._too_many(ask, pace) or self._too_late(ask, self._forecast(ask, pace))

    def _forecast(self, ask: Ask, pace: Pace) -> Forecast:
        ahead = Ahead(self.waiting, self.queued_tokens, self.sequences - self.waiting)
        return self.forecasts.forecast(ahead, ask.sequences, ask.tokens, pace)

    def first_token(self, guest: Guest, steps: int, now: float) -> float | None:
        """A request has its first token, after ``steps`` of the engine: it waits no more. Its wait, the first time."""
        if guest.first_token is not None:
            return None
        guest.first_token, guest.first_step = now, steps
        self._wait(guest.ask, -1)
        if guest.forecast is not None:
            self.forecasts.learn(guest.forecast, now - guest.arrived, steps - guest.step)
        return now - guest.arrived

    def leave(self, guest: Guest, steps: int) -> None:
        """A request has ended, well or not, after ``steps`` of the engine."""
        if guest.first_token is None:
            self._wait(guest.ask, -1)
        else:
            self.forecasts.departed(steps - guest.first_step)
        self.sequences -= guest.ask.sequences
        self.held_bytes -= guest.ask.held_bytes

    def _wait(self, ask: Ask, sign: int) -> None:
        self.waiting += sign * ask.sequences
        self.queued_tokens += sign * ask.tokens
        held = self.tenants.setdefault(ask.tenant, [0, 0])
        held[0] += sign * ask.sequences
        held[1] += sign * ask.tokens
        if held[0] == 0:
            del self.tenants[ask.tenant]

    def _too_many(self, ask: Ask, pace: Pace) -> Refusal | None:
        """The first limit that a request would exceed. One that is larger than a limit by itself may run alone."""
        limits, (sequences, tokens) = self.limits, self.tenants.get(ask.tenant, (0, 0))
        checks = (
            ("queue_full", "sequences run or wait", self.sequences, ask.sequences, limits.sequences),
            ("queue_full", "sequences wait", self.waiting, ask.sequences, limits.waiting),
            ("queue_full", "prompt tokens wait", self.queued_tokens, ask.tokens, limits.queued_tokens),
            ("tenant_queue_full", "of your sequences wait", sequences, ask.sequences, limits.tenant_waiting),
            ("tenant_queue_full", "of your prompt tokens wait", tokens, ask.tokens, limits.tenant_tokens),
            ("memory_full", "bytes are held for requests", self.held_bytes, ask.held_bytes, limits.held_bytes),
        )
        for code, what, inside, asked, limit in checks:
            if limit and inside and inside + asked > limit:
                seconds = self._until_room(inside + asked - limit, inside, pace)
                message = f"The server is full: {inside} {what}, and {limit} may; try again in {seconds} s."
                return Refusal(code, message, seconds)
        return None

    def _until_room(self, excess: int, inside: int, pace: Pace) -> int:
        """Seconds until so much less is inside, if all of it goes at the rate at which sequences do."""
        rate = self.forecasts.departure_rate(self.sequences - self.waiting, pace)
        count = excess / inside * max(self.sequences, 1)
        return _whole(count / rate if rate > 0.0 else 1.0)

    def _too_late(self, ask: Ask, forecast: Forecast) -> Refusal | None:
        """Nobody is refused by a forecast while nobody is inside: else a wrong one would never be corrected."""
        most = min(limit for limit in (self.limits.first_token_s, ask.within_s, math.inf) if limit)
        if most == math.inf or not self.sequences or forecast.seconds <= most:
            return None
        seconds = _whole(forecast.seconds - most)
        message = (
            f"The server is busy: the first token would come in {forecast.seconds:.1f} s, and {most:g} s is the most; "
            f"try again in {seconds} s."
        )
        return Refusal("first_token_late", message, seconds)


def _whole(seconds: float) -> int:
    return max(1, min(LONGEST_RETRY, math.ceil(seconds)))
