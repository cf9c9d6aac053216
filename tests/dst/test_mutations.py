"""A few of the defects that the simulation must see (`make dst-mutations` has them all), and the table itself."""

from __future__ import annotations

import re

import pytest

from dst.mutations import MUTATIONS, ROOT, check
from dst.scenario import SWITCHES, Fault

FEW = ("cached pages are free", "a cancel passes over what decodes", "a planned copy is not made")
WATCHED = {f"I{n}" for n in (*range(1, 16), 17, 18, 19, 23, 25)} | {"VTC", "GANG", "DRAFT"}


@pytest.mark.parametrize("mutation", [each for each in MUTATIONS if each.what in FEW], ids=lambda each: each.invariant)
def test_a_defect_is_seen(mutation):
    assert check(mutation, most_seeds=60).seed is not None


def test_every_invariant_has_a_defect_that_the_sources_can_have():
    assert {each.invariant for each in MUTATIONS} == WATCHED
    assert len({each.what for each in MUTATIONS}) == len(MUTATIONS)
    for each in MUTATIONS:
        assert (ROOT / "src" / "octavo" / each.file).read_text("utf-8").count(each.old) == 1, each.what
        assert each.old != each.new


def test_the_page_lists_what_there_is():
    page = (ROOT / "docs" / "simulation.md").read_text("utf-8")
    assert f"({len(MUTATIONS)} of {len(MUTATIONS)} seen)" in page
    for each in MUTATIONS:
        assert f"| {each.invariant} | {each.what} |" in page
    for name in sorted(WATCHED) + [f"`{name}`" for name in SWITCHES]:
        assert f"| {name} |" in page
    faults = re.findall(r"(?:^ {4}|; |\n {4})(\w+): ", Fault.__doc__ or "")
    assert len(faults) == 8
    for name in faults:
        assert f"| `{name}` |" in page
