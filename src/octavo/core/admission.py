"""What is refused at the door: requests that could never be served as asked."""

from __future__ import annotations

import hashlib

from octavo.core.config import SchedulerConfig
from octavo.core.errors import InvalidInput
from octavo.core.kv import KVCacheManager
from octavo.core.request import Request, RequestState


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
    capacity = kv.capacity_tokens(config.max_prefill_chunk)
    if max_tokens is None:
        room = max(1, min(room, capacity + 1 - prompt))
    limit = prompt + (room if max_tokens is None else min(max_tokens, room))
    if max(prompt, limit - 1) > capacity:  # the last token sampled needs no K/V
        field, value = ("max_tokens", max_tokens) if prompt <= capacity else ("prompt_token_ids", f"{prompt} tokens")
        remedy = f"prompt and output need {max(prompt, limit - 1)} tokens of K/V and the pool holds {capacity}"
        raise InvalidInput(field, value, f"{remedy}: ask for fewer or configure more pages")
    return limit


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
