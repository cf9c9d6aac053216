"""Who guesses the next tokens of a branch. A guess costs time when it is wrong, and never changes a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.core.speculation import Guess

__all__ = ["BranchKey", "Proposer"]

BranchKey = tuple[str, int]  # (request id, choice)


class Proposer(Protocol):
    """Drafts for many branches. Every branch begins with `open` and ends with `drop`; calls for it are in order."""

    def open(self, branch_key: BranchKey, namespace: str, num_prompt_tokens: int) -> None:
        """A branch comes. What it says may help others of its ``namespace`` (of the prefix cache) and nobody else."""

    def propose(self, branch_key: BranchKey, token_ids: Sequence[int], most: int) -> Guess:
        """At most ``most`` tokens that may follow ``token_ids``, all known ones of the branch; none: no idea.

        ``token_ids`` is the branch's own list: it only grows between two calls, and is neither kept nor changed here.
        """

    def observe(self, branch_key: BranchKey, token_ids: Sequence[int]) -> None:
        """The branch has these tokens by now, prompt and output; called at its end as well, before `drop`."""

    def most_bytes(self, branches: int, tokens: int) -> int:
        """What it takes at most, with so many branches of so many tokens each open at once."""

    def drop(self, branch_key: BranchKey) -> None:
        """The branch has ended, or is forgotten. Idempotent."""
