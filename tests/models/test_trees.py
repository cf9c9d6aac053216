"""Every path of a tree of drafts gives what its chain gives: bit for bit on `reference`, near it on `numpy`."""

from __future__ import annotations

from random import Random

import pytest
from tree_harness import TreeRun, by_chains, cases_of, differences, tiny

from octavo.backends.ops import batch_fields, check_tree, path_moves
from octavo.core.draft_tree import path_of
from octavo.core.errors import InvalidInput


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral-window"])
def test_on_reference_a_path_has_the_bits_of_its_chain(name: str) -> None:
    loaded = tiny(name, "reference")
    for seed in range(3):
        cases, page_size = cases_of(Random(seed), 3, 70, 7), [1, 4, 16][seed]
        assert differences(TreeRun(loaded, cases, page_size).trees(), by_chains(loaded, cases, 16)) == 0.0


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_on_numpy_a_path_is_near_its_chain(name: str) -> None:
    loaded = tiny(name, "numpy")
    for seed in range(4):
        cases = cases_of(Random(seed), 3, 70 if seed else 530, 9)
        assert differences(TreeRun(loaded, cases, 4).trees(), by_chains(loaded, cases, 16)) < 2e-4


def test_slots_of_a_tree_lie_side_by_side_and_an_accepted_path_is_moved_to_its_positions() -> None:
    parents = [-1, 0, 0, 2, 1, 3]
    fields = batch_fields(range(6), [5, 6, 6, 7, 7, 8], [6], [[[7, 3, 9]]], 4, parent_rows=[parents])
    assert fields["slot_mapping"] == [[13, 14, 15, 36, 37, 38]]
    assert fields["seq_lens"] == [11]
    assert path_of(parents, 5) == [0, 2, 3, 5]
    assert path_moves(5, [0, 2, 3, 5], [7, 3, 9], 4) == [(15, 14), (36, 15), (38, 36)]
    assert path_moves(5, [0, 1], [7, 3, 9], 4) == []


@pytest.mark.parametrize(
    ("positions", "parents", "field"),
    [
        ([5, 6], [-1, 1], "parent_rows"),
        ([5, 6], [-1, -2], "parent_rows"),
        ([5, 6], [-1], "parent_rows"),
        ([5, 7], [-1, 0], "positions"),
        ([5, 6], [-1, -1], "positions"),
    ],
)
def test_what_is_no_tree_is_refused(positions: list[int], parents: list[int], field: str) -> None:
    with pytest.raises(InvalidInput) as error:
        check_tree(positions, parents)
    assert error.value.field == field
