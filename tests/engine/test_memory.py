"""The memory plan: sizes, what is available, what fits, and the numbers in a refusal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.decoding.speculation import NgramProposer
from octavo.decoding.speculation.suffix import NODE_BYTES, SuffixProposer, SuffixSettings
from octavo.engine.config import EngineConfig
from octavo.engine.memory import MemoryNeeds, available_memory, parse_size, plan_memory, show_size, total_memory

NEEDS = MemoryNeeds(weights=500, activations=50, workspace=50, page_bytes=10)


def plan(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "page_size": 4,
        "num_groups": 2,
        "max_seq_len": 40,
        "max_sequences": 3,
        "kv_memory": None,
        "memory_fraction": 0.5,
        "default_cap": 10_000,
        "available": 4000,
    }
    needs = replace(NEEDS, **{name: changes.pop(name, 0) for name in ("adapters", "drafts", "grammars")})
    return plan_memory(needs, **{**settings, **changes})


def test_the_host_tier_is_whole_pages_in_the_plan() -> None:
    with_host, without = plan(host_memory=257), plan()
    assert (with_host.host_pages, with_host.host, with_host.num_pages) == (25, 250, without.num_pages)
    assert with_host.total == without.total + 250 and "host tier" in with_host.describe()
    assert "host tier" not in without.describe()
    with pytest.raises(InvalidInput, match="a page at least"):
        plan(host_memory=9)
    with pytest.raises(InvalidInput, match=r"host tier 1\.\d KiB"):
        plan(host_memory=1900)


@pytest.mark.parametrize("name", ["adapters", "drafts", "grammars"])
def test_what_not_every_engine_has_is_in_the_plan(name: str) -> None:
    with_it, without = plan(**{name: 300}), plan()
    assert with_it.total <= with_it.budget
    assert with_it.total - with_it.kv == without.total - without.kv + 300
    assert name in with_it.describe() and name not in without.describe()
    with pytest.raises(InvalidInput, match=rf"{name} 1\.\d KiB"):
        plan(**{name: 1900})


def test_what_is_remembered_to_guess_tokens_from_has_a_bound() -> None:
    most = SuffixProposer(SuffixSettings(own_nodes=10, past_nodes=100, namespaces=3)).most_bytes(4, 1000)
    assert most == (4 * 10 + 3 * 100) * NODE_BYTES
    assert EngineConfig(speculative="suffix").draft_bytes(100) > 0 == EngineConfig().draft_bytes(100)
    lookup = EngineConfig(speculative="ngram", max_running_requests=3)
    assert lookup.draft_bytes(100) == NgramProposer(2, 6).most_bytes(3, 100) > 0
    assert lookup.draft_bytes(10**6) == lookup.draft_bytes(1 << 16)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("1KiB", 1024), ("2 MB", 2_000_000), ("1.5GiB", 3 << 29), ("3g", 3_000_000_000), (77, 77)],
)
def test_sizes_are_read(text: Any, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "0", "many", "1XB", "1 1", None, True, 0, "0.1"])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(InvalidInput):
        parse_size(text)


def test_sizes_are_shown() -> None:
    assert [show_size(n) for n in (5, 2048, 3 << 20, 5 << 30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


def test_enough_for_every_sequence_when_there_is_room() -> None:
    made = plan()
    assert made.num_pages == 3 * (10 * 2 + 2)
    assert made.total == 600 + made.num_pages * 10
    assert made.capacity_tokens == made.num_pages // 2 * 4
    text = made.describe()
    for word in ("weights", "KV cache", "activations", "workspace", "total", str(made.num_pages)):
        assert word in text


def test_less_when_there_is_less() -> None:
    assert plan(available=2000).num_pages == (1000 - 600) // 10
    assert plan(default_cap=300).num_pages == 30
    assert plan(available=None).num_pages == 66


def test_what_is_asked_for_is_given() -> None:
    assert plan(kv_memory=555).num_pages == 55
    assert plan(kv_memory=5000, available=None).num_pages == 500


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"available": 1000}, ("500 B", "200 B")),
        ({"kv_memory": 100}, ("max_seq_len=40", "200 B")),
        ({"kv_memory": 2000}, ("2.5 KiB", "lower")),
        ({"available": 0}, ("0 B",)),
    ],
)
def test_a_refusal_has_the_numbers_and_the_remedy(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput) as caught:
        plan(**changes)
    for word in words:
        assert word in str(caught.value)


@given(st.integers(0, 6000), st.integers(1, 200), st.integers(1, 8), st.sampled_from((1, 2, 4, 16)))
def test_a_plan_never_exceeds_its_budget_and_always_holds_one_sequence(
    available: int, max_seq_len: int, max_sequences: int, page_size: int
) -> None:
    try:
        made = plan(available=available, max_seq_len=max_seq_len, max_sequences=max_sequences, page_size=page_size)
    except InvalidInput:
        one = -(-max_seq_len // page_size) * 2 * 10
        assert 600 + one > int(available * 0.5)
        return
    assert made.budget is not None
    assert made.total <= made.budget
    assert made.capacity_tokens >= max_seq_len


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="ascii")
    return root


def test_the_machine_alone(tmp_path: Path) -> None:
    machine(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   700 kB\n"})
    assert available_memory(tmp_path) == 700 * 1024 and total_memory(tmp_path) == 9 * 1024


def test_a_control_group_and_its_parents_bound_it(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 700 kB\n",
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "500000\n",
        "sys/fs/cgroup/a/memory.current": "400000\n",
        "sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 30000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": "1\n",
    }
    assert available_memory(machine(tmp_path, files)) == 130000


def test_the_older_control_groups(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 700 kB\n",
        "proc/self/cgroup": "5:cpu:/x\n4:memory:/y\n",
        "sys/fs/cgroup/memory/y/memory.limit_in_bytes": "200000\n",
        "sys/fs/cgroup/memory/y/memory.usage_in_bytes": "0\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
    }
    assert available_memory(machine(tmp_path, files)) == 200000
    assert total_memory(tmp_path) == 200000


def test_a_machine_that_does_not_say(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None and total_memory(tmp_path) is None
