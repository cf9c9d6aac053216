"""Whether a prefix comes back from the host tier or is computed again: whichever takes less time.

back      what pages took that came back in earlier steps, from memory and from disk (before any did, what copying was
          measured to take), and the step that computes the last token
again     the steps that compute the tokens in chunks, as the step model foretells them
"""

from __future__ import annotations

from octavo.core.config import SchedulerConfig
from octavo.core.kv import KVCacheManager
from octavo.core.kv_restore import Restores
from octavo.core.request import Branch
from octavo.core.step_model import StepModel, StepWork, positions_read

__all__ = ["SwapChoice"]

_FORGET = 0.9  # weight of a step's moves when the next ones come: about the last ten count
_TIERS = ("host", "disk")


class _Rate:
    """Seconds that a page takes, over the last moves."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._pages, self._seconds = float(seconds > 0.0), seconds

    def observe(self, pages: int, seconds: float) -> None:
        """So many pages took so long."""
        self._pages = _FORGET * self._pages + pages
        self._seconds = _FORGET * self._seconds + seconds

    @property
    def seconds(self) -> float:
        """0 while it is not known."""
        return self._seconds / self._pages if self._pages else 0.0


class SwapChoice:
    """Decides for one scheduler. Until both costs are known it restores."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, step_model: StepModel) -> None:
        self.config, self.kv, self.step_model = config, kv, step_model
        known = config.host_mb_per_s
        first = kv.page_bytes / (1e6 * known) if known else 0.0
        self._rates = {tier: _Rate(first) for tier in _TIERS}  # of disk, until it was read: as if of memory

    def restores(self, branch: Branch) -> Restores | None:
        """What `KVCacheManager.begin` is to ask: the setting says it for those that were preempted; None: always."""
        if branch.num_preemptions and self.config.preemption != "auto":
            return None if self.config.preemption == "swap" else _never
        return self.pays

    def swaps(self, branch: Branch) -> bool:
        """Whether a branch that is being preempted should find its K/V in the host tier when it returns."""
        if self.kv.host is None or self.config.preemption == "recompute":
            return False
        returns = branch.takes_prefix and branch.num_preemptions + 1 < self.config.max_preemptions
        if not returns or not branch.num_resident_tokens:
            return False  # it will begin without what others share
        tokens = branch.num_resident_tokens
        return self.config.preemption == "swap" or self.pays(0, tokens, self.kv.num_branch_pages(branch.key))

    def observe(self, tier: str, pages: int, seconds: float) -> None:
        """So many pages came back from a tier in so many seconds. What is not above 0 says nothing."""
        if pages > 0 and 0.0 < seconds < float("inf") and tier in self._rates:
            self._rates[tier].observe(pages, seconds)

    def pays(self, start: int, end: int, pages: int, from_disk: int = 0) -> bool:
        """True if reading `pages` back, `from_disk` of them from disk, takes no longer than computing [start, end)."""
        if not self.step_model.is_fitted or not self._rates["host"].seconds:
            return True
        return self.seconds_back(end, pages, from_disk) <= self.seconds_again(start, end)

    def seconds_back(self, end: int, pages: int, from_disk: int = 0) -> float:
        """Seconds in which so many pages come back and the token after `end` others is computed."""
        moves = (pages - from_disk) * self._rates["host"].seconds + from_disk * self._rates["disk"].seconds
        return moves + self.step_model.predict(StepWork(decodes=1, context=end + 1))

    def seconds_again(self, start: int, end: int) -> float:
        """Seconds of the steps that compute tokens [start, end), and one more with the last of them."""
        tokens = end - start + 1
        chunks = -(-tokens // self.config.max_prefill_chunk)
        work = StepWork(chunks=chunks, prefill=tokens, attention=positions_read(start, tokens))
        constant = self.step_model.predict(StepWork())
        return self.step_model.predict(work) + (chunks - 1) * constant


def _never(start: int, end: int, pages: int, from_disk: int) -> bool:
    return False
