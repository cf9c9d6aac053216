"""Adapters by HTTP: asked for by name, loaded and unloaded by the operator, there again after an engine's death."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, refusing
from live_server import live_server, wait_idle
from serve_http import check_error, make_app, send
from test_guard import with_admin
from test_roles import COMPACT, TINY, children, operator, until

from octavo.engine.adapters import ServedAdapter
from octavo.engine.fixture import load_fixture
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FRENCH = ServedAdapter("french", "/adapters/fr", "0123", 8)
BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "a"}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_adapter_is_asked_for_by_its_name_as_the_model(path, body):
    engine = FakeEngine(served={"french": FRENCH})
    app = make_app(engine)
    for model, adapter, named in (("french", "0123", "french"), ("fake", "", "fake"), (None, "", "fake")):
        answer = send(app, "POST", path, json={**body, "model": model} if model else body)
        assert (answer.status_code, engine.adapted[-1]) == (200, adapter)
        assert answer.json()["model"] == named
    refused = send(app, "POST", path, json={**body, "model": "german"})
    assert refused.status_code == 404 and "served are fake, french." in refused.text
    assert len(engine.adapted) == 3


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_adapter_that_is_unloaded_before_the_engine_takes_the_request_in_is_a_404(path, body):
    engine = refusing("adapter")
    engine.served["french"] = FRENCH
    asked = {**body, "model": "french"}
    refused = send(make_app(engine), "POST", path, json=asked)
    assert refused.status_code == 404 and "was unloaded" in refused.text
    assert "was unloaded" in send(make_app(engine), "POST", path, json={**asked, "stream": True}).text


def test_a_refusal_names_a_few_of_many_adapters():
    served = {name: ServedAdapter(name, "", "0123", 8) for name in map("a{}".format, range(1000))}
    message = check_error(send(make_app(FakeEngine(served=served)), "GET", "/v1/models/german"), 404)["message"]
    assert "fake, a0, a1" in message and "993 others" in message and len(message) < 200


@pytest.mark.parametrize("path", ["/api/tags", "/api/ps"])
def test_ollama_lists_adapters_beside_the_model(path):
    base, card = send(make_app(FakeEngine(served={"french": FRENCH})), "GET", path).json()["models"]
    assert (base["name"], card["name"], card["model"], card["digest"]) == ("fake", "french", "french", "0123")
    assert card["details"]["parent_model"] == "fake" and card["size"] == base["size"]


def test_adapters_are_models_whose_parent_is_the_model():
    app = make_app(FakeEngine(served={"french": FRENCH}))
    base, card = send(app, "GET", "/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == ("fake", None)
    assert (card["id"], card["parent"], card["root"]) == ("french", "fake", "0123")
    assert "/adapters" not in json.dumps(card)
    assert send(app, "GET", "/v1/models/french").json() == card
    assert send(app, "GET", "/v1/models/german").status_code == 404


def test_the_operator_loads_and_unloads(tmp_path: Path) -> None:
    path, engine = tmp_path / "admin", FakeEngine()
    body = {"lora_name": "french", "lora_path": "/adapters/fr"}

    async def calls(admin: httpx.AsyncClient, public: httpx.AsyncClient) -> None:
        for route in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert (await public.post(route, json=body)).status_code == 404
        assert (await admin.post("/v1/load_lora_adapter", json=body)).json()["adapters"] == {"french": "/adapters/fr"}
        assert (await public.post(COMPLETIONS, json={"prompt": "a", "model": "french"})).status_code == 200
        assert engine.adapted == ["digest of /adapters/fr"]
        for wrong, field in (
            ({**body, "lora_path": "bad"}, "adapter: r"),
            ({**body, "lora_name": "fake"}, "lora_name"),
        ):
            error = (await admin.post("/v1/load_lora_adapter", json=wrong)).json()["error"]
            assert error["message"].startswith(field)
        assert (await admin.post("/v1/unload_lora_adapter", json={"lora_name": "french"})).json()["adapters"] == {}
        assert (await admin.post("/v1/unload_lora_adapter", json={"lora_name": "french"})).status_code == 400
        check_error(await public.post(COMPLETIONS, json={"prompt": "a", "model": "french"}), 404)

    with_admin(make_app(engine, admin_socket=str(path)), path, calls)


def complete(url: str, model: str | None, tokens: int = 12) -> Any:
    body = {
        "prompt": "hello there",
        "max_tokens": tokens,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{url}{COMPLETIONS}", json={**body, **({"model": model} if model else {})}, timeout=60)
    return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer.status_code


def test_loads_under_load_and_an_engine_that_dies(tmp_path: Path, adapter_folder) -> None:
    """Two folders take turns under one name while others are served; what was loaded is there again after a kill -9."""
    shapes = build_model(ModelConfig.from_dict(load_fixture(TINY).config)).projections()
    first, second, third = (adapter_folder(shapes, seed) for seed in (1, 2, 3))
    path = tmp_path / "admin"
    ask = operator(path)
    flags = ("--lora", f"one={first}", "--max-loras", "3", "--admin-socket", str(path))
    with live_server(*COMPACT, *flags) as server:
        names = [card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]]
        assert names[1:] == ["one"]
        wanted = {name: complete(server.url, name) for name in (None, "one")}
        assert wanted[None] != wanted["one"]
        wrong: list[Any] = []

        def keep_asking(name: str | None) -> None:
            wrong.extend(got for _ in range(3) if (got := complete(server.url, name)) != wanted[name])

        threads = [threading.Thread(target=keep_asking, args=(name,)) for name in (None, "one", "one")]
        for thread in threads:
            thread.start()
        seen: dict[str, Any] = {}
        for folder in (second, third) * 2:
            assert ask("POST", "/v1/load_lora_adapter", lora_name="two", lora_path=folder)["adapters"]["two"] == folder
            got = complete(server.url, "two")
            assert seen.setdefault(folder, got) == got
            ask("POST", "/v1/unload_lora_adapter", lora_name="two")
            assert complete(server.url, "two") == 404
        for thread in threads:
            thread.join()
        assert not wrong
        assert len({tuple(ids) for ids in (*seen.values(), *wanted.values())}) == 4
        ask("POST", "/v1/load_lora_adapter", lora_name="two", lora_path=second)
        os.kill(children(server.process.pid)["engine"], signal.SIGKILL)
        assert until(lambda: complete(server.url, "two") == seen[second])
        assert complete(server.url, "one") == wanted["one"]
        refused = ask("POST", "/v1/load_lora_adapter", lora_name="x", lora_path=str(tmp_path))
        assert "cannot be opened" in refused["error"]["message"]
        front = children(server.process.pid)["api-0"]
        for name, place, param in (("x", "/" * 5000, "lora_path"), ("x" * 999, first, "lora_name")):
            assert ask("POST", "/v1/load_lora_adapter", lora_name=name, lora_path=place)["error"]["param"] == param
        assert ask("POST", "/v1/unload_lora_adapter", lora_name="x" * 999)["error"]["param"] == "lora_name"
        assert children(server.process.pid)["api-0"] == front
        assert wait_idle(server.url)
