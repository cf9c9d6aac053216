"""What a fetcher is given and how it says no."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.errors import OctavoError
from octavo.weights.progress import Reporter
from octavo.weights.sources import KnownModel

__all__ = ["REACH_S", "FetchJob", "Fetcher", "SourceFailed"]

REACH_S = 4.5  # a source that gives no sign of life by then is unreachable; the promise is five seconds


class SourceFailed(OctavoError):
    """One source cannot give the file: the message is the reason, and the next source is tried."""


@dataclass(frozen=True)
class FetchJob:
    """One attempt. What is left in `work` survives the attempt and is there at the next one."""

    model: KnownModel
    work: Path
    report: Reporter


# Gives a complete, unverified file inside `job.work`; the store verifies, moves and cleans up.
Fetcher = Callable[[Any, FetchJob], Path]
