"""What the library refuses, and what it must not do: hostile records and steps, allocation during a step."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from native_harness import compiled, prompt, run

from octavo.backends import available_backends, create_backend, native_lib, native_program
from octavo.backends.native_backend import NativeBackend
from octavo.backends.native_lib import BackendUnavailable, library
from octavo.backends.native_program import StepLimits
from octavo.core.errors import InvalidInput
from octavo.core.kv_groups import KVGroup

IDS = prompt("limits", 40)


def test_a_step_allocates_nothing() -> None:
    for name in ("llama-biases", "qwen3-moe"):
        loaded = compiled(name, "w8g64", "int8", threads=2)
        pool = loaded.ops.allocate_kv(8, 16, loaded.model.kv_groups())
        loaded.model.open(pool, StepLimits(64, 8, 64))
        before = library().octavo_allocations()
        for tokens in (40, 1, 3):
            table = [[list(range(4))]]
            batch = loaded.ops.batch(IDS[:tokens], list(range(tokens)), [tokens], table, pool)
            loaded.model.forward(loaded.ops, {}, batch)
        assert library().octavo_allocations() == before


Spoil = Callable[[random.Random, Any], None]


def spoil_record(rng: random.Random, spec: Any) -> None:
    """One number of one record becomes another one."""
    op = spec.ops[rng.randrange(spec.num_ops)]
    wild = rng.choice([-2, -1, 0, 1, 2, 3, 7, 100, 1 << 30, -(1 << 31)])
    field = rng.choice(["code", "inputs", "outputs", "weights", "i"])
    if field == "code":
        op.code = wild
    else:
        numbers = getattr(op, field)
        numbers[rng.randrange(len(numbers))] = wild


def spoil_limit(rng: random.Random, spec: Any) -> None:
    """One count or limit becomes another one that the arrays still cover."""
    limits = ["max_tokens", "max_sequences", "max_logit_rows", "max_positions"]
    setattr(spec, rng.choice(["size", "num_groups", "logits", *limits]), rng.choice([-1, 0, 1 << 30, -(1 << 31)]))


def spoil_buffer(rng: random.Random, spec: Any) -> None:
    """One buffer gets another size."""
    buffer = spec.buffers[rng.randrange(spec.num_buffers)]
    if rng.random() < 0.5:
        buffer.rows = rng.choice([-1, 1 - buffer.rows, 9])
    else:
        buffer.cols = rng.choice([0, -1, 1, 17, 1 << 40, -(1 << 60)])


@pytest.mark.parametrize("spoil", [spoil_record, spoil_limit, spoil_buffer])
@pytest.mark.parametrize("name", ["llama-biases", "qwen3-moe"])
def test_spoiled_programs_are_refused_or_run_within_their_memory(
    spoil: Spoil, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever one number becomes: the program is refused with a reason, or it is another valid program."""
    loaded = compiled(name, threads=2)
    pool = loaded.ops.allocate_kv(8, 16, loaded.model.kv_groups())
    batch = loaded.ops.batch(IDS, list(range(len(IDS))), [len(IDS)], [[list(range(4))]], pool)
    original, refused = native_program._spec, 0
    for seed in range(150):
        rng = random.Random(seed)

        def spoiled(*args: Any, rng: random.Random = rng) -> Any:
            spec, keep = original(*args)
            spoil(rng, spec)
            return spec, keep

        monkeypatch.setattr(native_program, "_spec", spoiled)
        try:
            loaded.model.open(pool, StepLimits(64, 8, 64))
        except InvalidInput as error:
            assert len(str(error)) > 20
            refused += 1
            continue
        loaded.model.forward(loaded.ops, {}, batch)
    assert refused > 50


def test_steps_outside_the_limits_are_refused() -> None:
    loaded = compiled("mistral-window", threads=2)
    pool = loaded.ops.allocate_kv(4, 16, loaded.model.kv_groups())
    loaded.model.open(pool, StepLimits(24, 2, 48))

    def step(ids: list[int], positions: list[int], lens: list[int], table: list[list[int]], **more: Any) -> None:
        loaded.model.forward(loaded.ops, {}, loaded.ops.batch(ids, positions, lens, [table], pool, **more))

    step([1, 2], [30, 31], [2], [[-1, 3]])  # the first page is behind the window
    step([1], [23], [1], [[-1, 3]])  # by one position: 16 .. 23 are seen
    wrong: list[tuple[str, Callable[[], None]]] = [
        ("tokens", lambda: step([1] * 25, list(range(25)), [25], [[0, 1]])),
        ("sequences", lambda: step([1] * 3, [0] * 3, [1] * 3, [[0], [1], [2]])),
        ("logit_rows", lambda: step([1], [0], [1], [[0]], logit_rows=[0] * 27)),
        ("token id", lambda: step([96], [0], [1], [[0]])),
        ("token id", lambda: step([-1], [0], [1], [[0]])),
        ("logit row", lambda: step([1], [0], [1], [[0]], logit_rows=[1])),
        ("position", lambda: step([1], [48], [1], [[0, 1, 2, 3]])),
        ("position", lambda: step([1], [-1], [1], [[0]])),
        ("consecutive", lambda: step([1, 1], [0, 2], [2], [[0]])),
        ("no token", lambda: step([1], [0], [1, 0], [[0], [1]])),
        ("too short", lambda: step([1], [17], [1], [[0]])),
        ("page", lambda: step([1], [0], [1], [[4]])),
        ("page", lambda: step([1], [16], [1], [[-1, 0]])),  # positions 9 .. 16 are seen
        ("page", lambda: step([1], [22], [1], [[-1, 0]])),  # positions 15 .. 22 are seen
    ]
    for reason, call in wrong:
        with pytest.raises(InvalidInput, match=reason):
            call()


def test_pages_are_copied_and_slots_moved_exactly() -> None:
    rng = np.random.default_rng(0)
    for kv_dtype in native_lib.KV_TYPES:
        groups = (KVGroup((0, 1), num_kv_heads=2, k_dim=12, v_dim=12, dtype=kv_dtype),)
        pool = NativeBackend(threads=1).allocate_kv(4, 16, groups)
        for offset in range(16):
            pool.write(1, offset, rng.normal(size=48).tolist(), rng.normal(size=48).tolist())
        kept = [pool.read(1, offset) for offset in range(16)]
        pool.copy_page(1, 3)
        assert [pool.read(3, offset) for offset in range(16)] == kept
        pool.move_slots([(16 + 5, 3 * 16 + 9), (16 + 9, 3 * 16 + 5)])
        assert (pool.read(3, 9), pool.read(3, 5)) == (kept[5], kept[9])
        assert pool.read(3, 6) == kept[6]
        pool.write(0, 0, *kept[3])
        assert pool.read(0, 0) == kept[3], "what was stored is stored again unchanged"
        for call, arguments in ((pool.copy_page, (0, 4)), (pool.move_slots, ([(0, 64)],)), (pool.read, (4, 0))):
            with pytest.raises(InvalidInput, match="out of range"):
                call(*arguments)


@pytest.mark.parametrize("page_size", [1, 8, 24, 0, 1 << 20])
def test_page_sizes_that_no_kernel_takes(page_size: int) -> None:
    with pytest.raises(InvalidInput, match="page"):
        NativeBackend(threads=1).allocate_kv(4, page_size, (KVGroup((0,), num_kv_heads=1, k_dim=16, v_dim=16),))


def test_unknown_instruction_sets_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"^isa = 'sse9'.*use one of .*generic"):
        NativeBackend("sse9")


def test_unknown_instruction_sets_of_the_environment_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE_ISA", "sse8")
    with pytest.raises(InvalidInput, match=r"^OCTAVO_NATIVE_ISA = 'sse8'.*use one of .*generic"):
        NativeBackend()
    assert NativeBackend("generic").engine.isa == "generic"


def test_without_the_library_auto_takes_numpy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_NATIVE_LIBRARY", str(tmp_path / "missing.so"))
    assert available_backends()[-1] == "numpy"
    assert create_backend("auto").name == "numpy"
    with pytest.raises(BackendUnavailable, match=r"was not built.*backend='numpy'"):
        create_backend("native")
    (tmp_path / "missing.so").write_bytes(b"no library")
    with pytest.raises(BackendUnavailable, match="cannot be loaded"):
        native_lib._load.__wrapped__(tmp_path / "missing.so")


def test_a_forked_child_computes_too() -> None:
    loaded = compiled("qwen3", threads=2)
    (expected,) = run(loaded, [IDS], [[len(IDS)]])
    script = (
        "import os, sys; sys.path[:0] = sys.argv[1:]\n"
        "from native_harness import compiled, prompt, run\n"
        "ids = prompt('limits', 40); loaded = compiled('qwen3', threads=2)\n"
        "first = run(loaded, [ids], [[40]])[0].tobytes()\n"
        "child = os.fork()\n"
        "same = run(loaded, [ids], [[7, 33]])[0].tobytes() == first\n"
        "if child == 0: os._exit(0 if same else 1)\n"
        "sys.exit(os.waitpid(child, 0)[1] or not same)\n"
    )
    folder = Path(__file__).parent
    paths = [str(folder), str(folder.parent / "models"), *sys.path]
    done = subprocess.run([sys.executable, "-c", script, *paths], timeout=60, check=False)
    assert done.returncode == 0
    assert np.isfinite(expected).all()


def test_records_have_the_sizes_of_the_header() -> None:
    """The library compares the sizes of the two large records itself; the others are checked by hand here."""
    sizes = {native_lib.Op: 4 * (1 + 4 + 4 + 9 + 6 + 4), native_lib.Buffer: 16}
    sizes |= {native_lib.Sampling: 120, native_lib.Rules: 136, native_lib.Logprobs: 56}
    assert {kind: ctypes.sizeof(kind) for kind in sizes} == sizes
