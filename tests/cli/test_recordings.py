"""`octavo replay` and `octavo explain` on a recording of a real engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.core.history import History
from octavo.core.params import SamplingParams
from octavo.engine.explained import engine_names
from octavo.engine.llm import LLM

TINY = str(Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json")


def octavo(*arguments):
    """Exit code, standard output, standard error."""
    command = [sys.executable, "-m", "octavo", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("recording") / "run.octl"
    options = {"backend": "reference", "max_seq_len": 96, "max_running_requests": 2, "say": lambda line: None}
    llm = LLM(TINY, record=str(path), **options)
    sampled = SamplingParams(temperature=0.8, max_tokens=9, seed=5)
    llm.generate(
        [[1, 5, 6], [1, 9, 9, 4], [1, 5, 6, 7]], [SamplingParams(temperature=0.0, max_tokens=7), sampled, sampled]
    )
    llm.loaded.core.close()
    return path


def changed(recording, tmp_path, change):
    """The recording with its events changed."""
    from octavo.core.recording import MAGIC, FrameWriter
    from octavo.engine.recorder import read_epochs

    [epoch], _ = read_epochs(recording)
    path = tmp_path / "changed.octl"
    with open(path, "wb") as file:
        file.write(MAGIC)
        frames = FrameWriter(file.write)
        for event in epoch:
            change(event)
            known = {k: v for k, v in event.items() if k not in ("v", "n", "t", "kind")}
            if event["kind"] != "start":
                known = {k: v for k, v in known.items() if k not in ("process", "epoch")}
            frames.add(event["kind"], event["t"], known)
        frames.flush()
    return path


def test_a_recording_is_proved(recording):
    code, out, _ = octavo("replay", recording)
    assert code == 0 and out.startswith("identical: ") and "tokens were taken as recorded" in out
    code, out, err = octavo("replay", recording, "--run-model", "--json")
    report = json.loads(out)
    assert code == 0 and err == "" and report["difference"] is None
    assert report["ran_model"] and report["is_whole"] and report["num_tokens"] == 7 + 9 + 9


def test_the_first_difference_is_named(recording, tmp_path):
    def another_token(event):
        if event["kind"] == "tokens" and event["step"] == 4:
            event["tokens"][0] ^= 1

    code, out, _ = octavo("replay", changed(recording, tmp_path, another_token), "--run-model")
    assert code == 1 and "step 4: tokens: token was" in out

    def another_order(event):
        if event["kind"] == "decision" and event["step"] == 4:
            event["decodes"].reverse()

    code, out, _ = octavo("replay", changed(recording, tmp_path, another_order))
    assert code == 1 and "step 4: decision: decodes was [['llm-2', 0], ['llm-1', 0]], is [['llm-1', 0]" in out


def test_causes_are_shown(recording):
    code, out, _ = octavo("explain", recording, "llm-3")
    assert code == 0 and " queued " in out and "behind llm-" in out
    listed = json.loads(octavo("explain", recording, "--json")[1])
    assert [one["request"] for one in listed] == ["llm-1", "llm-2", "llm-3"]
    for one in listed:
        assert sum(cause["seconds"] for cause in one["causes"]) == pytest.approx(one["wall_s"], rel=0.01)
    table = octavo("explain", recording)[1].splitlines()
    assert table[0].split()[:3] == ["seconds", "arriving", "queued"] and len(table) == 5


def test_a_request_has_the_name_that_its_client_knows(recording):
    assert octavo("explain", recording, "chatcmpl-llm-3")[1] == octavo("explain", recording, "llm-3")[1]
    history = History(lives=dict.fromkeys(["a", "a.0123abcd", "a.0123abcd-1", "ab.0123abcd", "a.x", "a.0123abcd-1.x"]))
    assert engine_names(history, "a") == ["a", "a.0123abcd", "a.0123abcd-1"]


def test_refusals_name_what_is_wrong(recording, tmp_path):
    assert octavo("explain", recording, "nobody")[0] == 2
    assert "epochs 0 to 0" in octavo("explain", recording, "--epoch", "3")[2]
    code, _, err = octavo("replay", tmp_path / "gone.octl")
    assert code == 2 and "cannot be read" in err


def test_a_damaged_end_is_said_and_the_rest_explained(recording, tmp_path):
    cut = tmp_path / "cut.octl"
    cut.write_bytes(recording.read_bytes()[:-5])
    code, out, err = octavo("replay", cut)
    assert code == 0 and "cut off" in err and "was not closed" in out


def test_the_timeline_is_drawn(recording, tmp_path):
    page, trace = tmp_path / "run.html", tmp_path / "run.trace.json"
    code, out, _ = octavo("timeline", recording, "--out", page)
    assert code == 0 and str(page) in out and "perfetto" in out
    assert "llm-3" in page.read_text(encoding="utf-8")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]


def test_what_if_prints_what_changes(recording, tmp_path):
    code, _, err = octavo("replay", recording, "--pages", "9", "--run-model")
    assert code == 2 and "give one of the two" in err
    path = tmp_path / "more.octl"
    options = {"backend": "reference", "max_seq_len": 96, "max_running_requests": 2, "say": lambda line: None}
    llm = LLM(TINY, record=str(path), **options)
    prompts = [[1, 5 + i, 6, 7 + i] for i in range(8)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4))
    llm.loaded.core.close()
    code, out, err = octavo("replay", path, "--max-running-requests", "8")
    assert code == 0, err
    lines = {line[:28].strip(): line[28:].split() for line in out.splitlines()}
    assert lines["requests finished"] == ["8", "of", "8"] * 3 and int(lines["steps"][2]) < int(lines["steps"][0])
    values = json.loads(octavo("replay", path, "--policy", "shortest", "--json")[1])
    assert list(values) == ["as recorded", "the same, simulated", "policy shortest"]
