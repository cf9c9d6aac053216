"""Proposers by name."""

from __future__ import annotations

from octavo.core.speculative_config import DRAFT_MODEL, check_method
from octavo.decoding.speculation.control import DraftControl
from octavo.decoding.speculation.ngram import NgramProposer
from octavo.decoding.speculation.proposer import Proposer
from octavo.decoding.speculation.speculator import Speculator
from octavo.decoding.speculation.suffix import SuffixProposer, SuffixTreeProposer

__all__ = ["make_speculator"]


def make_speculator(
    method: str,
    most: int,
    shortest: int = 2,
    longest: int = 6,
    *,
    adapts: bool = True,
    tree: bool = False,
    draft_model: Proposer | None = None,
) -> Speculator | None:
    """Speculation of at most ``most`` drafts a step and branch, with ``tree`` as a tree; None for no method, and for
    that of a draft model without ``draft_model``. Raises ``InvalidInput``.
    """
    check_method(method, most, shortest, longest, tree)
    if not method or (method == DRAFT_MODEL and draft_model is None):
        return None
    proposer = draft_model
    if proposer is None:
        suffix = SuffixTreeProposer if tree else SuffixProposer
        proposer = NgramProposer(shortest, longest) if method == "ngram" else suffix()
    return Speculator(proposer, most, DraftControl() if adapts else None)
