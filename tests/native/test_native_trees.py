"""Trees of drafts in the library: every path has the bits of its chain, on every table, in any company."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from native_harness import ISAS, compiled
from tree_harness import TreeRun, by_chains, cases_of, differences

from octavo.backends.native_program import StepLimits
from octavo.core.errors import InvalidInput

KINDS = [("qwen3", "fp32", "fp32"), ("gemma3", "bf16", "bf16"), ("llama-biases", "w8g64", "int8")]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("name", "kind", "kv_dtype"), KINDS)
def test_a_path_has_the_bits_of_its_chain(isa: str, name: str, kind: str, kv_dtype: str) -> None:
    alone = compiled(name, kind, kv_dtype, isa)
    for seed in range(3):
        loaded = compiled(name, kind, kv_dtype, isa, threads=1 + seed)
        cases = cases_of(Random(seed), 4, [70, 200, 540][seed], [9, 40, 9][seed])
        assert differences(TreeRun(loaded, cases, 16 << seed).trees(), by_chains(alone, cases, 16)) == 0.0


@pytest.mark.parametrize(("name", "kind", "kv_dtype"), KINDS)
def test_trees_over_shared_pages_and_long_ones_by_parts(name: str, kind: str, kv_dtype: str) -> None:
    alone = compiled(name, kind, kv_dtype)
    for seed, most in enumerate((5, 24)):
        loaded = compiled(name, kind, kv_dtype, threads=2 + seed)
        cases = cases_of(Random(seed), 3, 40, most, shared=1056)
        run = TreeRun(loaded, cases, 16, shared=1056)
        assert differences(run.trees(), by_chains(alone, cases, 16)) == 0.0


def test_what_is_no_tree_is_refused_by_the_library() -> None:
    loaded = compiled("qwen3")
    for parents, positions in (([-1, 1], [1, 2]), ([-1, -2], [1, 2]), ([-1, -1], [1, 2]), ([-1, 0], [1, 1])):
        run = TreeRun(loaded, cases_of(Random(1), 1, 1, 2), 16)
        run.step([[3]], [[0]])
        with pytest.raises(InvalidInput, match=r"tree|consecutive"):
            run.step([[4, 5]], [positions], parent_rows=[parents])


def test_moved_slots_keep_every_byte() -> None:
    """Keys and values that are rounded once are not rounded again."""
    for kv_dtype in ("fp32", "bf16", "int8"):
        loaded = compiled("qwen3", "fp32", kv_dtype)
        groups, rng = loaded.model.kv_groups(), np.random.default_rng(3)
        kv = loaded.ops.allocate_kv(4, 16, groups)
        width = kv.depth * kv.num_kv_heads * kv.head_dim
        for offset in range(16):
            kv.write(0, offset, rng.normal(size=width).tolist(), rng.normal(size=width).tolist())
        before = [kv.read(0, offset) for offset in range(16)]
        kv.move_slots([(offset, 32 + (offset * 7 + 3) % 16) for offset in range(16)])
        assert [kv.read(2, (offset * 7 + 3) % 16) for offset in range(16)] == before


def test_a_tree_and_chains_in_one_step() -> None:
    """Rows of sequences without parents are chains."""
    loaded = compiled("qwen3", threads=2)
    loaded.model.limits = StepLimits(max_tokens=256)
    cases = cases_of(Random(5), 3, 40, 8)
    run = TreeRun(loaded, cases, 16)
    histories = [case.history for case in cases]
    run.step(histories, [list(range(len(ids))) for ids in histories])
    tokens = [cases[0].tokens, [1, 2, 3], [4]]
    places = [
        cases[0].positions(),
        *([len(ids) + i for i in range(n)] for ids, n in zip(histories[1:], (3, 1), strict=True)),
    ]
    got = run.step(tokens, places, parent_rows=[cases[0].parents, (), ()])
    want = by_chains(loaded, cases[:1], 16)[0][0]
    assert np.array_equal(got[0], want)
    for s in (1, 2):
        ids = [*histories[s], *tokens[s]]
        alone = TreeRun(loaded, [cases[s]], 16)
        alone.tables = [[list(range(g * 8, g * 8 + 8))] for g in range(len(alone.groups))]
        alone.kv = loaded.ops.allocate_kv(64, 16, alone.groups)
        assert np.array_equal(got[s], alone.step([ids], [list(range(len(ids)))])[0][-len(tokens[s]) :])
