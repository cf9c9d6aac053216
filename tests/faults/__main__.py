"""Break a server under load, fault by fault, and say how often the outcome was right.

    make faults                                     every row once, timers scaled by 1/20
    make faults ARGS="--times 20 --rows 1,3a,7"     these rows, twenty times each
    make faults ARGS="--shipping --rows 5b"         with the timers as shipped

Prints a line for each time, then a table; with --json FILE what was found is added to that file. Exit status 1 if any
outcome was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults import rows_processes
from faults.rows import ROWS, Row
from faults.world import World

__all__ = ["rows_processes"]
SCALE = 1 / 20


def once(row: Row, world: World) -> tuple[bool, str]:
    """Whether the outcome was right, and what is worth knowing."""
    try:
        return True, row.do(world) or ""
    except Exception:
        return False, traceback.format_exc(limit=-4) + "".join(world.output)[-1500:]


def times(row: Row, scale: float, number: int, seed: int) -> Iterator[tuple[bool, str, float]]:
    """So many times; a server that came through is used again."""
    world: World | None = None
    for index in range(number):
        started = time.monotonic()
        if world is None:
            world = World(scale, seed + index, *row.flags, **row.settings)
            if not row.alone:
                world.settle()
        world.dice.seed(seed + index)
        right, note = once(row, world)
        if right and not row.alone and index + 1 < number:
            yield right, note, time.monotonic() - started
            continue
        try:
            if not (right and row.alone):
                world.close(code=0 if right else None)
        except Exception:
            right, note = False, note + traceback.format_exc(limit=-2)
        world = None
        yield right, note, time.monotonic() - started


def run(row: Row, scale: float, number: int, seed: int) -> dict[str, Any]:
    """One row of the table."""
    found = []
    for right, note, seconds in times(row, scale, number, seed):
        found.append((right, note, seconds))
        print(f"{row.number:4} {'right' if right else 'WRONG'} {seconds:6.1f} s  {note}", flush=True)
    return {
        "row": row.number,
        "what": row.what,
        "outcome": row.outcome,
        "scale": scale,
        "right": sum(right for right, _, _ in found),
        "times": number,
        "seconds": round(sum(seconds for _, _, seconds in found), 1),
        "seed": seed,
        "notes": [note for _, note, _ in found],
    }


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="such as 1,3,5b; a number alone stands for all of its rows")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shipping", action="store_true", help="timers as shipped; only rows that have some")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    asked = [name for name in given.rows.split(",") if name]
    chosen = [row for row in ROWS if not asked or row.number in asked or row.number.rstrip("abcdefgh") in asked]
    if given.shipping:
        chosen = [row for row in chosen if row.has_timers]
    found = []
    for row in chosen:
        found.append(run(row, 1.0 if given.shipping else SCALE, given.times, given.seed))
        if given.json:
            _keep(given.json, found[-1])
    for each in found:
        told = f"{each['right']}/{each['times']}  {each['seconds']:6.1f} s  {each['what']}: {each['outcome']}"
        print(f"{each['row']:4} {told}")
    return int(any(each["right"] < each["times"] for each in found))


def _keep(path: Path, found: dict[str, Any]) -> None:
    """Put a row's result into a file, in the place of an earlier one."""
    kept = json.loads(path.read_text()) if path.exists() else []
    kept = [each for each in kept if (each["row"], each["scale"]) != (found["row"], found["scale"])]
    path.write_text(json.dumps([*kept, found], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
