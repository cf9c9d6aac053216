"""The commands, in process and mostly on the tiny fixture model: flags, files, refusals, exit codes."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import doctor
from octavo.cli.main import main
from octavo.cli.sampling import SamplingFlags
from octavo.engine.config import EngineConfig
from octavo.serve.config import ServeConfig
from octavo.weights.store import CachedModel, ModelStore

TINY = str(Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json")


class Ran:
    """What a command printed, and how it ended."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def octavo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command line in this process."""

    def run(*arguments: str, stdin: str = "", columns: int = 200) -> Ran:
        monkeypatch.setattr(sys, "argv", ["octavo", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as end:
            main()
            raise SystemExit(0)
        captured = capsys.readouterr()
        return Ran(int(end.value.code or 0), captured.out, captured.err)

    return run


def test_help_is_complete_and_light(octavo: Any) -> None:
    shown = octavo("--help")
    assert shown.code == 0
    for command in ("serve", "chat", "run", "doctor", "models"):
        assert f" {command} " in shown.out and octavo(command, "--help").code == 0
    heavy = ("numpy", "starlette", "uvicorn", "tokenizers", "jinja2", "huggingface_hub", "prometheus_client", "msgspec")
    code = f"import sys, octavo.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_field_of_the_configs_is_a_flag_with_its_help(octavo: Any) -> None:
    shown = " ".join(octavo("serve", "--help").out.replace("│", " ").split())
    for kind in (EngineConfig, ServeConfig):
        for field in dataclasses.fields(kind):
            if field.name != "model":
                assert f"--{'no-' * (field.default is True)}{field.name.replace('_', '-')}" in shown, field.name
                assert field.metadata["help"].split()[-1] in shown, field.name
    shown = octavo("run", "--help").out
    assert all(f"--{field.name.replace('_', '-')}" in shown for field in dataclasses.fields(SamplingFlags))


@pytest.mark.parametrize("command", ["serve", "chat", "run", "doctor", "models"])
def test_no_flag_is_cut_on_a_narrow_terminal(octavo: Any, command: str) -> None:
    assert "…" not in octavo(command, "--help", columns=80).out


@pytest.mark.parametrize("switch", ["--no-prefix-cache", "--offline", ""])
def test_switches_reach_the_config(octavo: Any, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    served: list[EngineConfig] = []
    monkeypatch.setattr("octavo.serve.server.serve", lambda engine, server, say: served.append(engine))
    assert octavo("serve", *filter(None, [switch])).code == 0
    assert served[0].prefix_cache == (switch != "--no-prefix-cache") and served[0].offline == (switch == "--offline")


WRONG = [
    (("serve", "--prot", "1"), "--port"), (("srve",), "serve"), (("serve", "--port", "x"), "--port"),
    (("serve", "smollm2-135m-instuct", "--port", "0"), "did you mean smollm2-135m-instruct"),
    (("serve", TINY, "--port", "70000"), "--port = 70000"), (("serve", TINY, "--kv-memory", "lots"), "--kv-memory"),
    (("serve", "", "--port", "0"), "model = ''"), (("serve", TINY, "--host", "no.such.host.invalid"), "--host = "),
    (("serve", TINY, "--host", "203.0.113.1"), "--host = '203.0.113.1'"),
    (("serve", TINY, "--port", "0", "--log-level", "loud"), "--log-level = 'loud': use one of critical"),
    (("serve", "./nowhere.gguf", "--policy", "x"), "--policy = 'x': give one of fcfs, priority"),
    (("serve", TINY, "--max-body-bytes", "0"), "--max-body-bytes"),
    (("serve", TINY, "--max-body-bytes", "33554433"), "--max-body-bytes"),
    (("serve", TINY, "--request-timeout", "nan"), "finite"),
    (("run", "-m", TINY, "x", "--temperature", "-1"), "temperature"), (("run", "-m", TINY), "give"),
    (("run", "-m", TINY, "x", "-f", "y"), "one of the two"), (("run", "-m", TINY, "x", "-o", "y"), "--file"),
    (("run", "-m", "./nowhere.gguf", "x", "--temperature", "nan"), "--temperature = nan"),
    (("chat", "./nowhere.gguf", "--top-k", "-9"), "--top-k = -9"),
    (("run", "-m", "./nowhere.gguf", "x", "--raw", "--system", "y"), "one of the two"),
    (("run", "-m", TINY, "x", "--max-seq-len", "9999"), "--max-seq-len = 9999: the model's context is"),
    (("run", "-m", TINY, "x" * 400), "shorten it"), (("chat", "./nowhere.gguf"), "no such file"),
    (("chat", TINY, "--disk-kv", "x"), "give --host-kv-memory as well"), (("quantize", TINY), "--out is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "hint"), WRONG)
def test_what_is_wrong_says_what_is_right(octavo: Any, arguments: tuple[str, ...], hint: str) -> None:
    ran = octavo(*arguments)
    assert ran.code == 2 and hint in ran.err and "Traceback" not in ran.err, ran.err
    assert "has ended" not in ran.err, "the reason is enough"


def test_a_missing_file_is_one_line(octavo: Any) -> None:
    ran = octavo("run", "-m", TINY, "-f", "/nowhere/prompts.jsonl")
    assert ran.code == 1 and ran.err == "error: /nowhere/prompts.jsonl: No such file or directory\n"


def test_run_answers_an_argument_or_standard_input(octavo: Any) -> None:
    flags = ("-m", TINY, "--temperature", "0", "--max-tokens", "6")
    asked = octavo("run", "a b", *flags)
    assert asked.code == 0 and len(asked.out.strip()) > 2
    assert octavo("run", *flags, stdin="a b\n").out == octavo("run", "-", *flags, stdin="a b").out == asked.out
    assert octavo("run", "a b", "--raw", *flags).out != asked.out
    assert octavo("run", "a b", "--system", "be brief", *flags).code == 0


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_of_prompts_goes_on_where_it_was_cut(octavo: Any, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    bodies = [
        "one", {"prompt": "two", "max_tokens": 2}, {"messages": [{"role": "user", "content": "three"}], "n": 2},
        {"prompt": "four", "top_k": -9}, {"prompt": "five", "stop": ["never"]},
    ]  # fmt: skip
    prompts.write_text("\n".join(json.dumps(body) for body in bodies) + "\n\n")
    command = ("run", "-m", TINY, "-f", str(prompts), "--max-tokens", "5", "--temperature", "0")
    ran = octavo(*command, "-o", str(out))
    assert ran.code == 0 and "1 of 5 were refused" in ran.err
    whole = {line["index"]: line for line in lines_of(out)}
    assert sorted(whole) == [0, 1, 2, 3, 4]
    assert whole[1]["usage"]["completion_tokens"] == 2 and len(whole[2]["choices"]) == 2
    assert whole[3]["error"]["param"] == "top_k" and whole[0]["finish_reason"] in ("stop", "length")

    written = out.read_bytes()
    second = written.index(b"\n", written.index(b"\n") + 1) + 1
    out.write_bytes(written[: second + 20])  # two answers, and a third that was cut
    assert "2 of 5 are answered already" in octavo(*command, "-o", str(out)).err
    assert {line["index"]: line for line in lines_of(out)} == whole and len(lines_of(out)) == 5
    assert out.read_bytes()[:second] == written[:second]

    assert octavo(*command, "-o", str(out)).code == 0 and len(lines_of(out)) == 5  # nothing left to do
    assert sorted(json.loads(line)["index"] for line in octavo(*command).out.splitlines()) == [0, 1, 2, 3, 4]

    for asked_otherwise in (("--raw",), ("--seed", "1"), ("--system", "be brief"), ("--max-tokens", "6")):
        assert "other flags" in octavo(*command, *asked_otherwise, "-o", str(out)).err
    prompts.write_text('"another"\n')
    other = octavo(*command, "-o", str(out))
    assert other.code == 2 and "answers to other prompts" in other.err
    assert octavo(*command, "-o", str(prompts)).code == 2  # no file of answers: left as it was
    assert prompts.read_text() == '"another"\n'
    prompts.write_text('{"text": 1}\n')
    assert "line 1" in octavo(*command).err


@pytest.mark.parametrize("held", ["my only notes", "first\nlast", '{"prompt": "one"}', "\n"])
def test_a_file_that_holds_something_else_is_left_alone(octavo: Any, tmp_path: Path, held: str) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "notes.txt"
    prompts.write_text('"one"\n')
    out.write_text(held)
    ran = octavo("run", "-m", TINY, "-f", str(prompts), "-o", str(out))
    assert ran.code == 2 and "is no file of answers" in ran.err and out.read_text() == held


@pytest.mark.parametrize(
    ("held", "answers", "hint"),
    [
        (b"", 0, ""),
        (b'\xef\xbb\xbf"a"\r\n"b"\r\n', 2, ""),
        ('"a\u2028b"'.encode(), 1, ""),
        (b'"a"\n"\xff"\n', 0, "line 2"),
        ('"a"'.encode("utf-16"), 0, "is not UTF-8"),
    ],
)
def test_files_of_prompts_from_anywhere(octavo: Any, tmp_path: Path, held: bytes, answers: int, hint: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(held)
    ran = octavo("run", "-m", TINY, "-f", str(prompts), "--raw", "--max-tokens", "1")
    assert len(ran.out.splitlines()) == answers and hint in ran.err and ran.code == (2 if hint else 0)


def test_answers_may_go_to_a_device(octavo: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"a"\n')
    assert octavo("run", "-m", TINY, "-f", str(prompts), "--max-tokens", "1", "-o", "/dev/zero").code == 0


def test_a_closed_output_is_one_line() -> None:
    code = "import sys; sys.stdout = None; from octavo.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "models"], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and done.stderr == "error: standard output is closed\n"


@pytest.mark.parametrize("kept", [True, False])
def test_a_file_that_is_stopped_says_how_to_go_on(
    octavo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    def stop(self: object, coroutine: Any) -> None:
        coroutine.close()
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.cli.session.Session.call", stop)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('"one"\n')
    ran = octavo("run", "-m", TINY, "-f", str(prompts), *(("-o", str(tmp_path / "out")) if kept else ()))
    assert ran.code == 130 and ("goes on" in ran.err) == kept


def test_a_line_is_told_what_had_no_effect(octavo: Any, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    bodies = [
        {"prompt": "one", "max_token": 2, "echo": True, "stop": "x"}, {"prompt": "two", "model": "another"},
        {"prompt": "three", "model": "tiny-llama", "return_tokens": True}, {"prompt": "four", "stream": False},
        {"messages": [{"role": "user", "content": "five"}], "include_reasoning": True, "parallel_tool_calls": True},
    ]  # fmt: skip
    prompts.write_text("\n".join(json.dumps(body) for body in bodies))
    ran = octavo("run", "-m", TINY, "-f", str(prompts), "--max-tokens", "1", "--raw")
    answers = {line["index"]: line for line in map(json.loads, ran.out.splitlines())}
    told = {index: [warning["param"] for warning in line.get("warnings", ())] for index, line in answers.items()}
    assert told == {0: ["max_token", "echo"], 1: ["model"], 2: ["return_token_ids"], 3: []} | {
        4: ["parallel_tool_calls", "include_reasoning"]
    }
    assert "max_tokens" in answers[0]["warnings"][0]["message"] and "warnings" not in answers[3]


def test_chat_is_a_conversation(octavo: Any) -> None:
    said = "hello\n/wat\n/system brief\nagain\n" + "x" * 400 + "\n/clear\nmore\n/help\n/exit\nnever\n"
    ran = octavo("chat", TINY, "--max-tokens", "4", stdin=said)
    assert ran.code == 0
    assert ran.out.count(" a second)") == 3 and "/wat is no command" in ran.out and "/clear " in ran.out
    assert "shorten it" in ran.out  # the message that cannot fit is refused, and the talk goes on
    assert octavo("chat", TINY, stdin="").code == 0  # the end of input leaves


def test_doctor_says_what_was_found(octavo: Any, tmp_path: Path) -> None:
    ran = octavo("doctor", "--json", "--cache-dir", str(tmp_path / "none"))
    found = {finding["what"]: finding for finding in json.loads(ran.out)}
    assert ran.code == 0 and found["backend"]["found"] in ("native", "numpy") and not found["backend"]["fatal"]
    for what in ("octavo", "packages", "processor", "instructions", "cores", "memory", "model cache", "models cached"):
        assert found[what]["found"]
    assert found["models cached"]["found"].startswith("none yet") and "numpy" in found["packages"]["found"]
    assert not (tmp_path / "none").exists()
    assert "backend" in octavo("doctor").out


@pytest.mark.parametrize("terminal", [True, False])
def test_doctor_wraps_between_words_on_a_terminal_only(
    octavo: Any, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", terminal)
    lines = octavo("doctor", columns=60).out.splitlines()
    first = next(i for i, line in enumerate(lines) if " packages " in line)
    after = lines[first + 1]
    assert after.startswith(" " * 8) == terminal == (len(lines[first]) < 80)


def test_doctor_reads_cached_models_whole_when_asked(
    octavo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held = [CachedModel("tiny", tmp_path, 5, "MIT"), CachedModel("other", tmp_path, 5, "MIT")]
    monkeypatch.setattr(ModelStore, "cached_models", lambda store: held)
    monkeypatch.setattr(ModelStore, "damage", lambda store, name: "SHA-256 is wrong" if name == "tiny" else None)
    assert "SHA-256" not in octavo("doctor").out
    ran = octavo("doctor", "--verify")
    assert ran.code == 1 and "tiny is damaged" in ran.out and "fetches it again" in ran.out
    assert "other has the right SHA-256" in ran.out


def test_a_cache_that_is_only_read_is_enough_for_what_it_holds(octavo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for held, code in (([], 1), ([CachedModel("tiny", Path(), 5, "MIT")], 0)):
        monkeypatch.setattr(ModelStore, "cached_models", lambda store, held=held: held)
        ran = octavo("doctor")
        assert ran.code == code and "OCTAVO_HOME" in ran.out


def test_what_is_fatal_makes_doctor_fail(octavo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: ["missing-package>=1", "pytest; extra == 'dev'"])
    ran = octavo("doctor")
    assert ran.code == 1 and "missing: missing-package" in ran.out and "pip install" in ran.out


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cpu_quota_of_both_kinds_of_control_group(tmp_path: Path, files: dict[str, str], cores: float | None) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert doctor.cpu_quota(tmp_path) == cores


def test_models_lists_names_licences_and_sources(octavo: Any, tmp_path: Path) -> None:
    models = {
        model["name"]: model for model in json.loads(octavo("models", "--json", "--cache-dir", str(tmp_path)).out)
    }
    smol = models["smollm2-135m-instruct"]
    assert smol["default"] and smol["licence"] == "Apache-2.0" and smol["path"] is None and len(smol["sources"]) == 2
    assert models["gemma-3-270m"]["licence"].startswith("Gemma")
    shown = octavo("models", "--cache-dir", str(tmp_path)).out
    assert "smollm2-135m-instruct" in shown and "Apache-2.0" in shown and str(tmp_path) in shown
    assert "did you mean" in octavo("models", "--fetch", "smollm2", "--cache-dir", str(tmp_path)).err


@pytest.mark.parametrize("terminal", [True, False])
def test_run_says_on_a_terminal_that_the_model_is_loading(
    octavo: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: bool
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    (tmp_path / "prompts.jsonl").write_text('"ab"\n')
    flags = ("--model", TINY, "--max-tokens", "2")
    for arguments in (("ab",), ("--file", str(tmp_path / "prompts.jsonl"))):
        ran = octavo("run", *arguments, *flags)
        assert ran.code == 0 and ran.out
        assert ran.err == f"loading {TINY}\n" * terminal


_INTERRUPTED = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "octavo.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from octavo.__main__ import main
main()
"""


def test_ctrl_c_while_the_commands_are_imported_is_no_traceback() -> None:
    ran = subprocess.run([sys.executable, "-c", _INTERRUPTED], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


@pytest.mark.parametrize("command, module", [("serve", "serve.server.serve"), ("chat", "cli.chat.run_chat")])
def test_the_model_may_be_named_by_flag_or_in_place(
    octavo: Any, monkeypatch: pytest.MonkeyPatch, command: str, module: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(f"octavo.{module}", lambda engine, *rest: asked.append(engine.model))
    for arguments in ([TINY], ["--model", TINY], ["-m", TINY], [TINY, "--model", TINY]):
        assert octavo(command, *arguments).code == 0
    assert octavo(command).code == 0 and asked == [TINY] * 4 + [EngineConfig.model]
    octavo(command, "--model", "")
    assert asked.pop() == ""  # refused where models are looked up, not taken for the default
    both = octavo(command, TINY, "--model", "other")
    assert both.code == 2 and "give one of them" in both.err and len(asked) == 5
