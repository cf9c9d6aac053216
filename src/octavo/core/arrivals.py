"""A request as an event of the timeline: all that a replay needs to submit it again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.core.request import Request

__all__ = ["facts_of", "request_of"]

_PLAIN = SamplingParams().to_dict()
_APART = ("request_id", "prompt_token_ids", "params", "branches", "version")


def facts_of(request: Request) -> dict[str, Any]:
    """What a request asks for besides its id and prompt, without what is usual, as JSON values."""
    saved = request.snapshot()
    facts = {name: value for name, value in saved.items() if name not in _APART and value not in ("", None, [])}
    params = {name: value for name, value in saved["params"].items() if value != _PLAIN[name]}
    if params:
        facts["params"] = params
    if any(branch.num_output_tokens or not branch.is_live for branch in request.branches):  # a restored one
        facts["branches"] = saved["branches"]
    return facts


def request_of(event: Mapping[str, Any]) -> Request:
    """The request of an ``arrive`` event. Raises ``InvalidInput`` for fields that are no request's."""
    facts = dict(event["facts"])
    params = SamplingParams.from_dict(facts.pop("params", {}))
    branches, seed = facts.pop("branches", None), facts.pop("seed", None)
    eos = facts.pop("eos_token_ids", ())
    try:
        request = Request(event["request"], event["prompt"], params, eos_token_ids=eos, **facts)
    except TypeError as error:
        raise InvalidInput("facts", sorted(facts), "these are not a request's fields") from error
    request.seed = seed
    return request if branches is None else Request.restore({**request.snapshot(), "branches": branches})
