"""Settings of every test: hypothesis repeats itself, no test fails for being slow, and logging is as it was afterwards.

`OCTAVO_EXPLORE=1` draws new examples in every run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "octavo",
    deadline=None,
    derandomize=not os.environ.get("OCTAVO_EXPLORE"),
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("octavo")


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that is run in process sets up the loggers of the whole process."""
    root = logging.getLogger()
    loggers = {
        "": root,
        **{n: x for n, x in logging.Logger.manager.loggerDict.items() if isinstance(x, logging.Logger)},
    }
    before = {name: logger.level for name, logger in loggers.items()}
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers
    for name, level in before.items():
        loggers[name].setLevel(level)
