"""SmolLM2 with an adapter from a seed: smoothed channels and 8-bit weights change nothing of what it adds."""

import numpy as np
import pytest

from octavo.core.params import SamplingParams
from octavo.engine.llm import LLM
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model
from octavo.weights.names import open_weights
from octavo.weights.store import ModelStore

TEXT = "The capital of France is Paris, and the capital of Italy is Rome. Printing began with"
PARAMS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


@pytest.mark.weights
def test_an_adapter_adds_the_same_beside_smoothed_weights(adapter_folder):
    """What it adds to the logprobs of a text, against numpy in fp32, relative to its size."""
    with open_weights(ModelStore().resolve("smollm2-135m-instruct").path) as source:
        shapes = build_model(ModelConfig.from_dict(source.config)).projections()
    folder = adapter_folder(shapes, 1, rank=8, alpha=8, size=0.06)
    found = {}
    for backend, kind in (("numpy", "auto"), ("native", "w8g64")):
        options = {"backend": backend, "format": kind, "max_seq_len": 128, "offline": True}
        llm = LLM("smollm2-135m-instruct", lora=f"a={folder}", **options)
        base, adapted = (
            np.array([entry.logprob for entry in llm.generate(TEXT, PARAMS, lora=lora)[0].prompt_logprobs[1:]])
            for lora in (None, "a")
        )
        found[backend] = adapted - base
    size = np.sqrt(np.square(found["numpy"]).mean())
    assert size > 0.05
    assert np.sqrt(np.square(found["native"] - found["numpy"]).mean()) < 0.2 * size  # 8-bit weights make noise as well
