"""How `octavo chat` and `octavo run` sample, unless told otherwise: calm enough for small models."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.core.params import SamplingParams

__all__ = ["SamplingFlags"]


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class SamplingFlags:
    """The sampling parameters that have flags; `-f` files may set every one that the API knows.

    Raises ``InvalidInput`` for a value out of range: before a model is loaded.
    """

    max_tokens: int | None = _flag(None, "Most tokens of an answer; default: what the context holds.")
    temperature: float = _flag(0.2, "0 takes the likeliest token; higher is more varied.")
    top_p: float = _flag(0.9, "Sample among the likeliest tokens that make up this share.")
    top_k: int = _flag(0, "Sample among this many likeliest tokens; 0: all.")
    min_p: float = _flag(0.0, "Leave out tokens less likely than this share of the likeliest.")
    typical_p: float = _flag(1.0, "Sample among the tokens nearest to the expected surprise that make up this share.")
    top_n_sigma: float = _flag(-1.0, "Leave out logits this many standard deviations below the largest; -1: none.")
    xtc_probability: float = _flag(0.0, "How often XTC leaves out the likeliest tokens but one.")
    dry_multiplier: float = _flag(0.0, "DRY: the longer a repetition would get, the less likely; 0: off.")
    no_repeat_ngram_size: int = _flag(0, "So many tokens in a row come only once; 0: off.")
    repetition_penalty: float = _flag(1.0, "Above 1: tokens that were used become less likely.")
    seed: int | None = _flag(None, "The same seed gives the same answer.")

    def __post_init__(self) -> None:
        SamplingParams(**self.fields())

    def fields(self) -> dict[str, Any]:
        """As fields of an API request."""
        return {name: value for name, value in asdict(self).items() if value is not None}
