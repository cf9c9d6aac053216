"""What the instructions under the products can give, measured in the run: dots of vectors, and tiles.

A table's own dots come from the library. It has none for tile registers: their peak comes from tile_peak.c, built with
the compiler that built the library, and the dots of the same machine's vectors come from the table below it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bars import Value

__all__ = ["VECTORS_OF", "Peaks", "measure_again", "measure_peaks", "share_of_peak"]

_SOURCE = Path(__file__).with_name("tile_peak.c")
_FLAGS = ("-O2", "-mamx-tile", "-mamx-int8", "-mamx-bf16", "-pthread")
VECTORS_OF = {"amx": "avx512_vnni_bf16"}  # the table whose vectors a table has beside its tiles


@dataclass(frozen=True)
class Peaks:
    """Gop/s on all threads by kind of dot (int8, bf16, fp32; a product and a sum are two). `tiles` may be empty."""

    dots: Mapping[str, float]
    tiles: Mapping[str, float]

    def of(self, kind: str, tiles: bool) -> tuple[float, str]:
        """The peak of tiles or of the vectors' dots, and its name; 0 where it is not known."""
        return (self.tiles if tiles else self.dots).get(kind, 0.0), "tiles" if tiles else "dots"


def measure_peaks(native: Mapping[str, Any]) -> Peaks:
    """The peaks behind a machine card's native part."""
    threads = native["threads"]
    dots = dict(native["dots_gop_s"][str(threads)])
    below = VECTORS_OF.get(native["table"])
    if below is None:
        return Peaks(dots, {})
    tiles = {kind: rate for kind, rate in dots.items() if rate and kind != "fp32"} or _tiles(threads)
    return Peaks({**_vectors(below, threads), "fp32": dots["fp32"]}, tiles)


def _vectors(table: str, threads: int) -> dict[str, float]:
    from octavo.backends.native_backend import NativeBackend
    from octavo.backends.native_measure import measure_dots

    return measure_dots(NativeBackend(table, threads).engine, threads)


def measure_again(peaks: Peaks, table: str, threads: int) -> Peaks:
    """With the dots of a table of vectors measured once more, the better of the two: two virtual processors that share
    a core for a minute have half of their peak, and then have all of it again."""
    now = _vectors(table, threads)
    return Peaks({kind: max(rate, now.get(kind, 0.0)) for kind, rate in peaks.dots.items()}, peaks.tiles)


def _tiles(threads: int) -> dict[str, float]:
    """Nothing without a compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return {}
    with TemporaryDirectory() as folder:
        program = str(Path(folder) / "tile_peak")
        subprocess.run([compiler, *_FLAGS, str(_SOURCE), "-o", program], check=True, capture_output=True)
        done = subprocess.run([program, str(threads)], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def share_of_peak(records: Sequence[Mapping[str, Any]], peaks: Peaks, tiles: bool) -> Value:
    """Operations of some ops together, over their time, against the peak of what they run on (records of OpsBench)."""
    from octavo.engine.bench_cost import PEAK_OF

    if not records:
        return Value(None, "not measured")
    kind = PEAK_OF[records[0]["format"]]
    rate = sum(r["operations"] for r in records) / sum(r["microseconds"] for r in records) / 1e3
    peak, what = peaks.of(kind, tiles)
    if not peak:
        return Value(None, f"no peak of {kind} is known for this kernel table; {rate:.0f} Gop/s")
    note = f"{rate:.0f} of {peak:.0f} Gop/s, {kind} {what}"
    if tiles and peaks.dots.get(kind):
        note += f"; {100 * rate / peaks.dots[kind]:.0f}% of the {peaks.dots[kind]:.0f} of the vectors' dots"
    return Value(rate / peak, note)
