"""Print a fixture's manifest, or run its scenario on the standard-library backend.

    python3 -m octavo.engine.driver --fixture fixtures/tiny_model.json [--run]

Works on a bare interpreter with ``PYTHONPATH=src``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.engine.fixture import Fixture, load_fixture
from octavo.engine.inference import InferenceEngine
from octavo.engine.scenario import manifest, run_scenario


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 when the run disagrees with the golden tokens; 2 for a fixture that cannot be read."""
    parser = argparse.ArgumentParser(prog="octavo.engine.driver", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--fixture", required=True, help="a fixture file, such as fixtures/tiny_model.json")
    parser.add_argument("--run", action="store_true", help="run the scenario and compare it with the golden tokens")
    options = parser.parse_args(argv)
    try:
        fixture = load_fixture(options.fixture)
    except InvalidInput as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not options.run:
        print(json.dumps(manifest(fixture), indent=2))
        return 0
    report = _run(fixture)
    print(json.dumps(report, indent=2))
    return 0 if all(request["golden"] for request in report["requests"].values()) else 1


def _run(fixture: Fixture) -> dict[str, Any]:
    started = time.perf_counter()
    engine = InferenceEngine.from_fixture(fixture, audit=True)
    outcomes = run_scenario(engine, fixture.scenario["requests"])
    requests = {}
    for name, outcome in outcomes.items():
        golden = fixture.golden[name]
        cancelled = outcome.finish_reason == "cancelled"
        expected = golden["token_ids"][: len(outcome.token_ids)] if cancelled else golden["token_ids"]
        requests[name] = {
            "token_ids": outcome.token_ids,
            "text": fixture.tokenizer.decode(outcome.token_ids),
            "finish_reason": outcome.finish_reason,
            "golden": outcome.token_ids == expected and (cancelled or outcome.finish_reason == golden["finish_reason"]),
        }
    return {
        "requests": requests,
        "seconds": round(time.perf_counter() - started, 3),
        "metrics": engine.metrics(),
        "timeline": engine.timeline(),
    }


if __name__ == "__main__":
    sys.exit(main())
