"""Who guesses the next tokens of a branch. A guess costs time when it is wrong, and never changes a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.core.params import SamplingParams
from octavo.core.speculation import Guess

__all__ = ["Ask", "BranchKey", "Proposer"]

BranchKey = tuple[str, int]  # (request id, choice)
Ask = tuple[BranchKey, Sequence[int], int]  # the arguments of `propose`


class Proposer(Protocol):
    """Drafts for many branches. Every branch begins with `open` and ends with `drop`; calls for it are in order."""

    draft_seconds: float = 0.0  # that drafts have taken, where that is worth measuring
    catch_up_seconds: float = 0.0  # that reading took, beside them, of what branches had before their drafts
    reads: bool = False  # it makes passes over what branches have: a draft model
    num_read: int = 0  # tokens that were read in ``catch_up_seconds``

    def open(self, branch_key: BranchKey, namespace: str, num_prompt_tokens: int) -> None:
        """A branch comes. What it says may help others of its ``namespace`` (of the prefix cache) and nobody else."""

    def draws_as(self, branch_key: BranchKey, params: SamplingParams, seed: int) -> None:
        """How the branch draws its tokens, told after `open`: who has a law of them may draw drafts with its noise."""
        return

    def propose(self, branch_key: BranchKey, token_ids: Sequence[int], most: int) -> Guess:
        """At most ``most`` tokens that may follow ``token_ids``, all known ones of the branch; none: no idea.

        ``token_ids`` is the branch's own list: it only grows between two calls, and is neither kept nor changed here.
        """
        ...

    def propose_all(self, asks: Sequence[Ask]) -> Sequence[Guess]:
        """`propose` for several branches at once, one answer each."""
        return [self.propose(*ask) for ask in asks]

    def rehearse(self) -> Sequence[tuple[int, float, int, float]]:
        """Make drafts that mean nothing, before there is a branch: drafts and their seconds, tokens that were read
        before and their seconds.
        """
        return ()

    def unread(self, branch_key: BranchKey, token_ids: Sequence[int]) -> int:
        """Tokens of the branch, but for the last, that would be read before its first draft."""
        return 0

    def observe(self, branch_key: BranchKey, token_ids: Sequence[int]) -> None:
        """The branch has these tokens by now, prompt and output; called at its end as well, before `drop`."""

    def most_bytes(self, branches: int, tokens: int) -> int:
        """What it takes at most, with so many branches of so many tokens each open at once."""
        ...

    def flush(self) -> None:
        """Forget what is kept, of branches that have ended, only to be quicker."""
        return

    def drop(self, branch_key: BranchKey) -> None:
        """The branch has ended, or is forgotten. Idempotent."""
