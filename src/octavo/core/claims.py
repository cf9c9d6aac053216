"""Who has a claim on which pages: what may still be needed, by those that run and by one that wants to."""

from __future__ import annotations

from octavo.core.config import SchedulerConfig
from octavo.core.gang import follows, leads, members
from octavo.core.kv import KVCacheManager
from octavo.core.policies import Policy
from octavo.core.request import Branch, RequestState
from octavo.core.roster import Roster

__all__ = ["Claims"]


class Claims:
    """Counts pages that branches hold no longer than they need them, and will come to need."""

    def __init__(self, config: SchedulerConfig, policy: Policy, kv: KVCacheManager, roster: Roster) -> None:
        self.config, self.policy = config, policy
        self.kv, self.roster = kv, roster

    def protected(self, branch: Branch) -> bool:
        """True for a branch that was preempted often enough: it is not preempted again."""
        return branch.num_preemptions >= self.config.max_preemptions

    def outstanding(self, branch: Branch) -> int:
        """Pages that a branch has a claim on beyond those it holds: all it may ever need if it is protected (so that
        it never has to preempt), else what its known tokens and the next one need.
        """
        tokens, copies = max(branch.num_tokens, branch.request.token_limit - 1), 0
        held = branch.kv_blocks
        if self.protected(branch):  # of a gang, each may have to copy a page that it shares
            copies = len(self.kv.groups) * branch.request.gang
            held = self.kv.num_lasting_pages(branch.key)
        else:
            if follows(branch):
                return len(self.kv.groups)
            if branch.state is RequestState.DECODING:
                is_due = self.kv.is_due(branch.num_resident_tokens, branch.num_prompt_tokens)
                return self.kv.compaction_pages(branch.key, branch.num_resident_tokens) if is_due else 0
            tokens = min(tokens, branch.num_tokens + 1)
        return max(0, self.kv.num_pages_needed(tokens, self.config.max_prefill_chunk) - held) + copies

    def all_fit(self) -> bool:
        """True if the known tokens of all that run find pages without preemption."""
        return sum(map(self.outstanding, self.roster.running)) <= self.kv.free_pages()

    def of_others(self, branch: Branch) -> int:
        """Pages that protected branches have not taken yet and must find. A protected one is not held up itself."""
        if self.protected(branch):
            return 0
        return sum(self.outstanding(other) for other in self.roster.running if self.protected(other))

    def displaced_by(self, head: Branch) -> list[Branch] | None:
        """The fewest branches whose slots and pages let ``head`` in, from the last rank on; None: it stays out."""
        victims: list[Branch] = []
        gang = members(head)
        needed = sum(map(self.to_begin, gang))
        free = self.kv.free_pages() - sum(map(self._coming, self.roster.running))
        slots = self.roster.num_free_slots
        for branch in reversed(self.roster.running):
            if slots >= len(gang) and free >= needed:
                break
            if leads(branch) and not self.protected(branch) and self._displaces(head, branch, victims):
                victims += members(branch)
                free += sum(member.kv_blocks + self._coming(member) for member in members(branch))
                slots += len(members(branch))
        return victims if slots >= len(gang) and free >= needed else None

    def _displaces(self, head: Branch, victim: Branch, taken: list[Branch]) -> bool:
        """As the policy says; bulk requests make way for all others."""
        return head.request.bulk < victim.request.bulk or self.policy.displaces(head, victim, taken)

    def _coming(self, branch: Branch) -> int:
        """`outstanding`, and the page that the next token of a decode begins."""
        begins = branch.state is RequestState.DECODING and not branch.num_resident_tokens % self.kv.page_size
        return max(self.outstanding(branch), len(self.kv.groups) * begins)

    def to_begin(self, branch: Branch) -> int:
        """Pages that the known tokens of a waiting branch and its next one need, without those that are cached."""
        if follows(branch):
            return len(self.kv.groups)
        cached = 0
        if branch.takes_prefix and not self.protected(branch):
            cached = self.kv.match_length(branch.request.namespace, branch.token_ids) // self.kv.page_size
        columns = self.kv.num_pages_needed(branch.num_tokens + 1, self.config.max_prefill_chunk)
        return max(1, columns - cached * len(self.kv.groups))
