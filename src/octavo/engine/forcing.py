"""What grammars allow next, before a step is planned; and jump-forward: tokens that a grammar forces are computed
together with the token before them, as drafts.

{"name": "Bob", "age": 2        when `Bob` has ended, all of `, "age": ` must follow: it goes into one step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from octavo.core.draft import BranchKey
from octavo.core.draft_tree import DraftTree
from octavo.core.grammar import Grammar
from octavo.core.request import Branch, Request
from octavo.core.speculation import Guess, may_draft
from octavo.decoding.grammar import GrammarCompiler, OutputMasks
from octavo.engine.followed import Followed
from octavo.engine.mask_thread import MaskThread

__all__ = ["Forcing"]

_MOST = 32  # forced tokens of one branch in one step
_PATIENCE = 0.01  # seconds that a step waits for masks


class Forcing:
    """For one scheduler: the masks of all that follow a grammar; what they follow is kept until they end.

    Masks are made in a thread (`MaskThread`). Whose mask takes longer than ``patience`` seconds is ``held``: the next
    step goes without it. Forced tokens are drafts (`core/speculation.py`), so what is drawn is the same without them:
    a row whose mask leaves one token draws that token.
    """

    def __init__(self, grammars: GrammarCompiler, followed: Followed, patience: float = _PATIENCE) -> None:
        self._grammars, self._followed, self.patience = grammars, followed, patience
        self._thread = MaskThread()
        self._asked: dict[str, Grammar | None] = {}  # by request that follows a grammar: what is held for it
        self._jobs: dict[BranchKey, _Job] = {}  # the last one of each output
        self.is_needed = False  # somebody who runs follows a grammar: the next step waits for this one's tokens
        self.num_asked = 0  # requests that followed a grammar, so far
        self.num_forced = 0  # tokens that were asked for with the one before them

    @property
    def has_any(self) -> bool:
        """True if somebody follows a grammar, or did in the last step."""
        return bool(self._asked) or self.is_needed

    @property
    def held(self) -> list[BranchKey]:
        """Those whose masks are being made."""
        return [key for key, job in self._jobs.items() if not job.is_done]

    def open(self, request: Request) -> None:
        """A request has come."""
        grammar = request.params.grammar
        if grammar is not None:
            self._followed.forget(request.request_id)
            self._jobs = {key: job for key, job in self._jobs.items() if key[0] != request.request_id}
            self._asked[request.request_id] = grammar if self._grammars.hold(grammar) else None
            self.num_asked += 1

    def forget(self, get: Callable[[str], Request | None]) -> None:
        """Let go of what is held for those who have ended. ``get``: a request, if it lives."""
        for name in [name for name in self._asked if get(name) is None]:
            grammar = self._asked.pop(name)
            self._followed.forget(name)
            if grammar is not None:
                self._grammars.release(grammar)

    def drafts(
        self, get: Callable[[str], Request | None], guesses: Callable[[Sequence[BranchKey]], Mapping[BranchKey, Guess]]
    ) -> tuple[Mapping[BranchKey, Guess], Mapping[BranchKey, Guess]]:
        """Have the masks for the next step; drafts, and tokens that must be drawn next, one after the other.

        ``get``: a request, if it lives. ``guesses``: drafts of everybody but those; who follows a grammar has its masks
        behind them made as well.
        """
        if not self._asked:
            self.is_needed = False
            return guesses(()), {}
        self.forget(get)
        bound = {branch.key: branch for branch in self._bound(get)}
        self._jobs = {key: job for key, job in self._jobs.items() if key in bound}
        self.is_needed = any(branch.slot is not None for branch in bound.values())
        self._make(dict.fromkeys(bound, ()), bound)
        done = {key: job for key, job in self._jobs.items() if job.is_done}
        forced = {key: job.forced for key, job in done.items() if job.forced and may_draft(bound[key])}
        self.num_forced += sum(map(len, forced.values()))
        found = guesses([*forced, *self.held])
        self._make({key: guess for key, guess in found.items() if key in bound}, bound)
        held = self.held
        return {key: guess for key, guess in found.items() if key not in held}, forced

    def close(self) -> None:
        """No step follows."""
        self._thread.close()

    def _bound(self, get: Callable[[str], Request | None]) -> Iterator[Branch]:
        for name in self._asked:
            request = get(name)
            yield from (branch for branch in request.branches if branch.is_live) if request is not None else ()

    def _make(self, wanted: Mapping[BranchKey, Guess], bound: Mapping[BranchKey, Branch]) -> None:
        """Have the masks behind these outputs and guesses, as far as that does not take too long."""
        new = []
        for key, guess in wanted.items():
            branch, job = bound[key], self._jobs.get(key)
            if job is not None and (not job.is_done or (job.length == branch.num_output_tokens and not len(guess))):
                continue
            grammar = branch.params.grammar
            if grammar is not None:
                job = self._jobs[key] = _Job(self._followed.masks(key, grammar, branch.end_ids), branch, guess)
                new.append(job)
        if new or self._thread.has_waiting:
            self._thread.run(new, self.patience)


class _Job:
    """The masks behind one output, and behind what is guessed or forced to follow."""

    def __init__(self, masks: OutputMasks, branch: Branch, guess: Guess) -> None:
        self._masks, self._tokens, self._first = masks, branch.token_ids, branch.num_prompt_tokens
        self._guess = guess
        self._most = 0 if len(guess) or not may_draft(branch) else _MOST
        self._end_ids = branch.end_ids
        self.length = branch.num_output_tokens
        self.forced: list[int] = []
        self.is_done = False

    def __call__(self) -> None:
        where, guess = (self._tokens, self._first, self.length), self._guess
        try:
            if len(guess):
                tree = guess if isinstance(guess, DraftTree) else DraftTree.chain(guess)
                self._masks.behind(*where, tree.token_ids, tree.parent_rows())
            forced = self._masks.forced(*where, self._most)
            self.forced = [token for token in forced if token not in self._end_ids]
        except Exception:
            pass  # the step will tell, or who proposes such guesses
        finally:
            self.is_done = True
