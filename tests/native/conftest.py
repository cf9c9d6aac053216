"""Native tests use the tiny checkpoints of the model tests and the schedules of the engine tests."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("core", "models", "engine", "ops", "quantize"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / folder))
