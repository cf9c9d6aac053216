"""Settings of every test: hypothesis repeats itself, no test fails for being slow, and logging is as it was afterwards.

`OCTAVO_EXPLORE=1` draws new examples in every run.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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


AdapterMaker = Callable[..., str]


@pytest.fixture
def adapter_folder(tmp_path: Path) -> AdapterMaker:
    """`make(projections, seed, ...)`: a PEFT folder with normal values; ends: what its targets' names end with."""
    import numpy as np

    from octavo.weights.safetensors import write_safetensors

    def make(
        projections: Mapping[str, tuple[int, ...]],
        seed: int,
        *,
        rank: int = 4,
        alpha: float = 8,
        ends: tuple[str, ...] = ("_proj",),
        size: float = 0.3,
        **config: Any,
    ) -> str:
        rng, tensors = np.random.default_rng(seed), {}
        for name, (n, k) in projections.items():
            if name.endswith(ends):
                for half, shape in (("A", (rank, k)), ("B", (n, rank))):
                    values = (rng.normal(size=shape) * size).astype(np.float32)
                    tensors[f"base_model.model.{name}.lora_{half}.weight"] = values
        folder = tmp_path / f"adapter-{seed}"
        folder.mkdir(exist_ok=True)
        write_safetensors(folder / "adapter_model.safetensors", tensors)
        told = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "task_type": "CAUSAL_LM", **config}
        (folder / "adapter_config.json").write_text(json.dumps(told))
        return str(folder)

    return make
