"""What a recording must know of a scheduler and of a request to make them again, as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from octavo.core.config import SchedulerConfig
from octavo.core.errors import InvalidInput
from octavo.core.host_tier import SavedColumn
from octavo.core.kv import KVCacheManager, KVGroup
from octavo.core.params import MAX_COUNT, SamplingParams, check_int
from octavo.core.policies import PolicySettings
from octavo.core.request import Request

if TYPE_CHECKING:
    from octavo.core.scheduler import ContinuousBatchScheduler

__all__ = ["facts_of", "kv_of", "request_of", "scheduler_config_of", "scheduler_facts"]

_PLAIN = SamplingParams().to_dict()
_APART = ("request_id", "prompt_token_ids", "params", "branches", "version")


def facts_of(request: Request) -> dict[str, Any]:
    """What a request asks for besides its id and prompt, without what is usual."""
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
    branches, seed, ended = facts.pop("branches", None), facts.pop("seed", None), facts.pop("ended", ())
    eos = facts.pop("eos_token_ids", ())
    try:
        request = Request(event["request"], event["prompt"], params, eos_token_ids=eos, **facts)
    except TypeError as error:
        raise InvalidInput("facts", sorted(facts), "these are not a request's fields") from error
    request.seed = seed
    return (
        request if branches is None else Request.restore({**request.snapshot(), "branches": branches, "ended": ended})
    )


def scheduler_facts(scheduler: ContinuousBatchScheduler) -> dict[str, Any]:
    """Configuration, page pool and vocabulary of a scheduler."""
    kv = scheduler.kv
    return {
        "scheduler": asdict(scheduler.config),
        "kv": {
            "num_pages": kv.allocator.num_pages,
            "page_size": kv.page_size,
            "groups": [asdict(group) for group in kv.groups],
            "enable_prefix_cache": kv.enable_prefix_cache,
            "prefix_cache_max_pages": kv.prefix_cache_max_pages,
            "host_pages": 0 if kv.host is None else kv.host.num_pages,
            "disk_pages": 0 if kv.host is None else kv.host.disk_pages,
            "disk_columns": [] if kv.host is None else [list(column) for column in kv.host.saved()],
        },
        "vocab_size": scheduler.vocab_size,
        "model": scheduler.model,
    }


def scheduler_config_of(facts: Mapping[str, Any], **changes: Any) -> SchedulerConfig:
    """The configuration in the facts of a ``start`` event, with ``changes``. Raises ``InvalidInput``."""
    try:
        fields = dict(facts["scheduler"])
        policies = dict(fields.pop("policies", {}))
        weights = tuple((tenant, weight) for tenant, weight in policies.pop("weights", ()))
        return replace(SchedulerConfig(**fields, policies=PolicySettings(**policies, weights=weights)), **changes)
    except (KeyError, TypeError) as error:
        raise InvalidInput(
            "facts", str(error), "these are not a scheduler's fields: another version wrote them"
        ) from error


def kv_of(facts: Mapping[str, Any], num_pages: int | None = None) -> KVCacheManager:
    """An empty page pool like that of the recording, or of another size. Raises ``InvalidInput``."""
    try:
        kv = dict(facts["kv"])
        groups = [KVGroup(**{**group, "layers": tuple(group["layers"])}) for group in kv.pop("groups")]
        kv["disk_columns"] = [SavedColumn(*column) for column in kv.get("disk_columns", ())]
        pages = check_int("num_pages", kv.pop("num_pages") if num_pages is None else num_pages, 1, MAX_COUNT)
        kv.pop("num_pages", None)
        return KVCacheManager(pages, kv.pop("page_size"), groups, **kv)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidInput("facts", str(error), "these are not a page pool's: another version wrote them") from error
