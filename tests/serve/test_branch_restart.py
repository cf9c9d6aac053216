"""Beams, candidates and mirostat whose engine, or who makes their text, is killed: the answer is as undisturbed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from live_server import live_server, metric, wait_idle
from test_roles import COMPACT, FULL, is_healthy, strike, until

MORE = {"logprobs": 1, "return_token_ids": True, "ignore_eos": True}
BEAMS = {"prompt": "the fox", "max_tokens": 60, "use_beam_search": True, "n": 2, "best_of": 4, **MORE}
RANKED = {"prompt": "the lazy", "max_tokens": 60, "n": 2, "best_of": 4, "seed": 9, **MORE}
MIROSTAT = {**RANKED, "best_of": 2, "mirostat": 2, "mirostat_tau": 2.0, "mirostat_eta": 0.5}
ASKED: list[dict[str, Any]] = [BEAMS, MIROSTAT, {**RANKED, "echo": True, "frequency_penalty": 0.2}]


def ask(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    return [answer["choices"], answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]]


@pytest.mark.parametrize(("layout", "seat"), [(COMPACT, "engine"), (FULL, "detokenizer")])
def test_they_come_out_the_same(layout: tuple[str, ...], seat: str) -> None:
    with live_server(*layout) as server, ThreadPoolExecutor(len(ASKED)) as later:
        undisturbed = list(later.map(partial(ask, server.url), ASKED))
        assert [(len(choices), count) for choices, _, count in undisturbed] == [(2, 4 * 60), (2, 2 * 60), (2, 4 * 60)]

        def struck_in_the_middle() -> bool:
            """Whether none had ended before; on a busy machine one may have."""
            until(lambda: is_healthy(server.url))
            before = metric(server.url, "octavo:steps_total")
            again = [later.submit(ask, server.url, body) for body in ASKED]
            until(lambda: metric(server.url, "octavo:steps_total") >= before + 6)
            in_time = not any(one.done() for one in again)
            strike(server, seat)
            assert [one.result() for one in again] == undisturbed
            return in_time

        until(struck_in_the_middle, 120)
        assert wait_idle(server.url)
