"""docs/overload.md shows what the code does."""

from pathlib import Path

import pytest
from load_examples import EXAMPLES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "overload.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_page_shows_what_the_code_does(name):
    assert f"<!-- example: {name} -->\n```text\n{EXAMPLES[name]()}\n```" in PAGE
