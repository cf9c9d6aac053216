"""The engine is told that an answer was taken when its client has taken it, and not before."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from fake_engine import FakeDelta, FakeEngine

from octavo.core.params import SamplingParams
from octavo.serve.generate import Job, run
from octavo.serve.metrics import Metrics
from octavo.serve.prompts import Prompt


@dataclass(frozen=True)
class LastDelta(FakeDelta):
    """A delta that says it is the last, as the engine's do."""

    last: bool = True


class ToldEngine(FakeEngine):
    """Notes when it is asked for more after the last delta."""

    told = False

    async def generate(self, prompt_token_ids, params, **about):
        yield FakeDelta(text="a", token_ids=(1,), num_output_tokens=1)
        yield LastDelta(text="b", token_ids=(2,), num_output_tokens=2, finish_reason="stop")
        self.told = True


def test_the_engine_is_told_when_the_client_has_taken_it_all():
    async def body() -> None:
        engine = ToldEngine()
        job = Job("r", [Prompt((1, 2))], SamplingParams(), timeout=9.0)
        texts = []
        async with aclosing(run(engine, job, Metrics(engine, "fake"))) as deltas:
            async for _, delta in deltas:
                texts.append(delta.text)
                await asyncio.sleep(0.02)  # a client that takes its time
                assert not engine.told
        assert texts == ["a", "b"] and engine.told

    asyncio.run(body())
