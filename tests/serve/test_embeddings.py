"""Texts as vectors, and texts compared: every route's shape, its errors and its limits, against a fake engine."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
from fake_engine import HIDDEN, FakeEngine, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_http import Client, check_error, make_app, post, send
from test_guard import ANN, as_, key_file

from octavo.core.errors import InvalidInput
from octavo.engine.vectors import check_dimensions, cosine, packed, vector_of
from octavo.models.pooling import Pooling
from octavo.weights.pooling import pooling_of_folder, pooling_of_metadata
from octavo.weights.tensors import CorruptFile

EMBEDDINGS = "/v1/embeddings"
VECTORS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=12)


def raw(text: str) -> list[float]:
    return list(struct.unpack(f"<{HIDDEN}f", state_of(text.encode())))


def unit(values: list[float]) -> Any:
    return pytest.approx([value / math.hypot(*values) for value in values], rel=1e-6)


def test_openais_shape_in_both_encodings() -> None:
    engine = FakeEngine()
    asked = {"input": ["aab", "cab", "fff"], "request_id": "mine"}
    plain = post(EMBEDDINGS, asked, engine=engine).json()
    assert {"object", "id", "model", "created", "data", "usage"} == set(plain)
    assert (plain["object"], plain["id"], plain["model"]) == ("list", "embd-mine", "fake")
    assert plain["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert [(item["object"], item["index"]) for item in plain["data"]] == [("embedding", i) for i in range(3)]
    for text, item in zip(asked["input"], plain["data"], strict=True):
        assert item["embedding"] == unit(raw(text))
    coded = post(EMBEDDINGS, {**asked, "encoding_format": "base64"}).json()["data"]
    decoded = [list(struct.unpack(f"<{HIDDEN}f", base64.b64decode(item["embedding"]))) for item in coded]
    assert decoded == [item["embedding"] for item in plain["data"]]
    assert {params.pooling for _, params, _ in engine.asked} == {"last"}
    assert {params.max_tokens for _, params, _ in engine.asked} == {0}


@pytest.mark.parametrize(
    ("given_", "prompts"),
    [("ab", ["ab"]), ([97, 98], ["ab"]), (["ab", "c"], ["ab", "c"]), ([[97, 98], [99]], ["ab", "c"])],
)
def test_an_input_is_a_text_or_ids_or_a_list_of_either(given_: Any, prompts: list[str]) -> None:
    engine = FakeEngine()
    answer = post(EMBEDDINGS, {"input": given_}, engine=engine)
    assert [bytes(prompt).decode() for prompt, _, _ in engine.asked] == prompts
    assert len(answer.json()["data"]) == len(prompts)


def test_what_a_request_leaves_open_is_the_models() -> None:
    own = FakeEngine(pooling=Pooling("mean", normalize=False))
    assert post(EMBEDDINGS, {"input": "ab"}, engine=own).json()["data"][0]["embedding"] == raw("ab")
    asked = {"input": "ab", "pooling": "cls", "normalize": True}
    assert post(EMBEDDINGS, asked, engine=own).json()["data"][0]["embedding"] == unit(raw("ab"))
    assert [params.pooling for _, params, _ in own.asked] == ["mean", "cls"]


def test_dimensions_cut_and_bring_to_length_one_again() -> None:
    for count in range(1, HIDDEN + 1):
        (item,) = post(EMBEDDINGS, {"input": "aabbbc", "dimensions": count}).json()["data"]
        assert item["embedding"] == unit(raw("aabbbc")[:count])
    loose = post(EMBEDDINGS, {"input": "aabbbc", "dimensions": 2, "normalize": False}).json()["data"]
    assert loose[0]["embedding"] == raw("aabbbc")[:2]


ERRORS: list[tuple[str, dict[str, Any], str | None, str]] = [
    (EMBEDDINGS, {}, "input", "input: is missing"),
    (EMBEDDINGS, {"input": []}, "input", "input: must be a string"),
    (EMBEDDINGS, {"input": ""}, "input", "input: is empty"),
    (EMBEDDINGS, {"input": ["a", ""]}, "input", "input: is empty"),
    (EMBEDDINGS, {"input": [300]}, "input", "input: 300 is no token id"),
    (EMBEDDINGS, {"input": ["a"] * 5}, "input", "input: has 5 prompts; at most 4"),
    (EMBEDDINGS, {"input": "a" * 513}, "input", "input: has 513 tokens, but the context holds 512"),
    (EMBEDDINGS, {"input": {"a": 1}}, "input", "input: must be a string"),
    (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions", "dimensions = 0: give a number from 1 to 6"),
    (EMBEDDINGS, {"input": "a", "dimensions": 7}, "dimensions", "dimensions = 7: give a number from 1 to 6"),
    (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format: "),
    (EMBEDDINGS, {"input": "a", "pooling": "max"}, "pooling", "pooling: give one of last, mean, cls"),
    (EMBEDDINGS, {"input": "a", "embed_dtype": "float16"}, "embed_dtype", "embed_dtype: values are float32"),
    (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "truncate_prompt_tokens: a p"),
    (EMBEDDINGS, {"input": "a", "priority": 1 << 40}, "priority", "priority: must be"),
    ("/rerank", {"documents": ["a"]}, "query", "query: is missing"),
    ("/rerank", {"query": "a"}, "documents", "documents: is missing or empty"),
    ("/rerank", {"query": "a", "documents": []}, "documents", "documents: is missing or empty"),
    ("/rerank", {"query": "a", "documents": ["b", {"title": "c"}]}, "documents", "documents[1]: must be a text"),
    ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents", "documents: is empty"),
    ("/rerank", {"query": "a", "documents": ["b"] * 4}, "documents", "documents: has 4 texts; at most 3"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n: must be 0 (all) or more"),
    ("/score", {"text_2": "a"}, "text_1", "text_1: is missing or empty"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2", "text_2: is missing or empty"),
    ("/v1/score", {"text_1": ["a", "b"], "text_2": "a"}, "text_1", "text_1: has 2 texts and text_2 has 1"),
]


@pytest.mark.parametrize(("path", "body", "param", "begin"), ERRORS)
def test_errors_name_the_parameter_and_the_remedy(path: str, body: dict[str, Any], param: str, begin: str) -> None:
    answer = post(path, body, max_inputs=4)
    assert check_error(answer, 400, param)["message"].startswith(begin), answer.text


def test_results_are_ranked_and_ties_stay_in_order() -> None:
    asked = {"query": "aaaa", "documents": ["bbbb", {"text": "aaab"}, "aaaa", "bbbb", "aabb"]}
    answer = post("/v1/rerank", asked).json()
    assert [result["index"] for result in answer["results"]] == [2, 1, 4, 0, 3]
    assert [result["document"]["text"] for result in answer["results"]][:2] == ["aaaa", "aaab"]
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores[0] == pytest.approx(1.0) and scores == sorted(scores, reverse=True)
    assert scores[1] == cosine(state_of(b"aaaa"), state_of(b"aaab"))
    assert answer["usage"] == {"prompt_tokens": 24, "total_tokens": 24} and answer["model"] == "fake"
    few = post("/rerank", {**asked, "top_n": 2, "return_documents": False}).json()["results"]
    assert few == [{"index": i, "relevance_score": s} for i, s in zip((2, 1), scores[:2], strict=True)]
    assert len(post("/v2/rerank", {**asked, "top_n": 0}).json()["results"]) == 5


def test_scores_of_one_against_many_and_of_pairs() -> None:
    one = post("/score", {"text_1": "ab", "text_2": ["ab", "cd"]}).json()
    assert one["object"] == "list" and [item["object"] for item in one["data"]] == ["score"] * 2
    assert [item["index"] for item in one["data"]] == [0, 1]
    assert one["data"][0]["score"] == pytest.approx(1.0)
    pairs = post("/v1/score", {"text_1": ["ab", "cc"], "text_2": ["cd", "cc"]}).json()["data"]
    assert [pairs[0]["score"], pairs[1]["score"]] == [one["data"][1]["score"], pytest.approx(1.0)]


def test_ollamas_routes() -> None:
    asked = {"model": "fake:latest", "input": ["ab", "c"], "dimensions": 3, "truncate": True}
    answer = post("/api/embed", asked).json()
    assert answer["embeddings"] == [unit(raw(text)[:3]) for text in ("ab", "c")]
    assert (answer["prompt_eval_count"], answer["load_duration"]) == (3, 0) and answer["total_duration"] > 0
    assert [warning["param"] for warning in answer["warnings"]] == ["truncate"]
    old = post("/api/embeddings", {"model": "fake", "prompt": "abb", "options": {"num_ctx": 9}}).json()
    assert old["embedding"] == raw("abb") and old["warnings"][0]["param"] == "options"
    assert post("/api/embed", {"model": "fake"}).json() == {"model": "fake", "embeddings": []}
    assert post("/api/embeddings", {"model": "fake", "prompt": ""}).json() == {"embedding": []}
    assert post("/api/embed", {"model": "other", "input": "a"}).status_code == 404
    assert post("/api/embed", {"input": [""]}).json()["error"].startswith("input: is empty")
    assert all(post("/api/embed", {"input": wrong}).status_code == 400 for wrong in (False, 0, {}))
    assert post("/rerank", {"query": "", "documents": ["a"]}).status_code == 400


def test_a_great_many_texts_enter_the_engine_a_few_at_a_time() -> None:
    engine, most = FakeEngine(), 0
    generate = engine.generate

    def watched(*args: Any, **options: Any) -> Any:
        nonlocal most
        most = max(most, engine.live + 1)
        return generate(*args, **options)

    engine.generate = watched  # type: ignore[method-assign]
    texts = ["abcdef"[i % 6] * (1 + i // 6) for i in range(300)]
    answer = post(EMBEDDINGS, {"input": texts}, engine=engine, max_pending=70).json()
    assert [item["embedding"] for item in answer["data"]] == [unit(raw(text)) for text in texts]
    assert 32 <= most <= 64 and engine.live == 0


def test_a_client_that_leaves_is_noticed() -> None:
    async def go() -> FakeEngine:
        engine = FakeEngine(hold=True)
        client = Client(make_app(engine), EMBEDDINGS, {"input": ["a"] * 100})
        task = asyncio.ensure_future(client.run())
        while engine.live < 64:
            await asyncio.sleep(0)
        client.leave()
        await task
        return engine

    engine = asyncio.run(go())
    assert engine.live == 0 and engine.cancelled == 64 == len(engine.asked)


def test_quotas_and_the_ledger_count_these_requests(tmp_path: Path) -> None:
    app = make_app(key_file=key_file(tmp_path))
    asked = {"input": ["ab", "cde"], "request_id": "vectors"}
    assert send(app, "POST", EMBEDDINGS, json=asked).status_code == 401
    assert send(app, "POST", EMBEDDINGS, json=asked, headers=as_(ANN)).status_code == 200
    told = send(app, "GET", "/v1/requests/vectors", headers=as_(ANN)).json()
    assert told["status"] == "finished"
    text = send(app, "GET", "/metrics", headers=as_(ANN)).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:prompt_tokens_total{")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in lines) == 5.0
    ends = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
    assert len(ends) == 1 and 'finished_reason="stop"' in ends[0] and ends[0].endswith(" 2.0")


@settings(max_examples=40)
@given(VECTORS, st.data())
def test_a_vector_is_cut_brought_to_length_one_and_packed(values: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    kept, hidden = values[:count], packed(values)
    assert vector_of(hidden, normalize=False, dimensions=count) == kept
    long = vector_of(hidden, normalize=True, dimensions=count)
    length = math.hypot(*kept)
    assert long == (pytest.approx([v / length for v in kept], rel=1e-6, abs=1e-40) if length > 1e-150 else kept)
    other = packed(data.draw(st.lists(st.floats(-9, 9, width=32), min_size=len(values), max_size=len(values))))
    assert -1.0 <= cosine(hidden, other) == cosine(other, hidden) <= 1.0
    if math.hypot(*values) > 1e-150:
        assert cosine(hidden, hidden) == pytest.approx(1.0)
    with pytest.raises(InvalidInput, match="dimensions"):
        check_dimensions(len(values) + 1, len(values))


def folder(path: Path, modules: Any, pooling: Any = None) -> Path:
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {}))
    return path


def module(kind: str, path: str = "") -> dict[str, Any]:
    return {"idx": 0, "name": "0", "path": path, "type": f"sentence_transformers.models.{kind}"}


STACK = [module("Transformer"), module("Pooling", "1_Pooling")]


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True, "word_embedding_dimension": 8}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_models_folder_says_how_texts_are_pooled(tmp_path: Path, config: Any, kind: str) -> None:
    assert pooling_of_folder(tmp_path) == Pooling("last", normalize=True)
    assert pooling_of_folder(folder(tmp_path, STACK, config)) == Pooling(kind, normalize=False)
    longer = [*STACK, module("Normalize", "2_Normalize")]
    assert pooling_of_folder(folder(tmp_path, longer, config)) == Pooling(kind, normalize=True)


def test_what_a_folder_asks_for_and_is_not_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="Dense"):
        pooling_of_folder(folder(tmp_path, [*STACK, module("Dense")], {"pooling_mode": "mean"}))
    for config in ({"pooling_mode_max_tokens": True}, {"pooling_mode": "max"}, {}):
        with pytest.raises(InvalidInput, match="pooling_mode"):
            pooling_of_folder(folder(tmp_path, STACK, config))
    with pytest.raises(CorruptFile, match="path"):
        pooling_of_folder(folder(tmp_path, [module("Pooling", "../1_Pooling")]))
    for modules in ({}, [1], [{"type": 3}]):
        with pytest.raises(CorruptFile):
            pooling_of_folder(folder(tmp_path, modules))


def test_a_gguf_file_says_how_texts_are_pooled() -> None:
    for number, kind in ((0, "last"), (1, "mean"), (2, "cls"), (3, "last"), (9, "last")):
        metadata = {"general.architecture": "qwen3", "qwen3.pooling_type": number}
        assert pooling_of_metadata(metadata) == Pooling(kind)
    assert pooling_of_metadata({}) == Pooling()
