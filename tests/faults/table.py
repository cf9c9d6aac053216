"""The table of docs/reliability.md, made of what runs have found.

python -m faults.table FILE.json...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults.__main__ import ROWS
from faults.rows import Row


def cells(row: Row, found: Sequence[dict[str, Any]], shipped: bool) -> str:
    """How often the outcome was right, and seconds for each time."""
    mine = [each for each in found if each["row"] == row.number and (each["scale"] == 1.0) == shipped]
    if not mine:
        return " "
    times = sum(each["times"] for each in mine)
    return f"{sum(each['right'] for each in mine)}/{times}, {sum(each['seconds'] for each in mine) / times:.0f} s"


def main() -> None:
    """Print it."""
    found = [each for name in sys.argv[1:] for each in json.loads(Path(name).read_text())]
    print("| row | fault | right outcome | timers / 20 | as shipped |\n|---|---|---|---|---|")
    for row in sorted(ROWS, key=lambda row: (int(row.number.rstrip("abcdef")), row.number)):
        told = " | ".join(cells(row, found, shipped) for shipped in (False, True))
        print(f"| {row.number} | {row.what} | {row.outcome} | {told} |")


if __name__ == "__main__":
    main()
