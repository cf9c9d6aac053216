"""From output ids to text: incremental detokenization, stop strings, and the two folded together."""

from octavo.decoding.detokenizer import IncrementalDetokenizer
from octavo.decoding.output import LogprobEntry, OutputProcessor, TextDelta, TokenText, describe_logprobs, token_text
from octavo.decoding.stops import StopMatcher

__all__ = [
    "IncrementalDetokenizer",
    "LogprobEntry",
    "OutputProcessor",
    "StopMatcher",
    "TextDelta",
    "TokenText",
    "describe_logprobs",
    "token_text",
]
