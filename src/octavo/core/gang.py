"""Gangs: branches of one request that are admitted, preempted and drawn together, as beam search needs them.

prompt   the first member computes it; the others follow: they have a slot, and nothing else
step     the rows that draw stand in one step, all or none; of their results a driver makes a `GangMove`:
         member i goes on from what member parents[i] was, with token_ids[i], its pages shared until one writes
end      a `GangMove` with endings says what each choice said; only then is anybody told of its tokens

   0 --a--+--b--- 0      parents (0, 0, 2), token_ids (b, c, d): member 1 gives up its own pages
   1 --x  `--c--- 1      and shares those of member 0
   2 --y-----d--- 2
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from octavo.core.request import Branch

__all__ = ["follows", "held_back", "is_ready", "leads", "members", "short_of", "units"]


def members(branch: Branch) -> list[Branch]:
    """The branches that stand and fall with this one, itself among them, by choice."""
    return branch.request.live_branches if branch.request.gang else [branch]


def leads(branch: Branch) -> bool:
    """True for the member that is asked for all of them; always, outside a gang."""
    return not branch.request.gang or branch is branch.request.live_branches[0]


def follows(branch: Branch) -> bool:
    """True for a member that has nothing to compute of its own yet: the first one computes the prompt for all."""
    return branch.request.gang and branch.choice > 0 and not branch.num_output_tokens


def is_ready(branch: Branch) -> bool:
    """True for a gang of which every member is one token short of its draw."""
    gang = branch.request.gang and branch.num_output_tokens
    return bool(gang) and all(member.num_missing_tokens == 1 for member in members(branch))


def held_back(branch: Branch) -> int:
    """Tokens that a member must not compute yet: its last one, from which it draws, until all are as far."""
    return int(branch.request.gang and branch.num_output_tokens > 0 and not is_ready(branch))


def units(branches: Iterable[Branch]) -> list[list[Branch]]:
    """The branches in their order, the members of a gang together where the first of them stands."""
    found: dict[object, list[Branch]] = {}
    for branch in branches:
        found.setdefault(branch.key[0] if branch.request.gang else branch.key, []).append(branch)
    return list(found.values())


def short_of(branches: Sequence[Branch], granted: Collection[tuple[str, int]]) -> list[Branch]:
    """Those of a gang that is ready to draw of which not every member was granted its token."""
    ready = [unit for unit in units(branches) if is_ready(unit[0])]
    return [b for unit in ready if any(m.key not in granted for m in members(unit[0])) for b in unit]
