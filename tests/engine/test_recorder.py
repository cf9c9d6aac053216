"""Recordings as files: written by real engines, gone on with, cut by a crash, and no engine stops for one."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from engine_harness import FIXTURES, make_core, make_request

from octavo.core.errors import InvalidInput
from octavo.core.facts import scheduler_facts
from octavo.core.params import SamplingParams
from octavo.core.replay import Replayer, scheduler_for
from octavo.engine.config import EngineConfig
from octavo.engine.llm import LLM
from octavo.engine.recorder import Recorder, read_epochs

TINY = str(FIXTURES / "tiny_model.json")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def recorded_core(path, warn=print, **settings):
    core = make_core(**settings)
    core.recorder = Recorder(path, core.scheduler.timeline, scheduler_facts(core.scheduler), warn)
    return core


def run_some(core, count=3, start=0):
    for i in range(count):
        core.submit(make_request(f"r{start + i}", [1, 5 + i, 9], GREEDY), now=float(i))
    now = 0.0
    while core.has_work:
        core.step(now)
        now += 0.125


def replays(epoch):
    replayer = Replayer(scheduler_for(epoch[0]["facts"]))
    assert all(replayer.feed(event) for event in epoch[1:]), str(replayer.difference)
    return replayer


def test_a_file_holds_all_that_happened(tmp_path):
    core = recorded_core(tmp_path / "run.octl")
    run_some(core)
    with pytest.raises(InvalidInput):
        core.submit(make_request("bad", [], GREEDY), now=9.0)
    core.close()
    core.close()
    [epoch], damage = read_epochs(tmp_path / "run.octl")
    kinds = [event["kind"] for event in epoch]
    assert damage is None and kinds[0] == "start" and kinds[-2:] == ["refuse", "end"]
    assert kinds.count("arrive") == kinds.count("finish") == 3
    assert kinds.count("measured") == kinds.count("tokens") == replays(epoch).num_steps
    assert len(epoch) == core.recorder.num_events
    assert [event["n"] for event in epoch] == list(range(len(epoch)))
    assert oct((tmp_path / "run.octl").stat().st_mode)[-3:] == "600"


def test_an_idle_engine_has_written_everything(tmp_path):
    run_some(recorded_core(tmp_path / "run.octl"))
    [epoch], damage = read_epochs(tmp_path / "run.octl")
    assert damage is None and epoch[-1]["kind"] == "measured"


def test_the_next_process_goes_on_one_epoch_higher(tmp_path):
    path = tmp_path / "run.octl"
    for i in range(3):
        core = recorded_core(path)
        run_some(core, 1, start=i)
        core.close()
        path.write_bytes(path.read_bytes() + b"\1\2\3")  # a crash left something
    epochs, damage = read_epochs(path)
    assert "cut off" in damage
    assert [epoch[0]["epoch"] for epoch in epochs] == [0, 1, 2]
    assert [next(e["request"] for e in epoch if e["kind"] == "arrive") for epoch in epochs] == ["r0", "r1", "r2"]
    assert {event["epoch"] for event in epochs[2]} == {2}
    for epoch in epochs:
        replays(epoch)
    assert core.scheduler.timeline.epoch == 2


def test_two_do_not_write_one_file(tmp_path):
    first = recorded_core(tmp_path / "run.octl")
    with pytest.raises(InvalidInput, match="another process"):
        recorded_core(tmp_path / "run.octl")
    run_some(first)
    first.close()
    assert read_epochs(tmp_path / "run.octl")[1] is None


@pytest.mark.parametrize(
    ("name", "match"), [("notes.txt", "no recording"), ("nowhere/run.octl", "No such"), (".", "directory")]
)
def test_other_files_are_left_alone(tmp_path, name, match):
    (tmp_path / "notes.txt").write_text("my notes")
    with pytest.raises(InvalidInput, match=match):
        recorded_core(tmp_path / name)
    assert (tmp_path / "notes.txt").read_text() == "my notes"


def test_a_full_disk_is_said_at_once():
    with pytest.raises(InvalidInput, match="space"):
        recorded_core("/dev/full")


def test_a_disk_that_fills_up_ends_the_recording_only(tmp_path):
    warnings = []
    core = recorded_core(tmp_path / "run.octl", warnings.append)

    def full(data):
        raise OSError(28, "No space left on device")

    core.recorder._frames._write = full
    run_some(core)
    assert core.metrics.summary()["finished"] == {"length": 3}
    core.close()
    assert len(warnings) == 1 and "No space" in warnings[0] and "No space" in core.recorder.problem
    assert len(read_epochs(tmp_path / "run.octl")[0][0]) == 1


def test_what_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("my notes")
    (tmp_path / "empty.octl").write_bytes(b"octavo timeline 2\n")
    for name, match in (("notes.txt", "no recording"), ("gone", "cannot be read"), ("empty.octl", "no event")):
        with pytest.raises(InvalidInput, match=match):
            read_epochs(tmp_path / name)


def test_the_flag_records_a_real_engine(tmp_path):
    llm = LLM(TINY, record=str(tmp_path / "run.octl"), backend="reference", max_seq_len=96, say=lambda line: None)
    outputs = llm.generate([[1, 5, 6], [1, 9]], GREEDY)
    [epoch], _ = read_epochs(tmp_path / "run.octl")
    replayer = replays(epoch)
    assert replayer.num_tokens == sum(len(o.outputs[0].token_ids) for o in outputs)
    facts = epoch[0]["facts"]
    assert facts["numerics_id"] == llm.loaded.parts.numerics_id
    assert EngineConfig(**facts["engine"]) == llm.loaded.config
    assert {"measured", "delivered"} <= {event["kind"] for event in epoch}


KILLED = """
import os, sys
sys.path[:0] = {paths!r}
from test_recorder import recorded_core, make_request, SamplingParams
core = recorded_core({path!r})
for i in range(4):
    core.submit(make_request(f"r{{i}}", [1, 5 + i, 9], SamplingParams(temperature=0.0, max_tokens=60)), now=0.0)
for step in range(30):
    core.step(step / 4)
os.kill(os.getpid(), {signal})
"""


def test_a_killed_engine_leaves_a_recording_that_replays(tmp_path):
    path = str(tmp_path / "run.octl")
    code = textwrap.dedent(KILLED).format(path=path, paths=sys.path, signal=int(signal.SIGKILL))
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    [epoch], _ = read_epochs(path)
    replayer = replays(epoch)
    assert replayer.num_steps >= 26 and replayer.scheduler.has_work
