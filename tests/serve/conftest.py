"""The null model of core's tests is the engine of the links' tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from octavo.decoding.grammar.checker import GrammarChecker

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))


@pytest.fixture(scope="session", autouse=True)
def one_grammar_worker():
    """One process that tries grammars out, for all applications: starting one takes a tenth of a second."""
    shared = GrammarChecker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.serve.grammar_door.GrammarChecker", lambda special: shared)
        patch.setattr(shared, "kill", lambda: None)
        yield
    shared.close()
