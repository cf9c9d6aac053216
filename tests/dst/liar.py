"""A proposer that knows what comes next, and lies as often as the scenario says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from null_model import lying_drafts

from dst.scenario import VOCAB, keyed
from octavo.core.request import Branch
from octavo.core.speculation import Guess

if TYPE_CHECKING:
    from dst.engine import EngineProcess


class Liar:
    """Stands for the product's `Speculator`."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine

    def drafts(self, running: Sequence[Branch]) -> dict[tuple[str, int], Guess]:
        """Drafts for the next plan."""
        scenario, key = self.engine.scenario, keyed(self.engine.scenario.seed, 6, self.engine.turns)
        return lying_drafts(running, scenario.drafts, scenario.lies, key, VOCAB, self.engine.model.salt_of)

    def rests(self) -> bool:
        """Whether the next step may be planned ahead."""
        return bool(keyed(self.engine.scenario.seed, 7, self.engine.turns) % 2)

    def committed(self, *told: object) -> None:
        """Nothing is learnt."""

    ended = committed

    def take_fault(self) -> str:
        """It lies, and never fails."""
        return ""

    def drafts_of(self, request_id: str) -> tuple[float, ...]:
        """Nothing was counted."""
        return ()
