"""Deterministic simulation: the engine core, its clients, links and clock in one thread, from one seed.

    python -m dst --from 1 --seeds 500       (PYTHONPATH=src:tests; `make dst SEEDS=500 FROM=1`)

scenario.py     what happens in a run, as plain values that can be written down; draw.py draws one from a seed
simulator.py    the heap of events: links, clock, kills; engine.py the engine process, inline.py its steps;
                client.py the other end
odd.py          switches that are odd but legal, and allocations that fail; faults.py steps that fail
invariants.py   what must hold after every event; ledger.py what may be said of each request; drafts.py of each draft
coverage.py     edges of the request state table taken; shrink.py the smallest script that still fails
sweep.py        the N-th allocation fails, for N = 1, 2, 3 ...; mutations.py defects, and the invariant that sees each
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))  # the null model
