"""Disk hits on real arithmetic: the same tokens and logprobs bit for bit, over a restart, with bad or full disks."""

from __future__ import annotations

import errno
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Collector, alone, assert_idle, make_request, pages_for, run_to_end, tiny_parts
from test_swap_bytes import PARAMS, PROMPTS

from octavo.backends.host_pages import HostPages
from octavo.backends.null_backend import NullBackend, NullPool
from octavo.core.batch import PageCopy, ScheduleDecision
from octavo.core.errors import InvalidInput
from octavo.core.scheduler import SchedulerConfig
from octavo.engine.config import EngineConfig
from octavo.engine.disk_pages import DiskPages
from octavo.engine.loader import load_engine
from octavo.engine.parts import build_core
from octavo.engine.stats import engine_stats, tier_stats
from octavo.engine.tiers import Tiers
from octavo.serve.metric_table import METRICS

FIXTURE = str(Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json")


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Engines over one folder, each closed before the next one."""
    opened: list[Any] = []

    def make(model: str = "llama", backend: str = "reference", host_pages: int = 3, wait_s: float = 5.0, **any_: Any):
        for core in opened:
            core.close()
        core = build_core(
            tiny_parts(model, backend),
            num_pages=pages_for(model, 4, 36),
            page_size=4,
            scheduling=SchedulerConfig(preemption="swap", max_preemptions=50, max_seq_len=32, **any_),
            host_pages=host_pages,
            open_disk=lambda size, layout: DiskPages(
                str(tmp_path / "kv"), 200, size, layout, wait_s=wait_s, say=lambda line: None
            ),
            audit=True,
        )
        opened.append(core)
        return core

    yield make
    for core in opened:
        core.close()


def play(core: Any, model: str = "llama", salt: str = "") -> dict[str, int]:
    """Run the crowd; all say what they say alone. Prompt tokens that were not computed, by request."""
    collector, cached = Collector(), {}
    for name, prompt in PROMPTS.items():
        request = make_request(name, prompt, PARAMS, model)
        core.submit(replace_namespace(request, tiny_parts(model).namespace(salt)), 0.0)
    run_to_end(core, collector)
    assert_idle(core)
    for name, prompt in PROMPTS.items():
        assert [collector.choices[name, 0]] == alone(model, prompt, PARAMS)
        cached[name] = core.metrics.requests[name].num_cached_tokens
    return cached


def replace_namespace(request: Any, namespace: str) -> Any:
    request.namespace = namespace
    return request


@pytest.mark.parametrize("model, backend", [("llama", "reference"), ("gemma3", "reference")])
def test_those_that_come_back_from_disk_say_the_same_as_alone(cores: Any, model: str, backend: str) -> None:
    first = cores(model, backend)
    play(first, model)
    again = cores(model, backend)
    found = play(again, model)
    stats = engine_stats(again)
    if model == "llama":
        assert max(found.values()) > 1 and stats["disk_bytes_in"] and first.tiers.disk.pages_written
        told = [event for event in again.scheduler.timeline if event["kind"] == "moved" and event["tier"] == "disk"]
        assert told and all(event["pages"] and event["seconds"] > 0.0 for event in told)  # the chooser learns of it
        assert again.kv.host.stats.disk_restored and stats["tier_hit_tokens"] <= stats["tier_queries_tokens"]
    assert stats["preemptions"] == stats["preemptions_swap"] > 0 == stats["preemptions_recompute"]


def test_everything_that_is_counted_of_tiers_is_a_metric(cores: Any) -> None:
    core = cores()
    core.tiers.disk.failures["slow"] = core.tiers.disk.write_failures["full"] = 1
    known = {metric.stat.rstrip("/") for metric in METRICS}
    assert not [name for name in tier_stats(core.tiers, core.kv.host) if name.partition("/")[0] not in known]


def test_another_tenant_and_another_model_find_nothing(cores: Any) -> None:
    empty = play(cores())
    other = cores()
    assert other.tiers.disk.found and play(other, salt="tenant 2") == empty
    assert max(play(cores()).values()) > max(empty.values())  # the first tenant
    assert cores("gemma3").tiers.disk.refused == "layout"


def test_what_is_on_disk_went_bad_meanwhile(cores: Any, tmp_path: Path) -> None:
    play(cores())
    cores().close()
    path = tmp_path / "kv" / "octavo-kv.pages"
    data = bytearray(path.read_bytes())
    for at in range(5, len(data), 700):
        data[at] ^= 1
    path.write_bytes(data)
    core = cores()
    play(core)
    assert sum(core.tiers.disk.failures.values()) and core.kv.host.stats.dropped
    failed = [event for event in core.scheduler.timeline if event["kind"] == "rollback"]
    assert failed and all(page >= 3 for event in failed for page in event["corrupt"])
    assert any(name.startswith("restore_failures/") and count for name, count in engine_stats(core).items())


def test_memory_that_went_bad_does_not_reach_the_disk(cores: Any) -> None:
    core = cores()
    swap, spoilt = core.tiers.swap, []

    def spoil(decision: Any) -> None:
        if decision.sinks and len(spoilt) < 2:
            core.tiers.host.view(decision.sinks[0].source)[0] ^= 1
            spoilt.append(decision.sinks[0].target)
        swap(decision)

    core.tiers.swap = spoil
    play(core)
    assert core.tiers.disk.write_failures["memory"] == 2
    assert [event["pages"] for event in core.scheduler.timeline if event["kind"] == "lost"][:1] == [spoilt[:1]]


def test_a_decision_that_is_sent_again_does_not_write_what_took_the_place(cores: Any) -> None:
    core = cores()
    execute, disk, again = core.executor, core.tiers.disk, []

    def run(decision: Any) -> Any:
        result = execute(decision)
        if not decision.sinks:
            return result
        pages = [move.target - core.tiers.host.num_pages for move in decision.sinks]
        before = [disk._read(page) for page in pages]
        again.append(decision)
        result = execute(decision)
        assert [disk._read(page) for page in pages] == before
        return result

    core.executor = run
    play(core)
    assert again


def test_a_full_disk_and_a_slow_one_change_no_token(cores: Any, monkeypatch: Any) -> None:
    def full(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        core = cores()
        play(core)
    assert core.tiers.disk.write_failures["full"] and not core.tiers.disk.pages_written
    play(cores())
    slow = cores(wait_s=0.0)
    play(slow)
    assert slow.tiers.disk.failures.get("slow")


def test_the_engine_keeps_it_over_a_restart(tmp_path: Path) -> None:
    settings = {"backend": "reference", "kv_memory": "40KiB", "host_kv_memory": "15KiB", "max_seq_len": 40}
    config = EngineConfig(FIXTURE, page_size=4, disk_kv=str(tmp_path / "kv"), disk_kv_memory="1MiB", **settings)
    said: list[str] = []
    loaded = load_engine(config, say=said.append)
    assert "disk tier" in said[-1] and "0 of them held" in said[-1] and loaded.plan.disk_buffers
    with pytest.raises(InvalidInput, match="another process uses it"):
        load_engine(config, say=said.append)
    loaded.core.close()
    loaded.core.close()
    with pytest.raises(InvalidInput, match="a page at least"):
        load_engine(replace(config, disk_kv_memory="1KiB"), say=said.append)


def test_the_settings_are_checked() -> None:
    assert EngineConfig().disk_kv == ""
    for bad in ({"disk_kv": "x"}, {"disk_kv_memory": "some"}, {"disk_kv_wait_ms": 0}):
        with pytest.raises(InvalidInput, match=next(iter(bad))):
            EngineConfig(**bad)  # type: ignore[arg-type]


def test_what_was_flushed_is_not_there_after_a_crash(cores: Any, tmp_path: Path) -> None:
    play(cores())
    core = cores()
    assert core.tiers.disk.found
    core.flush_cache()
    core.step(core.clock())
    assert core.kv.host.num_held == 0
    core.tiers.disk._todo.put(None)  # the writer ends with what was handed over to it; nothing is written at the end
    core.tiers.disk._writer.join()
    core.tiers.disk._files.close()
    assert cores().tiers.disk.found == []


def test_a_page_that_is_wanted_in_two_places_comes_to_both(tmp_path: Path) -> None:
    pool, host = NullPool(8, 4), HostPages(2, 32)
    disk = DiskPages(str(tmp_path / "kv"), 4, 32, b"", wait_s=5.0, say=lambda line: None)
    tiers = Tiers(NullBackend(), pool, host, disk, lambda: 0.0)
    out = ScheduleDecision("", 1, swap_outs=(PageCopy(0, 0), PageCopy(1, 1)))
    pool.hashes[:8] = array("Q", range(1, 9))
    tiers.swap(out)
    tiers.swap(ScheduleDecision("", 2, sinks=(PageCopy(0, 2), PageCopy(1, 3))))
    twice = [PageCopy(source, target) for target, source in enumerate((2, 3, 2, 0, 1, 0), 2)]
    tiers.swap(ScheduleDecision("", 3, swap_ins=tuple(twice)))
    assert list(pool.hashes[8:]) == [*range(1, 9), *range(1, 5), *range(1, 5), *range(5, 9), *range(1, 5)]
    disk.close(())
