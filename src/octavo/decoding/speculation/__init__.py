"""Speculative decoding: who guesses the next tokens (`proposer`), how many guesses pay (`control`), and what of them
counts (`exact`). `speculator` joins them to a scheduler."""

from octavo.decoding.speculation.control import DraftControl
from octavo.decoding.speculation.draft_model import DraftLimits, DraftModelProposer
from octavo.decoding.speculation.exact import accepted
from octavo.decoding.speculation.methods import make_speculator
from octavo.decoding.speculation.ngram import Lookup, NgramProposer
from octavo.decoding.speculation.proposer import BranchKey, Proposer
from octavo.decoding.speculation.speculator import Speculator

__all__ = [
    "BranchKey",
    "DraftControl",
    "DraftLimits",
    "DraftModelProposer",
    "Lookup",
    "NgramProposer",
    "Proposer",
    "Speculator",
    "accepted",
    "make_speculator",
]
