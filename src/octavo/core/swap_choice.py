"""Whether a prefix comes back from the host tier or is computed again: whichever takes less time.

back      pages * bytes of a page / bytes that are copied in a second
again     what the step model says of so many more tokens of prefill, each with what it reads
"""

from __future__ import annotations

from octavo.core.config import SchedulerConfig
from octavo.core.kv import KVCacheManager
from octavo.core.kv_restore import Restores
from octavo.core.request import Branch
from octavo.core.step_model import StepModel, StepWork, positions_read

__all__ = ["SwapChoice"]


class SwapChoice:
    """Decides for one scheduler. Until both costs are known it restores."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager, step_model: StepModel) -> None:
        self.config, self.kv, self.step_model = config, kv, step_model

    def restores(self, branch: Branch) -> Restores | None:
        """What `KVCacheManager.begin` is to ask: the setting says it for those that were preempted; None: always."""
        if branch.num_preemptions and self.config.preemption != "auto":
            return None if self.config.preemption == "swap" else _never
        return self.pays

    def swaps(self, branch: Branch) -> bool:
        """Whether a branch that is being preempted should find its K/V in the host tier when it returns."""
        if self.kv.host is None or self.config.preemption == "recompute":
            return False
        returns = branch.use_prefix and branch.num_preemptions + 1 < self.config.max_preemptions
        if not returns or branch.wants_prompt_logprobs or not branch.num_resident_tokens:
            return False  # it will begin without what others share
        tokens = branch.num_resident_tokens
        return self.config.preemption == "swap" or self.pays(0, tokens, self.kv.num_branch_pages(branch.key))

    def pays(self, start: int, end: int, pages: int) -> bool:
        """True if reading `pages` back takes no longer than computing tokens [start, end)."""
        if not self.step_model.is_fitted or not self.config.host_mb_per_s:
            return True
        return self.seconds_back(pages) <= self.seconds_again(start, end)

    def seconds_back(self, pages: int) -> float:
        """Seconds in which so many pages come back."""
        return pages * self.kv.page_bytes / (1e6 * self.config.host_mb_per_s)

    def seconds_again(self, start: int, end: int) -> float:
        """Seconds that computing tokens [start, end) adds to the steps that do it."""
        tokens = end - start
        chunks = -(-tokens // self.config.max_prefill_chunk)
        work = StepWork(chunks=chunks, prefill=tokens, attention=positions_read(start, tokens))
        return self.step_model.predict(work) - self.step_model.predict(StepWork())


def _never(start: int, end: int, pages: int) -> bool:
    return False
