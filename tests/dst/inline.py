"""How a simulated engine runs a step where the product uses a thread, and how errors of the run leave it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dst.faults import Faults
from dst.scenario import keyed
from octavo.core.batch import ScheduleDecision, StepResult

if TYPE_CHECKING:
    from dst.engine import EngineProcess


class Killed(BaseException):
    """The process is killed while it runs a step."""


class Escaped(BaseException):
    """An error of the run itself, which the engine must not take for one of the model."""


@contextmanager
def escaping(faults: Faults) -> Iterator[None]:
    """Errors other than those of the script leave the engine's step."""
    try:
        yield
    except Exception as error:
        if error is faults.raised:
            raise
        raise Escaped(error) from error


class InlineThread:
    """What stands for the engine's thread where steps overlap: a step runs at once, or when it is waited for."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self.decision: ScheduleDecision | None = None
        self._found: StepResult | Exception | None = None

    def start(self, decision: ScheduleDecision) -> None:
        """Run a decision; every second one at once."""
        self.decision, self._found = decision, None
        self.engine.look_at(decision)
        if keyed(self.engine.scenario.seed, 4, decision.step) % 2:
            self._found = self._run(decision)

    def wait(self) -> StepResult:
        """What it came to."""
        self.engine.wait()
        found = self._found if self._found is not None else self._run(self.decision)
        self.decision = self._found = None
        if isinstance(found, Exception):
            raise found
        return found

    def settle(self) -> None:
        """Forget what it came to."""
        self.decision = self._found = None

    def _run(self, decision: ScheduleDecision) -> StepResult | Exception:
        try:
            return self.engine.run_model(decision)
        except Exception as error:
            return error
