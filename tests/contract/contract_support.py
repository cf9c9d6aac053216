"""What the contract tests share. They run with `PYTHONPATH=src python3 -m unittest discover -s tests/contract`."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

from octavo.core.events import EventKind
from octavo.engine.fixture import load_fixture
from octavo.engine.inference import InferenceEngine

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "fixtures" / "tiny_model.json"
TWO_GROUPS = ROOT / "fixtures" / "tiny_two_groups.json"


@functools.cache
def fixture(path: Path = TINY) -> Any:
    """The parsed fixture; read once."""
    return load_fixture(path)


def engine(path: Path = TINY, **settings: Any) -> InferenceEngine:
    """An engine over a fixture that audits its pages after every step."""
    settings.setdefault("audit", True)
    return InferenceEngine.from_fixture(fixture(path), **settings)


def tokens_of(engine: InferenceEngine, request_id: str) -> list[int]:
    """The tokens that the stream of a request still yields, to its end."""
    return [e.token_id for e in engine.stream(request_id) if e.kind == EventKind.TOKEN]


def finish_reason(events: list[Any]) -> str:
    """The reason of the one request end in ``events``."""
    ends = [e for e in events if e.kind == EventKind.REQUEST_END]
    if len(ends) != 1 or events[-1] is not ends[0]:
        raise AssertionError(f"one request_end must close a stream: {events}")
    return str(getattr(ends[0].finish_reason, "value", ends[0].finish_reason))


def random_prompt(rng: random.Random, longest: int = 24, vocab: int = 56) -> list[int]:
    """Between one and ``longest`` token ids, special ones left out."""
    return [rng.randrange(4, vocab) for _ in range(rng.randint(1, longest))]


def assert_idle(case: Any, engine: InferenceEngine) -> None:
    """No page is referenced or ticketed, and the audit holds."""
    engine.audit()
    usage = engine.usage()
    case.assertEqual((usage["referenced"], usage["ticketed"]), (0, 0), usage)
    case.assertEqual(usage["free"] + usage["cached"], usage["total"], usage)
