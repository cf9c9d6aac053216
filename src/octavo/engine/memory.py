"""The memory plan: what an engine will hold, added up before anything large is allocated, printed, and kept to."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from octavo.core.errors import InvalidInput

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_MOST = float(1 << 63)
_EXTRAS = {
    "adapters": "",
    "drafts": "at most: what tokens are guessed from",
    "grammars": "at most: compiled ones that are kept",
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_size(value: str | int, field: str = "size") -> int:
    """Bytes of ``"512MiB"``, ``"2GB"``, ``"1.5g"`` or a plain number. Raises ``InvalidInput``."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise InvalidInput(field, value, "give a number of bytes, such as 512MiB or 2GB")
    number, unit, binary = match.groups()
    power = "bkmgt".index(unit.lower() or "b")
    size = float(number) * (1024**power if binary else _UNITS[unit.lower()])
    if not 1 <= size < _MOST:
        raise InvalidInput(field, value, "give at least one byte, and less than 8 EiB")
    return int(size)


def show_size(size: int) -> str:
    """``size`` bytes for people, in binary units."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that a new process could still take: the least of what the machine and the control groups leave.

    None where the machine does not say. Page cache that can be dropped counts as free. ``root`` is for tests.
    """
    limits = [_of_machine(root, "MemAvailable:"), *map(_room, _groups(root))]
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def total_memory(root: Path = Path("/")) -> int | None:
    """Bytes that the machine has or the control groups allow, the least of them, whatever is in use; None: unknown."""
    limits = [_of_machine(root, "MemTotal:"), *map(_limit, _groups(root))]
    return min((limit for limit in limits if limit is not None), default=None)


def _of_machine(root: Path, field: str) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return None


def _groups(root: Path) -> list[Path]:
    """The folders of this process's control group and each of its parents."""
    found: list[Path] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        parts = [part for part in path.split("/") if part]
        found += [base.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return found


def _limit(folder: Path) -> int | None:
    limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
    return None if limit is None or limit >= 1 << 60 else limit


def _room(folder: Path) -> int | None:
    """Room left under the limit of a control group."""
    limit = _limit(folder)
    used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    names = ("inactive_file ", "total_inactive_file ")
    droppable = [int(line.split()[1]) for line in _lines(folder / "memory.stat") if line.startswith(names)]
    return limit - used + max(droppable, default=0)


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


@dataclass(frozen=True)
class MemoryNeeds:
    """What a model takes on a backend, in bytes; the KV pages are what is chosen to fit beside it."""

    weights: int
    activations: int  # what the largest step takes beside its logits
    workspace: int  # logits of the largest step
    page_bytes: int  # one page: all layers of its group, keys and values
    adapters: int = 0  # all places for them
    drafts: int = 0  # what is remembered to guess tokens from
    draft_model: int = 0  # weights, activations and workspace of a draft model
    draft_page_bytes: int = 0  # its pages for the tokens of one page
    grammars: int = 0  # those that are kept compiled

    @property
    def fixed(self) -> int:
        """All but pages."""
        return self.weights + sum(self.extras.values()) + self.draft_model + self.activations + self.workspace

    @property
    def page_and_draft_bytes(self) -> int:
        """One page, and the draft model's for as many tokens."""
        return self.page_bytes + self.draft_page_bytes

    @property
    def extras(self) -> dict[str, int]:
        """What not every engine has, by name."""
        named = {"adapters": self.adapters, "drafts": self.drafts, "grammars": self.grammars}
        return {name: size for name, size in named.items() if size}


@dataclass(frozen=True)
class MemoryPlan:
    """What an engine holds, in bytes. Nothing that it allocates later exceeds it."""

    needs: MemoryNeeds
    num_pages: int
    page_size: int
    num_groups: int
    available: int | None
    budget: int | None
    host_pages: int = 0
    disk_buffers: int = 0  # pages that are on their way to disk and back

    @property
    def host(self) -> int:
        """Bytes of the host tier."""
        return (self.host_pages + self.disk_buffers) * self.needs.page_bytes

    @property
    def kv(self) -> int:
        """Bytes of the page pool."""
        return self.num_pages * self.needs.page_bytes

    @property
    def draft_kv(self) -> int:
        """Bytes of the draft model's page pool, which has room for as many tokens."""
        return self.num_pages * self.needs.draft_page_bytes

    @property
    def total(self) -> int:
        """All of it."""
        needs = self.needs
        return needs.fixed + self.kv + self.draft_kv + self.host

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose keys and values fit at once (each takes a place in a page of every group)."""
        return self.num_pages // self.num_groups * self.page_size

    def _host_pages(self) -> str:
        ways = f", {self.disk_buffers} on their way to disk and back" if self.disk_buffers else ""
        return f"{self.host_pages} pages of what was evicted{ways}"

    def describe(self) -> str:
        """The plan for people, one line a part."""
        rows = [
            ("weights", self.needs.weights, ""),
            *((name, size, _EXTRAS[name]) for name, size in self.needs.extras.items()),
            *([("draft model", self.needs.draft_model, "as it runs")] if self.needs.draft_model else []),
            *([("draft KV", self.draft_kv, "its own pages, for as many tokens")] if self.draft_kv else []),
            ("KV cache", self.kv, f"{self.num_pages} pages of {self.page_size}: {self.capacity_tokens} tokens"),
            *([("host tier", self.host, self._host_pages())] if self.host else []),
            ("activations", self.needs.activations, ""),
            ("workspace", self.needs.workspace, ""),
            ("total", self.total, "" if self.available is None else f"of {show_size(self.available)} available"),
        ]
        lines = [f"  {name:<12}{show_size(size):>11}  {note}".rstrip() for name, size, note in rows]
        return "\n".join(["memory plan", *lines])


def plan_memory(
    needs: MemoryNeeds,
    *,
    page_size: int,
    num_groups: int,
    max_seq_len: int,
    max_sequences: int,
    kv_memory: int | None,
    memory_fraction: float,
    default_cap: int,
    available: int | None,
    sequence_pages: int | None = None,
    host_memory: int = 0,
    disk_buffers: int = 0,
) -> MemoryPlan:
    """Choose the number of KV pages.

    With ``kv_memory`` (bytes): that many bytes of pages. Otherwise enough for ``max_sequences`` full sequences, but at
    most ``default_cap`` bytes and what ``memory_fraction`` of ``available`` leaves. One full sequence must fit
    (``sequence_pages``; by default those of all its tokens).
    ``host_memory``: bytes of the host tier, in whole pages, beside all that, and ``disk_buffers`` pages.
    Raises ``InvalidInput`` with the numbers when it does not, or when the whole exceeds the budget.
    """
    budget = None if available is None else int(available * memory_fraction)
    host_pages = host_memory // needs.page_bytes
    if host_memory and not host_pages:
        raise InvalidInput("host_kv_memory", host_memory, f"give a page at least: {show_size(needs.page_bytes)}")
    fixed = needs.fixed + (host_pages + disk_buffers) * needs.page_bytes
    one_sequence = sequence_pages or math.ceil(max_seq_len / page_size) * num_groups
    if kv_memory is not None:
        pages = kv_memory // needs.page_bytes
    else:
        # a full sequence may continue inside a shared page: one page a group more than it fills
        wanted = min((one_sequence + num_groups) * max_sequences, max(default_cap // needs.page_bytes, one_sequence))
        left = wanted if budget is None else (budget - fixed) // needs.page_and_draft_bytes
        pages = max(0, min(wanted, left))
    plan = MemoryPlan(needs, pages, page_size, num_groups, available, budget, host_pages, disk_buffers)
    _check(plan, one_sequence, max_seq_len, kv_memory)
    return plan


def _check(plan: MemoryPlan, one_sequence: int, max_seq_len: int, kv_memory: int | None) -> None:
    smallest, beside = one_sequence * plan.needs.page_bytes, one_sequence * plan.needs.draft_page_bytes
    if kv_memory is not None and plan.num_pages < one_sequence:
        remedy = (
            f"one sequence of max_seq_len={max_seq_len} needs {show_size(smallest)}; give that, or lower max_seq_len"
        )
        raise InvalidInput("kv_memory", kv_memory, remedy)
    fixed = plan.total - plan.kv - plan.draft_kv
    needed = max(plan.total, fixed + smallest + beside)
    if plan.budget is not None and needed > plan.budget:
        needs, host = plan.needs, f"host tier {show_size(plan.host)} + " if plan.host else ""
        host += "".join(f"{name} {show_size(size)} + " for name, size in needs.extras.items())
        drafting = needs.draft_model + max(plan.draft_kv, beside)
        host += f"draft model {show_size(drafting)} + " if drafting else ""
        remedy = (
            f"weights {show_size(needs.weights)} + KV {show_size(max(plan.kv, smallest))} + {host}activations "
            f"{show_size(needs.activations)} + workspace {show_size(needs.workspace)} = {show_size(needed)} do not "
            f"fit in {show_size(plan.budget)}; lower max_seq_len or max_batched_tokens, take a smaller model, "
            "or free memory"
        )
        raise InvalidInput("memory", f"{show_size(plan.available or 0)} available", remedy)
