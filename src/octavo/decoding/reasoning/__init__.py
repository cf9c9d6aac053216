"""Thoughts apart from the answer: how models mark them, and how text in pieces is split at the marks."""

from octavo.decoding.reasoning.formats import FORMATS, ReasoningFormat, format_named, format_of
from octavo.decoding.reasoning.splitter import ReasoningSplitter

__all__ = ["FORMATS", "ReasoningFormat", "ReasoningSplitter", "format_named", "format_of"]
