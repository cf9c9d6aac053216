"""`octavo bench` on the tiny model: its JSON, and what it refuses. No time is asserted."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.backends import native_lib, native_measure
from octavo.cli.main import main
from octavo.engine import bench_cost
from octavo.engine.bench_offline import OfflineBench, Workload
from octavo.engine.bench_ops import OpsBench, Point
from octavo.engine.config import EngineConfig
from octavo.engine.loader import load_engine, load_parts

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "fixtures" / "tiny_model.json")
OFFLINE = ("bench", "offline", TINY, "--rounds", "2", "--prompt", "5", "--output", "4", "--streams", "1,3",
           "--prefill", "9", "--context", "17", "--json", "-")  # fmt: skip
OPS = ("bench", "ops", TINY, "--rounds", "2", "--rows", "1,3", "--prefill", "9", "--context", "5",
       "--long-context", "20", "--format", "w8g64", "--kv-dtype", "int8")  # fmt: skip


@pytest.fixture(autouse=True)
def quick_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_measure, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(native_measure, "DOT_REPEATS", 100)
    monkeypatch.setattr(native_measure, "BARRIERS", 10)


@pytest.fixture
def octavo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command line in this process: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["octavo", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        with pytest.raises(SystemExit) as end:
            main()
            raise SystemExit(0)
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return run


def check_head(found: dict[str, Any], what: str) -> None:
    assert (found["schema"], found["bench"], found["rounds"]) == (1, what, 2)
    card = found["machine"]
    assert card["cpu"] and card["cores"]["usable"] >= 1 and card["memory_bytes"] > 0 and card["octavo"]
    assert found["config"]["model"] == TINY and found["weight_bytes"] > 0


def check_native(native: dict[str, Any]) -> None:
    threads = str(native["threads"])
    assert native["table"] in native["tables"] and native["read_gb_s"][threads] > 0
    assert set(native["read_gb_s"]) == set(native["dots_gop_s"]) == {"1", threads}
    assert all(set(rates) == {"int8", "bf16", "fp32"} for rates in native["dots_gop_s"].values())
    assert native["state"]["name"] in ("near", "far", "disturbed", "")


def test_offline_writes_every_sample_with_its_state(octavo: Any) -> None:
    code, out, _ = octavo(*OFFLINE, "--backend", "native")
    assert code == 0
    found = json.loads(out)
    check_head(found, "offline")
    check_native(found["machine"]["native"])
    assert [w["kind"] for w in found["workloads"]] == ["decode", "batch", "prefill", "decode"]
    assert not found["left_out"] and found["kv_dtype"] == "bf16"
    for record in found["workloads"]:
        low, high = record["tokens_per_s_range"]
        assert 0 < low <= record["tokens_per_s"] <= high and len(record["samples"]) == 2
        assert all(s["state"]["read_gb_s"] > 0 and s["tokens_per_s"] > 0 for s in record["samples"])
        assert (record["share_of_bound"] is not None) == (record["kind"] == "decode")
        assert 0 < record["python_share"] < 1 and record["python_ms_per_step"] > 0
    one, _, _, behind = found["workloads"]
    assert behind["bytes_per_step"] - one["bytes_per_step"] > 0  # 12 tokens more are read
    assert sum(s["samples"] for s in one["share_by_state"].values()) == 2


def test_offline_without_the_native_backend_claims_no_limit(octavo: Any) -> None:
    code, out, _ = octavo(*OFFLINE, "--backend", "numpy", "--max-seq-len", "16")
    found = json.loads(out)
    assert code == 0 and found["machine"]["native"] is None
    assert (
        list(found["left_out"]) == ["1 stream behind 17"] and "--max-seq-len" in found["left_out"]["1 stream behind 17"]
    )
    assert all(w["share_of_bound"] is None and w["bytes_per_step"] is None for w in found["workloads"])
    assert [s["state"] for w in found["workloads"] for s in w["samples"]] == [None] * 6


def test_ops_count_what_the_products_are(octavo: Any, tmp_path: Path) -> None:
    code, out, _ = octavo(*OPS, "--json", str(tmp_path / "ops.json"))
    assert code == 0 and "prefill, 9 rows behind 9" in out and "of peak" in out
    found = json.loads((tmp_path / "ops.json").read_text())
    check_head(found, "ops")
    check_native(found["machine"]["native"])
    shape = json.loads(Path(TINY).read_text())["model"]
    hidden, layers, inner = shape["hidden_size"], shape["num_hidden_layers"], shape["intermediate_size"]
    points = list(dict.fromkeys(record["point"] for record in found["ops"]))
    assert not found["left_out"] and len(points) == 5 and len(found["states"]) == 2
    for point in points:
        records = {record["op"]: record for record in found["ops"] if record["point"] == point}
        assert sum(record["share_of_step"] for record in records.values()) == pytest.approx(1, abs=0.5)
        rows = records["down_proj"]["rows"]
        assert records["down_proj"]["operations"] == 2 * rows * layers * hidden * inner
        assert records["gate_proj+up_proj"]["operations"] == 4 * rows * layers * hidden * inner
        assert records["lm_head"]["operations"] == 2 * rows * hidden * shape["vocab_size"]
        assert records["down_proj"]["format"] == "w8g64" and records["down_proj"]["bytes"] >= layers * hidden * inner
        assert records["attention"]["format"] == "int8" and records["attention"]["bytes"] > 0
        assert records["embedding"]["gb_s"] is None and records["embedding"]["share_of_peak"] is None


def test_ops_read_pages_that_hold_something() -> None:
    """The system backs memory that nobody wrote by one page of zeros: attention would read a cache."""
    parts = load_parts(EngineConfig(model=TINY, backend="native", format="w8g64", kv_dtype="int8"))
    pool: Any = OpsBench(parts, [Point(3, 1, 20), Point(1, 2, 0)], 16).pool
    page = bytearray(pool.stored_bytes)
    for number in range(pool.num_pages):
        pool.save_page(number, memoryview(page))
        assert any(page), number


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("bench", "ops", TINY, "--backend", "numpy"), "use native"),
        (("bench", "ops", TINY, "--rows", "1,x"), "rows = '1,x'"),
        (("bench", "ops", TINY, "--prefill", "1"), "prefill = 1"),
        (("bench", "ops", TINY, "--context", "99999", "--long-context", "99999", "--prefill", "99999"), "give less"),
        (("bench", "offline", TINY, "--streams", "0"), "streams = '0'"),
        (("bench", "offline", TINY, "--output", "1"), "at least 2"),
        (("bench", "offline", TINY, "--rounds", "0"), "rounds = 0"),
        (("bench", "offline", TINY, "--format", "w9"), "--format = 'w9'"),
    ],
)
def test_what_is_wrong_says_what_is_right(octavo: Any, arguments: tuple[str, ...], hint: str) -> None:
    code, _, err = octavo(*arguments)
    assert code == 2 and hint in err and "Traceback" not in err, err


def test_rounds_are_cold_except_for_fixed_prompts() -> None:
    loaded = load_engine(EngineConfig(model=TINY, backend="native", seed=1), say=lambda line: None)
    shared = Workload("shared", "batch", 2, 40, 2, shared=32)
    bench = OfflineBench(loaded, [shared, Workload("warm", "decode", 1, 40, 3, fixed=True)])
    loaded.core.metrics.spent("plan", 1e6)  # before the bench: no step of its
    hits = []
    for keep in (False, True, True):
        before = loaded.core.kv.usage().prefix.hit_units
        bench.round(keep)
        hits.append(loaded.core.kv.usage().prefix.hit_units - before)
    assert all(0 < record["python_ms_per_step"] < 1e3 for record in bench.results())
    assert hits == [32, 71, 71]  # of the other stream; then all of the warm prompt but its last token
    first, second = ([list(r.prompt_token_ids) for r in bench._requests(shared)] for _ in range(2))
    assert first == second and first[0][:32] == first[1][:32] and first[0][32:] != first[1][32:]
    bench._count += 1
    assert next(bench._requests(shared)).prompt_token_ids[:32] != tuple(first[0][:32])


@given(window=st.integers(0, 9), first=st.integers(0, 12), tokens=st.integers(1, 6), sequences=st.integers(1, 3))
def test_attention_cost_counts_each_seen_position(window: int, first: int, tokens: int, sequences: int) -> None:
    model = SimpleNamespace(lowered=SimpleNamespace(buffers=[(0, 24)]), page_bytes=lambda size: 7 * size * 2)
    op = SimpleNamespace(i=(0, 0, 8, window), inputs={0: 0})
    pool = SimpleNamespace(page_size=16, depth=2)
    seen = [[k for k in range(p + 1) if not window or k > p - window] for p in range(first, first + tokens)]
    read, work = bench_cost.attention_cost(model, pool, op, [(first, tokens)] * sequences)
    assert read == 7 * sequences * len({k for keys in seen for k in keys})
    assert work == 4 * 24 * sequences * sum(map(len, seen))


def test_a_step_reads_each_matrix_once() -> None:
    model = load_parts(EngineConfig(model=TINY, backend="native", format="w4g32")).model
    linear = [op for op in model.lowered.ops if op.code == native_lib.LINEAR]
    names = [name for op in linear for spec in bench_cost.matrices(op) for name in (spec.name, spec.up) if name]
    assert len(names) == len(set(names)) == 7 * model.config.num_layers + 1
    assert 0 < bench_cost.weight_bytes_per_step(model) <= model.weight_bytes()
