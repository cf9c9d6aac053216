"""Odd but legal: the scheduler and the cache manager of the product, pushed where they seldom go by themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from null_model import NullModel, prefix_hashes

from dst.invariants import Broken
from octavo.core.draft import Draft
from octavo.core.errors import InvariantBroken, OutOfPages
from octavo.core.kv import KVCacheManager, PrefixHit
from octavo.core.pages import Owner
from octavo.core.planner import Planner
from octavo.core.request import Request
from octavo.core.scheduler import ContinuousBatchScheduler


class Unit(int):
    """A token whose hash is that of every other one: keys made of such tokens are told apart by comparison alone."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 0


class PoisonedPages:
    """The `KVStore` of a run: what a page held is gone as soon as it is free."""

    def __init__(self) -> None:
        self.forget: Callable[[int], None] = lambda page: None

    def write(self, page: int, offset: int, key: Sequence[float], value: Sequence[float]) -> None:
        """Not used: the null model writes hashes."""
        raise InvariantBroken("the simulation keeps no keys and values")

    read = copy_page = write


class OddKV(KVCacheManager):
    """Forgets, fails, ignores hits, and looks at what a hit attaches."""

    def __init__(self, *args: Any, switches: Sequence[str], grab_fails: tuple[int, int] | None, **values: Any) -> None:
        super().__init__(*args, **values)
        self.switches = switches
        self.grabs = 0  # of pages, so far
        self.failing: range = range(grab_fails[0], sum(grab_fails)) if grab_fails else range(0)  # numbers of grabs
        self.lookups = 0
        self.model: NullModel | None = None
        self.salt: Callable[[str], int] = lambda namespace: 0
        self.page_namespace: dict[int, str] = {}  # where the last write came from

    def begin(
        self,
        key: tuple[str, int],
        namespace: str,
        units: Sequence[int],
        *when: Any,
        use_prefix: bool = True,
        **asked: Any,
    ) -> PrefixHit:
        """As in the product; every second lookup finds nothing, if that is switched on."""
        self.lookups += 1
        use_prefix = use_prefix and not ("ignore_hits" in self.switches and self.lookups % 2)
        hit = super().begin(key, namespace, units, *when, use_prefix=use_prefix, **asked)
        if hit.num_tokens and self.model is not None:
            self._check_hit(key, namespace, units, hit)
        return hit

    def fail_next(self, count: int) -> None:
        """The next ``count`` page grabs fail."""
        self.failing = range(self.grabs + 1, self.grabs + 1 + count)

    def _take(self, num_pages: int, owner: Owner) -> list[int]:
        if num_pages:
            self.grabs += 1
            if self.grabs in self.failing:
                raise OutOfPages(f"page grab {self.grabs} fails on purpose")
        if "evict_always" in self.switches:
            self.prefix.flush()
        return super()._take(num_pages, owner)

    def _source(self, page: int) -> int:
        """Where the bytes of a page lie until the step runs: a page of the pool, or (below 0) of the tiers."""
        host = None if self.swaps is None else self.swaps._ins.get(page)
        if host is None:
            return page
        if host in self.swaps._sinks:  # what leaves memory does so first
            return -1 - self.swaps._sinks[host]
        return self.swaps._outs.get(host, -1 - host)

    def _check_hit(self, key: tuple[str, int], namespace: str, units: Sequence[int], hit: PrefixHit) -> None:
        """Whole pages hold the units that they stand for, written in the same namespace."""
        size, branch = self.page_size, self._branches[key]
        hashes = prefix_hashes(units, self.salt(namespace))
        copied = {copy.target: copy.source for copy in hit.copies}
        for group, table in enumerate(branch.tables):
            _, first = self.groups[group].needed_columns(hit.num_tokens + 1, size)
            for column in range(first, len(table)):
                page = self._source(copied.get(table[column], table[column]))
                end = min(column * size + size, hit.num_tokens + hit.no_write)
                wanted = hashes[column * size : end]
                held = (self.model.pages if page >= 0 else self.model.host).get(page if page >= 0 else -1 - page, [])
                held = held[: len(wanted)]
                if self.page_namespace.get(page) != namespace:
                    raise Broken("I15", f"{key} hits page {page} of namespace {self.page_namespace.get(page)!r}")
                if held != wanted:
                    raise Broken("I7", f"{key} hits page {page}, which holds other tokens")


class OddPlanner(Planner):
    """Preempts and evicts when nobody asked for it."""

    switches: Sequence[str] = ()

    @classmethod
    def instead_of(cls, planner: Planner) -> OddPlanner:
        """A planner that knows all that ``planner`` was told."""
        odd = cls(planner.config, planner.policy, planner.kv, planner.roster)
        odd.__dict__.update(planner.__dict__)
        return odd

    def fill(self, draft: Draft, budget: int) -> None:
        """As in the product, after what is switched on."""
        if "evict_always" in self.switches:
            self.kv.flush_prefix_cache()
        if "preempt_every_3" in self.switches and draft.step % 3 == 0:
            for branch in reversed(self.roster.running):
                if branch.kv_blocks and not self.claims.protected(branch):
                    draft.preemptions += self.roster.preempt(branch, draft.now, "every third step")
                    break
        super().fill(draft, budget)


class OddScheduler(ContinuousBatchScheduler):
    """The product's scheduler with a planner of the above kind."""

    def __init__(self, *args: Any, switches: Sequence[str], **values: Any) -> None:
        super().__init__(*args, **values)
        self._planner = OddPlanner.instead_of(self._planner)
        self._planner.switches = self._switches = switches

    def submit(self, request: Request) -> None:
        """As in the product; with short keys, all tokens of the request have the same hash."""
        if "short_keys" in self._switches:
            request.prompt_token_ids = tuple(map(Unit, request.prompt_token_ids))
            request.end_ids = frozenset(map(Unit, request.end_ids))
            for branch in request.branches:
                branch.token_ids = [*map(Unit, branch.token_ids)]
                branch.end_ids = request.end_ids
        super().submit(request)
