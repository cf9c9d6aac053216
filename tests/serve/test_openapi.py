"""The OpenAPI document says what the routes do: held to them, and walked."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import FakeEngine
from from_schema import resolved, values
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from parameter_matrix import BODIES, OTHERS, TURNS
from serve_http import JSON, make_app, send, send_all
from starlette.routing import Route
from test_guard import ANN, as_, key_file

from octavo.serve import names
from octavo.serve.app import dialect_of
from octavo.serve.described import description_of
from octavo.serve.errors import ApiError
from octavo.serve.static import PATHS

FOLDER = TemporaryDirectory()
APP = make_app(FakeEngine(max_seq_len=99), batch_dir=FOLDER.name)
DOCUMENT = send(APP, "GET", "/openapi.json").json()
ROUTES = [route for route in APP.routes if isinstance(route, Route) and route.path not in PATHS]
OPERATIONS = {
    f"{method.upper()} {path}": (path, method, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}
ENDLESS = "GET /v1/live"
BODIED = [
    name
    for name, (_, _, told) in OPERATIONS.items()
    if "application/json" in told.get("requestBody", {}).get("content", ())
]
EVERY = pytest.mark.parametrize("name", [name for name in OPERATIONS if name != ENDLESS])


def described(path: str) -> str:
    return path.replace(":path}", "}")


def test_every_route_is_there_with_its_methods_and_nothing_else() -> None:
    routed = {f"{method} {described(route.path)}" for route in ROUTES for method in (route.methods or set()) - {"HEAD"}}
    assert routed == set(OPERATIONS) and "POST /v1/chat/completions" in routed
    ids = [operation["operationId"] for _, _, operation in OPERATIONS.values()]
    assert len(set(ids)) == len(ids)
    assert all(operation["summary"] for _, _, operation in OPERATIONS.values())


def test_every_schema_is_one_and_every_reference_leads_somewhere() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for found in re.findall(r'"\$ref":"([^"]*)"', msgspec.json.encode(DOCUMENT).decode()):
        assert resolved({"$ref": found}, DOCUMENT)


@EVERY
def test_a_body_is_read_as_the_type_that_is_described(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, method, operation = OPERATIONS[name]
    route = next(r for r in ROUTES if described(r.path) == path and method.upper() in (r.methods or ()))
    about, read = description_of(route.endpoint), set()
    decoded = names._decoded

    def recorded(body: Any, kind: Any, known: Any, prefix: str) -> Any:
        read.add((kind, id(known)))
        return decoded(body, kind, known, prefix)

    monkeypatch.setattr(names, "_decoded", recorded)
    bodies = [{"messages": TURNS}, {"prompt": "a"}, {"input": "a"}, {"tokens": [1]}]
    send_all(APP, [(method, path.replace("{", "").replace("}", ""), {"json": body}) for body in bodies])
    parts = {(kind, id(known)) for kind, known in about.parts.values()}
    assert read == {(kind, id(about.names)) for kind in about.takes} | parts
    assert bool(about.takes or about.form) == ("requestBody" in operation)


def test_the_matrix_of_parameters_is_of_the_same_types() -> None:
    told = {(route.path, kind, id(about.names)) for route, about in _about() for kind in about.takes}
    told |= {(r.path, kind, id(known)) for r, about in _about() for kind, known in about.parts.values()}
    assert {(body.path, body.kind, id(body.names)) for body in [*BODIES, *OTHERS]} <= told


def _about() -> list[tuple[Route, Any]]:
    return [(route, description_of(route.endpoint)) for route in ROUTES]


def test_an_error_has_the_shape_that_its_dialect_describes() -> None:
    for prefix in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/nowhere"):
        dialect = dialect_of(prefix)
        for status in range(400, 600):
            error = ApiError(status, "No.", param="max_tokens" if status % 2 else None)
            body = msgspec.json.decode(bytes(dialect.error_response(error).body))
            assert msgspec.convert(body, dialect.error_kind, strict=True)


def check(name: str, answer: httpx.Response) -> None:
    """An answer is one of those that the document tells of."""
    told = OPERATIONS[name][2]["responses"].get(str(answer.status_code))
    assert told is not None, (name, answer.status_code, answer.text)
    assert answer.status_code != 500, answer.text
    told = resolved(told, DOCUMENT)
    media = answer.headers["content-type"].partition(";")[0]
    assert media in told["content"], (name, media)
    if media == "application/json":
        schema = {**told["content"][media]["schema"], "components": DOCUMENT["components"]}
        Draft202012Validator(schema).validate(answer.json())
    for header, about in told.get("headers", {}).items():
        assert header.lower() in answer.headers or not about.get("required")


@EVERY
def test_each_operation_answers_as_it_says(name: str) -> None:
    path, method, _ = OPERATIONS[name]
    turns = {"messages": TURNS, "max_tokens": 3}
    bodies = [{}, turns, {**turns, "stream": True}, {"prompt": "a"}, {"input": "a"}, {"tokens": [1]}]
    bodies += [{"query": "a", "documents": ["b"]}, {"text_1": "a", "text_2": "b"}]
    address = path.replace("{model}", "fake").replace("{", "").replace("}", "")
    plain = {"content": b"a", "headers": {"content-type": "text/plain"}}
    answers = send_all(APP, [(method, address, {"json": body}) for body in bodies] + [(method, address, plain)])
    assert answers[-1].status_code == 415 or name not in BODIED
    for answer in answers:
        check(name, answer)
    assert any(answer.status_code == 200 for answer in answers) or "{" in path or name in OF_A_FILE


OF_A_FILE = ("POST /v1/files", "POST /v1/batches")


def test_what_is_done_with_a_file_answers_as_it_says() -> None:
    form = {"files": {"file": ("a.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
    kept = send(APP, "POST", "/v1/files", **form)
    body = {"input_file_id": kept.json()["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
    made = send(APP, "POST", "/v1/batches", json=body)
    assert kept.status_code == made.status_code == 200
    check("POST /v1/files", kept)
    check("POST /v1/batches", made)
    for name, found in (("GET /v1/files/{file_id}", kept), ("GET /v1/batches/{batch_id}", made)):
        check(name, send(APP, "GET", f"{name[4:].partition('{')[0]}{found.json()['id']}"))
    check("GET /v1/files/{file_id}/content", send(APP, "GET", f"/v1/files/{kept.json()['id']}/content"))
    check("DELETE /v1/files/{file_id}", send(APP, "DELETE", f"/v1/files/{kept.json()['id']}"))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(BODIED), st.data())
def test_what_the_document_allows_is_answered_as_it_says(name: str, data: st.DataObject) -> None:
    path, method, told = OPERATIONS[name]
    (media,) = told["requestBody"]["content"].values()
    body = data.draw(values(media["schema"], DOCUMENT))
    if data.draw(st.booleans()):
        body = {**body, **data.draw(st.dictionaries(st.sampled_from(sorted(body) or ["x"]), JSON, max_size=2))}
    check(name, send(APP, method, path, json=body))


def test_a_refused_method_is_told_all_that_its_path_takes() -> None:
    for path, told in DOCUMENT["paths"].items():
        address = path.replace("{", "").replace("}", "")
        taken = {method.upper() for method in told} | ({"HEAD"} if "get" in told else set())
        for answer in send_all(APP, [(method, address, {}) for method in ("PUT", "PATCH", "OPTIONS", "TRACE")]):
            assert answer.status_code == 405 and answer.headers["allow"] == ", ".join(sorted(taken)), path


def test_where_there_are_keys_the_document_asks_for_one_wherever_the_guard_does(tmp_path: Path) -> None:
    app = make_app(key_file=key_file(tmp_path))
    document = send(app, "GET", "/openapi.json", headers=as_(ANN)).json()
    for path, methods in document["paths"].items():
        for method, told in methods.items():
            answer = send(app, method, path.replace("{", "").replace("}", ""))
            assert ("security" in told) == ("401" in told["responses"]) == (answer.status_code == 401), path
