"""Settings of every test: hypothesis repeats itself, and no test fails for being slow.

`OCTAVO_EXPLORE=1` draws new examples in every run.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "octavo",
    deadline=None,
    derandomize=not os.environ.get("OCTAVO_EXPLORE"),
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("octavo")
