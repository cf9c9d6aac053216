"""Settings of `octavo serve` from flags, the environment and a file: who wins, what is refused and how it is said."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.cli.layers import converted, from_file, shown_config
from octavo.cli.main import main
from octavo.core.errors import InvalidInput
from octavo.engine.config import EngineConfig
from octavo.serve.config import ServeConfig

TINY = str(Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json")
SETTINGS = {
    "port": st.integers(0, 65535).map(str),
    "max-pending": st.integers(1, 10**6).map(str),
    "body-timeout": st.sampled_from(["0.5", "1.0", "2.25"]),
    "log-level": st.sampled_from(["critical", "info"]),
    "audit": st.sampled_from(["true"]),
    "no-prefix-cache": st.sampled_from(["true"]),
    "kv-memory": st.sampled_from(["1GiB", "2GiB"]),
}


def serve(*arguments: str, **variables: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `octavo serve` with these variables alone."""
    out, err = io.StringIO(), io.StringIO()
    kept = {name: text for name, text in os.environ.items() if not name.startswith("OCTAVO_")}
    argv = ["octavo", "serve", *arguments]
    with (
        mock.patch.dict(os.environ, {**kept, **variables}, clear=True),
        mock.patch.object(sys, "argv", argv),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def shown(out: str) -> dict[str, tuple[str, str]]:
    """Value and origin of each setting."""
    rows = (line.partition(": ") for line in out.splitlines())
    return {key: tuple(part.strip(' "') for part in rest.rsplit("  # ", 1)) for key, _, rest in rows}  # type: ignore[misc]


layer = st.fixed_dictionaries({}, optional=SETTINGS)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flags=layer, variables=layer, lines=layer)
def test_a_flag_comes_before_the_environment_before_the_file(
    flags: dict[str, str], variables: dict[str, str], lines: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("# ours\n" + "".join(f"{name}: {text}\n" for name, text in lines.items()))
    typed = [
        part for name, text in flags.items() for part in ([f"--{name}"] if text == "true" else [f"--{name}", text])
    ]
    named = {f"OCTAVO_{name.replace('-', '_').upper()}": text for name, text in variables.items()}
    code, out, err = serve("--config", str(file), "--print-config", *typed, **named)
    assert code == 0, err
    found = shown(out)
    for name in SETTINGS:
        expected = flags.get(name, variables.get(name, lines.get(name)))
        if expected is None:
            assert found[name][1] == "default"
            continue
        assert found[name][0] == expected
        where = f"OCTAVO_{name.replace('-', '_').upper()}" if name in variables else "octavo.yaml line "
        assert found[name][1].startswith("flag" if name in flags else where)
    again = tmp_path / "again.yaml"
    again.write_text(out)
    _, second, _ = serve("--config", str(again), "--print-config")
    assert {name: value for name, (value, _) in shown(second).items()} == {
        name: value for name, (value, _) in found.items()
    }


def test_the_model_too_and_a_file_that_the_environment_names(tmp_path: Path) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text("model: of-the-file\nmax_seq_len: 77\n")
    asked = (
        ((), "of-the-file"),
        (("typed",), "typed"),
        (("--model", "typed"), "typed"),
    )
    for arguments, model in asked:
        found = shown(serve(*arguments, "--print-config", OCTAVO_CONFIG=str(file))[1])
        assert found["model"][0] == model and found["max-seq-len"][0] == "77"
    assert shown(serve("--print-config", OCTAVO_CONFIG=str(file), OCTAVO_MODEL="e")[1])["model"] == (
        "e",
        "OCTAVO_MODEL",
    )


BOMB = "a: &a [x, x]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=False))


@pytest.mark.parametrize(
    ("text", "line", "remedy"),
    [
        ("port: 8000\nprot: 8001\n", "line 2", "did you mean port?"),
        ("\nmax-seq-length: 5", "line 2", "did you mean max-seq-len?"),
        ("xyzzy: 1", "line 1", "--help lists them"),
        ("port: 1\nport: 2", "line 2", "given already, in octavo.yaml line 1"),
        ("port: many", "line 1: port", "give a whole number"),
        ("audit: perhaps", "line 1: audit", "true or false"),
        ("\nport: 70000", "line 2: port", "from 0 to 65535"),
        ("max_pending: 0", "line 1: max-pending", "at least 1"),
        ("port: !!python/object/apply:os.system ['true']", "line 1", "tags"),
        ("port: !!int 8000", "line 1", "tags"),
        (BOMB, "line 1", "anchors and aliases"),
        ("port: *p", "line 1", "anchors and aliases"),
        ("server:\n  port: 8000", "line 2", "without lists or nesting"),
        ("allowed-hosts: [a, b]", "line 1", "without lists or nesting"),
        ("[" * 60000, "line 1", "without lists or nesting"),
        ("{" * 60000, "line 1", "without lists or nesting"),
        ("port: 1\n---\nport: 2", "line 2", "one document"),
        ("8000", "line 1", "port: 8000"),
        ("port: 'x", "line 1", "is no YAML"),
        ("port: \x07", "line 1", "is no YAML"),
        ("# " + "x" * (64 << 10), "octavo.yaml", "more than 64 KiB"),
        (b"\xff\xfe\xff", "octavo.yaml", "UTF-8"),
    ],
)  # fmt: skip
def test_what_a_file_may_not_say_is_refused_with_its_line(tmp_path: Path, text: Any, line: str, remedy: str) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, _, err = serve("--config", str(file), "--print-config")
    assert code == 2 and line in err and remedy in err and "Traceback" not in err and len(err) < 600, err


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("OCTAVO_MAX_SEQ_LENGTH", "5", "did you mean OCTAVO_MAX_SEQ_LEN?"),
        ("OCTAVO_PORT", "tcp://10.0.0.1:8000", "enableServiceLinks: false"),
        ("OCTAVO_PORT", "-1", "from 0 to 65535"),
        ("OCTAVO_CONFIG", "/nowhere.yaml", "No such file"),
    ],
)
def test_what_the_environment_may_not_say(name: str, text: str, remedy: str) -> None:
    code, _, err = serve("--print-config", **{name: text})
    assert code in (1, 2) and remedy in err and (name in err or text in err)


def test_what_is_of_others_or_empty_is_left_alone() -> None:
    code, out, err = serve("--print-config", OCTAVO_SERVICE_HOST="10.0.0.1", OCTAVO_HOME="/tmp", OCTAVO_PORT="")
    assert (code, err) == (0, "") and shown(out)["port"] == ("8000", "default")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from("port: 80-#&*!|>'\"{}[],?\n\t %@~\\é"), max_size=60))
def test_any_file_is_read_or_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "octavo.yaml"
    file.write_text(text, encoding="utf-8")
    with suppress(InvalidInput):
        from_file(file, {"port"})


@given(
    model=st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    timeout=st.floats(0.001, 1e6),
    on=st.booleans(),
)
def test_what_is_shown_reads_back(
    tmp_path_factory: pytest.TempPathFactory, model: str, timeout: float, on: bool
) -> None:
    engine, server = EngineConfig(model=model, prefix_cache=on), ServeConfig(body_timeout=timeout)
    file = tmp_path_factory.mktemp("shown") / "octavo.yaml"
    file.write_text(shown_config((engine, server), {}), encoding="utf-8")
    found = from_file(file, {"model", "body_timeout", "no_prefix_cache", *_names(engine), *_names(server)})
    assert found["model"].text == model
    assert converted("body_timeout", found["body_timeout"], float) == timeout
    assert converted("no_prefix_cache", found["no_prefix_cache"], bool) is not on


def _names(config: Any) -> set[str]:
    return set(config.__dataclass_fields__)


def test_a_dry_run_shows_the_whole_plan_and_refuses_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = serve(TINY, "--dry-run", "--layout", "compact", "--kv-memory", "1MiB", "--max-seq-len", "64")
    assert code == 0, err
    for part in (
        "weights",
        "KV cache",
        "grammars",
        "activations",
        "workspace",
        "requests",
        "supervisor",
        "front end",
        "engine",
    ):
        assert f"  {part} " in out
    monkeypatch.setattr("octavo.engine.sizes.available_memory", lambda: 300 << 20)
    small = ("--kv-memory", "1MiB", "--max-seq-len", "64", "--dry-run", TINY)
    assert serve(*small, "--max-request-memory", "16MiB")[0] == 0
    code, _, err = serve(*small, "--max-request-memory", "1GiB")
    assert code == 2 and "--max-request-memory" in err
    code, _, err = serve(*small[2:], "--kv-memory", "1GiB")
    assert code == 2 and "free memory" in err


def test_a_dry_run_fetches_nothing(tmp_path: Path) -> None:
    code, _, err = serve("smollm2-135m-instruct", "--dry-run", "--cache-dir", str(tmp_path))
    assert code == 1 and "not in the cache" in err
