"""The model store, without a network: sources, verification, resumption, crashes, concurrency, offline."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.weights import store as store_module
from octavo.weights.fetching import FetchJob, SourceFailed
from octavo.weights.sources import DEFAULT_MODEL, KNOWN_MODELS, HubSource, KnownModel, PackageSource
from octavo.weights.store import ModelStore, ModelUnavailable, default_cache_dir

CONTENT = b"GGUF and so on" * 100


@dataclass(frozen=True)
class Fake:
    """A source that gives `content`, or fails for `reason`."""

    name: str
    content: bytes = CONTENT
    reason: str = ""

    def __str__(self) -> str:
        return self.name


class Listener:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def progress(self, label: str, total: int) -> Any:
        yield lambda done: None


def known(*sources: Fake) -> KnownModel:
    digest = hashlib.sha256(CONTENT).hexdigest()
    return KnownModel("tiny-model", "Tiny", "MIT", "tiny.gguf", len(CONTENT), digest, sources)  # type: ignore[arg-type]


class Bench:
    """A store over fake sources, which logs what was asked of them."""

    def __init__(self, folder: Path, *sources: Fake, offline: bool = False) -> None:
        self.asked: list[str] = []
        self.listener = Listener()
        self.model = known(*sources)
        self.place = folder / "tiny-model" / "tiny.gguf"
        self.store = ModelStore(folder, offline, self.listener, known=[self.model], fetchers={Fake: self.fetch})

    def fetch(self, source: Fake, job: FetchJob) -> Path:
        self.asked.append(source.name)
        if source.reason:
            raise SourceFailed(source.reason)
        (job.work / "arrived").write_bytes(source.content)
        return job.work / "arrived"

    def resolve(self) -> Path:
        return self.store.resolve("tiny-model").path


def test_the_first_source_that_works_is_used_and_then_the_cache(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Fake("one", reason="no route"), Fake("two"), Fake("three"))
    resolved = bench.store.resolve("Tiny-Model")
    assert (resolved.kind, resolved.name, resolved.licence, resolved.source) == ("gguf", "tiny-model", "MIT", "two")
    assert resolved.path == bench.place
    assert resolved.path.read_bytes() == CONTENT
    assert bench.store.resolve("tiny-model").source == "cache"
    assert bench.asked == ["one", "two"]
    assert "one: no route" in bench.listener.lines
    assert sorted(os.listdir(bench.place.parent)) == [".lock", "tiny.gguf", "tiny.gguf.verified"]


@settings(max_examples=30, deadline=None)
@given(plan=st.lists(st.sampled_from(["fails", "wrong", "short", "right"]), min_size=1, max_size=5))
def test_order_reasons_and_nothing_unverified(plan: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    contents = {"wrong": CONTENT[::-1], "short": CONTENT[:-1], "right": CONTENT, "fails": b""}
    sources = [Fake(f"{i}", contents[what], "down" if what == "fails" else "") for i, what in enumerate(plan)]
    bench = Bench(tmp_path_factory.mktemp("store"), *sources)
    upto = plan.index("right") + 1 if "right" in plan else len(plan)
    if "right" in plan:
        assert bench.resolve().read_bytes() == CONTENT
    else:
        with pytest.raises(ModelUnavailable) as caught:
            bench.resolve()
        words = {"fails": "down", "wrong": "SHA-256 is", "short": f"{len(CONTENT) - 1} bytes arrived"}
        assert [name for name, _ in caught.value.attempts] == [source.name for source in sources]
        assert all(words[what] in reason for what, (_, reason) in zip(plan, caught.value.attempts, strict=True))
        assert all(f"{name}: {reason}" in str(caught.value) for name, reason in caught.value.attempts)
        assert "what to do" in str(caught.value)
        assert not bench.place.exists()
    assert bench.asked == [source.name for source in sources[:upto]]


def test_wrong_bytes_are_not_kept_and_parts_of_a_failed_attempt_are(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Fake("wrong", CONTENT[::-1]), Fake("breaks"))
    seen: list[bool] = []

    def fetch(source: Fake, job: FetchJob) -> Path:
        if source.name == "wrong":
            return bench.fetch(source, job)
        seen.append((job.work / "part").exists())
        (job.work / "part").write_bytes(b"half")
        raise SourceFailed("cut")

    bench.store = ModelStore(tmp_path, False, bench.listener, known=[bench.model], fetchers={Fake: fetch})
    for _ in range(2):
        with pytest.raises(ModelUnavailable):
            bench.resolve()
    assert seen == [False, True]
    assert not list(tmp_path.rglob("arrived"))


class Crash(BaseException):
    """The process ends here."""


STEPS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before verification": lambda patch: patch.setattr(store_module, "_mismatch", crash),
    "before the move": lambda patch: patch.setattr(store_module, "_sync", crash),
    "in the move": lambda patch: patch.setattr(store_module.os, "replace", crash),
    "before the marker": lambda patch: patch.setattr(ModelStore, "_mark", crash),
    "in the clean-up": lambda patch: patch.setattr(store_module.shutil, "rmtree", crash),
}


def crash(*args: Any, **kwargs: Any) -> Any:
    raise Crash


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_between_steps_leaves_nothing_false(step: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path, Fake("one"))
    with pytest.MonkeyPatch.context() as patch:
        STEPS[step](patch)
        with pytest.raises(Crash):
            bench.resolve()
    for model in bench.store.cached_models():
        assert model.path.read_bytes() == CONTENT
    assert bench.resolve().read_bytes() == CONTENT
    assert [model.name for model in bench.store.cached_models()] == ["tiny-model"]


def test_a_changed_file_is_not_trusted(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Fake("one"))
    bench.resolve()
    for change in (CONTENT[::-1], CONTENT[:-1], b""):
        bench.place.write_bytes(change)
        os.utime(bench.place, ns=(1, 1))
        assert bench.store.cached_models() == []
        assert bench.resolve().read_bytes() == CONTENT
    assert len(bench.asked) == 4


def test_a_right_file_put_there_by_hand_is_taken(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Fake("one"), offline=True)
    bench.place.parent.mkdir()
    bench.place.write_bytes(CONTENT)
    assert bench.resolve() == bench.place
    assert bench.asked == []


def test_a_cache_that_cannot_be_written_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(store: ModelStore, model: KnownModel) -> None:
        raise PermissionError("read-only")

    bench = Bench(tmp_path, Fake("one"), offline=True)
    bench.place.parent.mkdir()
    bench.place.write_bytes(CONTENT)
    monkeypatch.setattr(ModelStore, "_mark", refuse)
    assert bench.resolve() == bench.place


@pytest.mark.parametrize("threads", [2, 5])
def test_concurrent_resolvers_fetch_once(threads: int, tmp_path: Path) -> None:
    inside, go = threading.Event(), threading.Event()
    benches = [Bench(tmp_path, Fake("one")) for _ in range(threads)]
    asked: list[str] = []

    def fetch(source: Fake, job: FetchJob) -> Path:
        asked.append(source.name)
        inside.set()
        go.wait(10)
        return benches[0].fetch(source, job)

    results: list[Path] = []
    for bench in benches:
        bench.store = ModelStore(tmp_path, False, bench.listener, known=[bench.model], fetchers={Fake: fetch})
    workers = [threading.Thread(target=lambda b=bench: results.append(b.resolve())) for bench in benches]
    for worker in workers:
        worker.start()
    assert inside.wait(10)
    go.set()
    for worker in workers:
        worker.join(10)
    assert results == [benches[0].place] * threads
    assert asked == ["one"]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was tried is listed: a thread's error would not reach the test."""
    tried: list[Any] = []

    def refuse(*args: Any, **kwargs: Any) -> Any:
        tried.append(args)
        raise AssertionError("the network or a process was used offline")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(subprocess, "run", refuse)
    return tried


def test_offline_touches_neither_network_nor_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[Any]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    store = ModelStore(tmp_path, offline=True, reporter=Listener())
    for model in store.known_models():
        with pytest.raises(ModelUnavailable, match=r"not in the cache[\s\S]*without --offline"):
            store.resolve(model.name)
    with pytest.raises(ModelUnavailable, match=r"octavo-test/nothing-here[\s\S]*without --offline"):
        store.resolve("octavo-test/nothing-here")
    assert no_network == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_network")
def test_the_network_guard_guards(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="used offline"):
        ModelStore(tmp_path, offline=False, reporter=Listener()).resolve(DEFAULT_MODEL)


def test_files_and_folders_resolve_to_themselves(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "cache", offline=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "one.gguf").write_bytes(b"x")
    folder, file = store.resolve(tmp_path / "model"), store.resolve(str(tmp_path / "ggufs" / "one.gguf"))
    assert (folder.path, folder.kind, folder.name) == (tmp_path / "model", "folder", "model")
    assert (file.path, file.kind, file.name) == (tmp_path / "ggufs" / "one.gguf", "gguf", "one")
    assert store.resolve(tmp_path / "ggufs").path == file.path
    (tmp_path / "ggufs" / "two.gguf").write_bytes(b"x")
    with pytest.raises(InvalidInput, match=r"2 \.gguf files: name one"):
        store.resolve(tmp_path / "ggufs")
    with pytest.raises(InvalidInput, match=r"give a folder with config\.json"):
        store.resolve(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2", "did you mean smollm2-135m-instruct"), ("gemma3-270m", "did you mean gemma-3-270m"),
        ("qqqq", "known are smollm2-135m-instruct, gemma-3-270m"), ("./no/file", "no such file"),
        ("org/model.gguf", "no such file"), ("a/../b", "known are"), ("", "known are"), ("a/b/c", "known are"),
    ],
)  # fmt: skip
def test_an_unknown_name_says_what_is_known(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        ModelStore(tmp_path).resolve(name or "?")
    assert caught.value.field == "model"


def test_too_little_disk_is_said_before_fetching(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Fake("one"))
    bench.store._known["tiny-model"] = replace(bench.model, size=1 << 60)
    with pytest.raises(InvalidInput, match=r"disk space.*OCTAVO_HOME"):
        bench.resolve()
    assert bench.asked == []


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / "models"
    monkeypatch.delenv("OCTAVO_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "octavo" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path("~/.cache/octavo/models").expanduser()


def test_the_table_of_known_models_is_complete() -> None:
    assert KNOWN_MODELS[0].name == DEFAULT_MODEL
    assert len({model.name for model in KNOWN_MODELS}) == len(KNOWN_MODELS)
    for model in KNOWN_MODELS:
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.licence
        assert len(model.sources) == 2


def test_the_documentation_tells_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    for model in KNOWN_MODELS:
        for fact in (model.name, model.filename, f"{model.size:,}", model.licence, model.sha256):
            assert fact in page
        packages, hub = model.sources
        assert isinstance(packages, PackageSource)
        assert isinstance(hub, HubSource)
        assert packages.wheels[0].package in page
        assert f"=={packages.wheels[0].version}" in page
        assert hub.repo in page


def test_damage_that_keeps_size_and_time_is_found_by_reading_and_then_fetched_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Fake("one"))
    bench.resolve()
    assert bench.store.damage("tiny-model") is None
    held = os.stat(bench.place)
    bench.place.write_bytes(b"X" + CONTENT[1:])
    os.utime(bench.place, ns=(held.st_atime_ns, held.st_mtime_ns))
    bench.resolve()
    assert bench.asked == ["one"]  # a start hashes nothing
    assert "SHA-256" in (bench.store.damage("tiny-model") or "")
    assert bench.resolve().read_bytes() == CONTENT and bench.asked == ["one", "one"]


@pytest.mark.parametrize("marker", [b"", b"[]", b"\xff", b"[" * 100_000])
def test_a_marker_of_anything_else_is_no_marker(tmp_path: Path, marker: bytes) -> None:
    bench = Bench(tmp_path, Fake("one"))
    bench.resolve()
    bench.place.with_name("tiny.gguf.verified").write_bytes(marker)
    assert bench.resolve().read_bytes() == CONTENT
    assert bench.asked == ["one"]


def test_a_cache_that_is_only_read_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, Fake("one"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InvalidInput, match="OCTAVO_HOME"):
        bench.resolve()
    assert bench.asked == []
