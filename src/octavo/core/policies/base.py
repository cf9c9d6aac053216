"""What a policy answers: who is admitted next, who is served first, who gives way.

Policies are put together by name, `priority,fair`: the first decides, the next breaks its ties, arrival the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.core.params import check_float, check_int

if TYPE_CHECKING:
    from octavo.core.kv import KVCacheManager
    from octavo.core.request import Branch, Request

Key = tuple[float, ...]
MOST_PRICE = 1_000_000


@dataclass(frozen=True)
class PolicySettings:
    """Numbers that policies take from the scheduler's configuration.

    Prices are in units of service for each token; a tenant's weight (1 unless named) is its share where several want
    more than there is. Raises ``InvalidInput`` for a number out of range.
    """

    ageing_s: float = 60.0
    prompt_price: int = 1
    cached_price: int = 0
    output_price: int = 2
    weights: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        check_float("ageing_s", self.ageing_s, 0, 1e9)
        for name in ("prompt_price", "cached_price", "output_price"):
            check_int(name, getattr(self, name), 0, MOST_PRICE)
        for tenant, weight in self.weights:
            check_int(f"weights[{tenant}]", weight, 1, MOST_PRICE)


@dataclass(frozen=True)
class Scene:
    """What a policy looks at: who waits and who runs (by rank) at time ``now``, and the pages behind them."""

    kv: KVCacheManager
    waiting: Sequence[Branch]
    running: Sequence[Branch]
    now: float = 0.0
    max_running: int = 1
    settings: PolicySettings = field(default_factory=PolicySettings)


def account_of(request: Request) -> str:
    """Whose share of service a request uses up: its tenant's, or, for bulk, another of its tenant's."""
    return f"{request.tenant}\0bulk" if request.bulk else request.tenant


class Policy:
    """First come, first served: the hooks of this class are what an order of service may differ in."""

    name = "fcfs"
    changes_as_it_admits = False  # keys are worth another look after each admission
    ages_by_tenant = False  # being passed by another tenant's request is no ageing
    makes_way = False  # `displaces` and `turn` have something to say
    sheds = False  # what cannot be done in time is not begun

    def prepare(self, scene: Scene) -> None:
        """Look around before keys and ranks are asked for. What it keeps, the next call replaces."""

    def key(self, branch: Branch) -> Key:
        """The order among those that wait, lowest first. Ties go to the next policy, then to arrival."""
        return ()

    def rank(self, branch: Branch) -> Key:
        """The order among those that run, kept from the first admission to the end: the last gives way to the first."""
        return self.key(branch)

    def place(self, branch: Branch) -> Key:
        """What comes before the rank in this step among those that run; the same for all unless shares are at stake."""
        return ()

    def turn(self, branch: Branch) -> Key:
        """The order in which prefills share a step's tokens; the rank breaks ties."""
        return ()

    def arrived(self, request: Request, scene: Scene) -> None:
        """A request is about to join those that wait."""

    def ended(self, branch: Branch) -> None:
        """A branch ends in whatever way; its counters still tell what it had."""

    def displaces(self, branch: Branch, victim: Branch, taken: Sequence[Branch] = ()) -> bool:
        """Whether a waiting branch may take slot and pages of one that runs, besides those that it takes already."""
        return False
