"""Defects of the core, one by one in a copy of it, and the invariant that sees each: a check that sees none is none.

python -m dst.mutations [NAME ...] [--seeds 400]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EVENTS = 200


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new`` in a file of src/octavo, and ``invariant`` must be broken."""

    invariant: str
    what: str
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Verdict:
    """The first seed that broke the invariant (None: none did; -n: kept run n), and what was broken on the way."""

    mutation: Mutation
    seed: int | None
    runs: int
    others: dict[str, int]


MUTATIONS = (
    Mutation("I1", "freed pages are not counted", "core/pages.py", "self.num_freed += 1", "self.num_freed += 0"),
    Mutation(
        "I2", "pages behind a window keep their owner", "core/kv_published.py",
        "                    self._drop(page, branch.owner)\n            table[start:first]",
        "                    self._drop(page, branch.owner) if page < 0 else None\n            table[start:first]",
    ),
    Mutation(
        "I2", "a branch that publishes keeps its old lock", "core/kv_published.py",
        "self.prefix.unlock(cursor, touch=False)", "cursor.locks += 0",
    ),
    Mutation(
        "I3", "cached pages are free", "core/pages.py",
        "return _CACHED if len(owners) == 1 and TREE in owners else _REFERENCED",
        "return _FREE if len(owners) == 1 and TREE in owners else _REFERENCED",
    ),
    Mutation(
        "I4", "the last token is published without its K/V", "core/kv_published.py",
        "tail = units[whole * self.page_size : num_resident]",
        "tail = units[whole * self.page_size : (whole + 1) * self.page_size]",
    ),
    Mutation(
        "I5", "no copy before a write to a shared page", "core/kv_branches.py",
        "if self.allocator.is_shared(table[column])", "if self.allocator.num_pages < 0",
    ),
    Mutation(
        "I6", "the tickets of copies stay open", "core/kv.py",
        "for ticket in self._steps.pop(step, ()):", "for ticket in self._steps.pop(step, ())[:1]:",
    ),
    Mutation(
        "I7", "units of a cached edge are not compared", "core/prefix.py",
        "shared = common_length(child.units, units[matched : matched + len(child.units)])",
        "shared = min(len(child.units), len(units) - matched)",
    ),
    Mutation(
        "I8", "a request ends twice", "core/roster.py",
        "        self.events.append(_request_end(request))\n",
        "        self.events.append(_request_end(request))\n        self.events.append(_request_end(request))\n",
    ),
    Mutation(
        "I9", "a cancel passes over what decodes", "core/roster.py",
        "        for branch in request.branches:\n            self.abandon(branch, target, reason, now, error)",
        "        for branch in request.branches:\n            if branch.state.value != 'decoding' or error:\n"
        "                self.abandon(branch, target, reason, now, error)",
    ),
    Mutation(
        "I10", "token indices begin at 1", "core/roster.py",
        "index = branch.num_output_tokens - 1", "index = branch.num_output_tokens",
    ),
    Mutation(
        "I10", "usage counts what a stop string cuts off", "core/roster.py",
        "num_output_tokens=sum(branch.num_output_tokens for branch in request.branches)",
        "num_output_tokens=sum(branch.num_computed_tokens for branch in request.branches)",
    ),
    Mutation(
        "I11", "one token more than the limit", "core/step.py",
        "if branch.num_tokens >= branch.request.token_limit:", "if branch.num_tokens > branch.request.token_limit:",
    ),
    Mutation(
        "I11", "a step hands out a token too many", "core/rows.py",
        "build_batch([_ask_of(branch) for branch in branches], budget, most, chunk)",
        "build_batch([_ask_of(branch) for branch in branches], budget + 1, most, chunk)",
    ),
    Mutation(
        "I12", "deadlines end nothing", "core/roster.py",
        "return bool(self._deadlines) and self._deadlines[0][0] <= now",
        "return bool(self._deadlines) and self._deadlines[0][0] <= now - 1e6",
    ),
    Mutation(
        "I13", "what a branch was to compute is kept", "core/kv_published.py",
        "self._coming.forget(branch.key)", "self._coming.published(branch.key, 0)",
    ),
    Mutation(
        "I14", "a planned copy is not made", "core/kv_copies.py",
        "copies = tuple(PageCopy(planned.source, target) for target, planned in self._planned.items())",
        "copies = tuple(PageCopy(planned.source, target) for target, planned in list(self._planned.items())[1:])",
    ),
    Mutation(
        "I15", "namespaces share their pages", "core/prefix.py",
        "root = self._roots.get(namespace)\n        if root is None:\n            return PrefixMatch",
        "root = next(iter(self._roots.values()), None)\n        if root is None:\n            return PrefixMatch",
    ),
    Mutation(
        "I17", "who was passed does not go first", "core/policies/__init__.py",
        "aged = branch.bypassed >= bypass_limit", "aged = branch.bypassed < 0",
    ),
    Mutation(
        "I18", "tokens granted to who finds no page are lost", "core/planner.py",
        "            rest = [branch for branch in rest if branch.key not in place and branch.slot is not None]\n",
        "            rest = []\n",
    ),
    Mutation(
        "I18", "prefills stand still for one that does not come in", "core/planner.py",
        "if draft.turn is not None and len(draft.others) == served:", "if draft.turn is not None and served < 0:",
    ),
    Mutation(
        "I18", "a claim counts pages that others hold", "core/claims.py",
        "held = self.kv.num_lasting_pages(branch.key)", "held = branch.kv_blocks",
    ),
    Mutation(
        "I19", "nobody is protected from preemption", "core/claims.py",
        "return branch.num_preemptions >= self.config.max_preemptions", "return branch.num_preemptions >= 1 << 20",
    ),
    Mutation(
        "I23", "tokens of plain decodes are not counted", "engine/metrics.py",
        "produced, listed = len(events.branches), events.others", "produced, listed = 0, events.others",
    ),
    Mutation(
        "VTC", "who had most is served first", "core/policies/fair.py",
        "return (self._counters[tenant], self._slots[tenant])", "return (-self._counters[tenant], self._slots[tenant])",
    ),
    Mutation(
        "GANG", "one of a gang is preempted without the others", "core/roster.py",
        "for member in members(branch)]", "for member in [branch]]",
    ),
    Mutation(
        "I2", "a gang goes on in pages that it gave up", "core/kv_branches.py",
        "source if old is source else self._share_all(source, key)", "old or self._share_all(source, key)",
    ),
    Mutation(
        "GANG", "a gang that comes back draws one by one", "core/gang.py",
        "return int(branch.request.gang and branch.num_output_tokens > 0 and not is_ready(branch))", "return 0",
    ),
    Mutation(
        "I14", "a slot is not told what its member goes on from", "core/gang_move.py",
        "branch.num_resident_tokens, branch.needs_init = num_resident, True",
        "branch.num_resident_tokens = num_resident",
    ),
    Mutation(
        "I11", "a gang that finds no room leaves rows behind", "core/planner.py",
        "            del draft.others[rows:], draft.served[rows:]\n", "",
    ),
    Mutation(
        "I25", "a seed depends on when its request came", "core/scheduler.py",
        "else default_seed(request_id)", "else default_seed(request_id) + self.steps",
    ),
    Mutation(
        "I13", "the search for a culprit outlives its suspects", "core/scheduler.py",
        "            self._isolation.clear()\n", "            pass\n",
    ),
    Mutation(
        "I14", "wrong drafts are taken for drawn", "core/step.py",
        "        for i, token in enumerate(outcome.token_ids):\n",
        "        for i, token in enumerate((*row.drafts, *outcome.token_ids[-1:])):\n",
    ),
    Mutation(
        "I14", "wrong drafts are resident", "core/step.py",
        "branch.num_resident_tokens = branch.num_tokens - 1", "branch.num_resident_tokens += row.num_drafts",
    ),
    Mutation(
        "DRAFT", "pages of wrong drafts are kept", "core/step.py",
        "        self.kv.give_back(branch.key, branch.num_resident_tokens)\n", "",
    ),
    Mutation(
        "DRAFT", "drafts are not recorded", "core/scheduler.py",
        'self.timeline.record("drafts", self.timeline.now, drafts=facts_of_drafts(self._proposed))', "pass",
    ),
    Mutation(
        "DRAFT", "trees of drafts are recorded as chains", "core/speculation.py",
        "(*key, list(tree.token_ids)) if tree.is_chain else", "(*key, list(tree.token_ids)) if tree else",
    ),
    Mutation(
        "DRAFT", "drafts do not look at the bound on gaps", "core/speculation.py",
        "count = draft.allowance.verify(row.start, count)", "draft.allowance.verify(row.start, count)",
    ),
    Mutation(
        "I7", "prefixes are found by the hash of their units alone", "core/prefix.py",
        "            key = tuple(units[matched : matched + size])\n            child = node.children.get(key)\n",
        "            key = tuple(units[matched : matched + size])\n"
        "            child = {hash(name): found for name, found in node.children.items()}.get(hash(key))\n"
        "            if child is not None and matched + len(child.units) <= len(units):\n"
        "                units = units[:matched] + child.units + units[matched + len(child.units) :]\n",
    ),
)  # fmt: skip


def check(mutation: Mutation, most_seeds: int = 400) -> Verdict:
    """Play the kept runs and seeds over a copy of the sources with the defect, until its invariant is broken."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "octavo"
        shutil.copytree(ROOT / "src" / "octavo", copied, ignore=shutil.ignore_patterns("__pycache__", "_native"))
        path = copied / mutation.file
        text = path.read_text("utf-8")
        if text.count(mutation.old) != 1:
            raise SystemExit(f"{mutation.what}: {mutation.file} has {text.count(mutation.old)} such places, not one")
        path.write_text(text.replace(mutation.old, mutation.new), "utf-8")
        return _play(mutation, folder, most_seeds)


def _play(mutation: Mutation, folder: str, most_seeds: int) -> Verdict:
    command = [
        sys.executable,
        "-S",
        "-m",
        "dst",
        "--lines",
        "--kept",
        "--seeds",
        str(most_seeds),
        "--events",
        str(EVENTS),
    ]
    paths = os.pathsep.join([folder, str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    others: dict[str, int] = {}
    played = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            told = json.loads(line)
            played += 1
            if told["code"] == mutation.invariant:
                process.kill()
                return Verdict(mutation, told["seed"], played, others)
            if told["code"]:
                others[told["code"]] = others.get(told["code"], 0) + 1
    return Verdict(mutation, None, played, others)


def _seen(verdict: Verdict) -> str:
    if verdict.seed is None:
        return f"NOT SEEN in {verdict.runs} runs"
    return f"seed {verdict.seed}" if verdict.seed > 0 else f"kept run {-verdict.seed}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; exit status 1 if an invariant did not see its defect."""
    parser = argparse.ArgumentParser(prog="dst.mutations", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", help="invariants, such as I14; all unless named")
    parser.add_argument("--seeds", type=int, default=400)
    options = parser.parse_args(argv)
    chosen = [m for m in MUTATIONS if not options.names or m.invariant in options.names]
    missed = 0
    for mutation in chosen:
        verdict = check(mutation, options.seeds)
        missed += verdict.seed is None
        seen = _seen(verdict)
        others = ", ".join(f"{code} {count}" for code, count in sorted(verdict.others.items()))
        print(
            f"{mutation.invariant:>4}  {mutation.what:<56} {seen:<12} {others and f'before it: {others}'}", flush=True
        )
    print(f"mutations: {len(chosen) - missed} of {len(chosen)} seen by the invariant that they break")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
