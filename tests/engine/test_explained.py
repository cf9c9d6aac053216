"""Explanations for clients: whose requests are shown, and what others are called."""

from __future__ import annotations

import asyncio
from typing import Any

from test_async_engine import make

from octavo.core.grammar import Grammar
from octavo.core.params import SamplingParams


async def ask(engine: Any, name: str, tenant: str, count: int) -> None:
    async for _ in engine.generate([1, 5, 6], SamplingParams(max_tokens=count), request_id=name, tenant=tenant):
        pass


def test_a_tenant_sees_its_own_requests_and_not_the_names_of_others() -> None:
    async def body() -> list[Any]:
        async with make(max_running_requests=1) as engine:
            mine, others = ("x.0123abcd-0", "x.0123abcd-1"), ("x.00000000", "secret")
            first = [asyncio.create_task(ask(engine, name, "other", 20)) for name in others]
            await asyncio.sleep(0)
            await asyncio.gather(*first, *(ask(engine, name, "me", 2) for name in mine))
            questions = [
                ("x", "me"),
                ("x", "other"),
                ("x.0123abcd", "me"),
                ("", "me"),
                (".*", "me"),
                ("secret", "me"),
            ]
            return [await engine.explain(*question) for question in questions]

    mine, other, *nothing = asyncio.run(body())
    assert [one["request"] for one in mine] == ["x.0123abcd-0", "x.0123abcd-1"]
    assert [one["request"] for one in other] == ["x.00000000"]
    assert nothing == [[]] * 4
    told = " ".join(cause["detail"] for one in mine for cause in one["causes"])
    assert "behind a request of another key" in told and "secret" not in told and "00000000" not in told


def test_the_time_that_a_grammar_took_has_a_name() -> None:
    params = SamplingParams(max_tokens=2, grammar=Grammar("regex", "[ab]+"))

    async def body() -> list[Any]:
        async with make() as engine:
            for name in ("new", "kept"):
                async for _ in engine.generate([1, 2], params, request_id=name, tenant="me"):
                    pass
            return [await engine.explain(name, "me") for name in ("new", "kept")]

    (new,), (kept,) = asyncio.run(body())
    named = [{cause["name"]: cause["seconds"] for cause in one["causes"]} for one in (new, kept)]
    assert next(iter(named[0])) == "grammar" and named[0]["grammar"] > 0 and "grammar" not in named[1]
    assert abs(sum(named[0].values()) - new["wall_s"]) < 1e-6
