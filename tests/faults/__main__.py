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
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faults import rows_adapters, rows_clients, rows_grammars, rows_input, rows_processes, rows_system, rows_tools
from faults.rows import ROWS, Row
from faults.world import Bare, World

__all__ = ["rows_adapters", "rows_clients", "rows_grammars", "rows_input", "rows_processes", "rows_system"]
__all__ += ["ROWS", "rows_tools"]
SCALE = 1 / 20
STOPPED = 1.0  # seconds without a turn
USES = 5  # of a server: with each death of a process the next start waits longer


def once(row: Row, world: Any) -> tuple[bool, str]:
    """Whether the outcome was right, and what is worth knowing."""
    try:
        return True, row.do(world) or ""
    except Exception:
        return False, traceback.format_exc(limit=-4) + "".join(world.output)[-1500:]


class Watch:
    """Whether the machine gives us the time that we count by: another's measurement may have stopped us."""

    def __init__(self) -> None:
        self.longest = 0.0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(0.1)
            now = time.monotonic()
            self.longest, before = max(self.longest, now - before), now


def times(row: Row, scale: float, number: int, seed: int) -> Iterator[tuple[bool, str, float]]:
    """So many times; a server that came through is used again. What went wrong while we were stopped is done again."""
    world: World | None = None
    watch, disturbed, index, used = Watch(), 0, 0, 0
    while index < number:
        started, watch.longest = time.monotonic(), 0.0
        if row.bare:
            right, note = once(row, Bare(scale, random.Random(seed + index)))
        else:
            world, used = world or _ready(row, scale, seed + index), used + 1
            world.dice.seed(seed + index)
            right, note = once(row, world)
            if not right or row.alone or used == USES or index + 1 == number:
                right, note = _over(world, row, right, note)
                world, used = None, 0
        if not right and watch.longest > STOPPED and disturbed < number:
            disturbed += 1
            print(f"{row.number:4} stopped for {watch.longest:.1f} s meanwhile: done again", flush=True)
            continue
        index += 1
        yield right, note, time.monotonic() - started


def _ready(row: Row, scale: float, seed: int) -> World:
    world = World(scale, seed, *row.flags, **row.settings)
    if not row.alone:
        world.settle()
    return world


def _over(world: World, row: Row, right: bool, note: str) -> tuple[bool, str]:
    """The end of a server is part of what has to be right."""
    try:
        if not (right and row.alone):
            world.close(code=0 if right else None)
    except Exception:
        return False, note + traceback.format_exc(limit=-2)
    return right, note


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
    same = ("row", "scale", "seed")
    kept = [each for each in kept if any(each[name] != found[name] for name in same)]
    path.write_text(json.dumps([*kept, found], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
