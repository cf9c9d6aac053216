"""Parameters of the samplers beyond temperature, top_k, top_p and min_p. Spelling follows llama.cpp.

`SamplingParams` has them as its own and checks them; backends/shaping.py says what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

MAX_COUNT = 2**31 - 1
MAX_WORDS = 128
MAX_BREAKERS = 16
MAX_PROCESSORS = 16
MAX_WORD_CHARACTERS = 256
MAX_SEQUENCES = 2 * MAX_WORDS
MAX_BREAKER_IDS = 1 << 18

FLOAT_RANGES: dict[str, tuple[float, float]] = {
    "typical_p": (1e-9, 1.0),
    "top_n_sigma": (-1.0, 100.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 1.0),
}
INT_RANGES: dict[str, tuple[int, int]] = {
    "dry_allowed_length": (1, MAX_COUNT),
    "dry_penalty_last_n": (-1, MAX_COUNT),
    "no_repeat_ngram_size": (0, MAX_COUNT),
    "mirostat": (0, 2),
    "repeat_last_n": (-1, MAX_COUNT),
}


class Repetition(NamedTuple):
    """A loop: a pattern of so many tokens, so often in a row. Spelling follows vLLM."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 3


REPETITION_RANGES = {"max_pattern_size": (1, 256), "min_pattern_size": (1, 256), "min_count": (2, MAX_COUNT)}


@dataclass(frozen=True, kw_only=True)
class SamplerParams:
    """What shapes the distribution that a token is drawn from; the defaults change nothing."""

    typical_p: float = 1.0
    top_n_sigma: float = -1.0  # 0 or below: off
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0  # 0: off
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2  # repetitions up to this long go unpunished
    dry_penalty_last_n: int = -1  # tokens that are looked at; -1: all, 0: off
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")  # no repetition goes beyond these
    dry_breaker_ids: tuple[int, ...] | None = None  # the tokens that hold one; None: to be looked up
    mirostat: int = 0  # 0: off; 1, 2: its versions
    mirostat_tau: float = 5.0  # the surprise to be held, in bits a token
    mirostat_eta: float = 0.1  # how much of an error counts for the next token
    repeat_last_n: int = -1  # tokens, prompt and output, that penalties look at; -1: all
    no_repeat_ngram_size: int = 0  # so many tokens in a row come only once; 0: off
    bad_words: tuple[str, ...] = ()  # to be looked up: `banned_sequences`
    banned_sequences: tuple[tuple[int, ...], ...] = ()  # token ids that the output never holds in a row
    logits_processors: tuple[str, ...] = ()  # by name: decoding/processors.py
    repetition_detection: Repetition | None = None  # a loop in the output that ends it; None: it may go on

    def mirostat_after(self, mu: float, logprob: float) -> float:
        """What mirostat allows after a token of this logprob, in bits of surprise: the error moves ``mu`` by its share.

        Mirostat (Basu et al., 2021), both versions; the surprise is the raw model's, as there, so it travels with every
        token. A logprob that is not finite moves nothing.
        """
        error = -logprob / math.log(2.0) - self.mirostat_tau
        return mu - self.mirostat_eta * error if math.isfinite(error) else mu

    @property
    def mirostat_start(self) -> float:
        """What mirostat allows the first token."""
        return 2.0 * self.mirostat_tau

    @property
    def shapes(self) -> bool:
        """True if temperature, top_k, top_p and min_p alone do not say what may be drawn."""
        cuts = self.typical_p < 1.0 or self.top_n_sigma > 0.0
        return cuts or self.xtc_probability > 0.0 or self.dynatemp_range > 0.0 or self.mirostat > 0

    @property
    def has_dry(self) -> bool:
        """True if repetitions are punished by their length."""
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    @property
    def looks_back(self) -> bool:
        """True if the tokens so far decide what may come next, other than by their counts."""
        return self.has_dry or self.no_repeat_ngram_size > 0 or bool(self.banned_sequences or self.logits_processors)

    @property
    def has_words(self) -> bool:
        """True while there are words that a tokenizer has to look up (decoding/words.py)."""
        return bool(self.bad_words) or (self.has_dry and self.dry_breaker_ids is None)


DEFAULTS: Mapping[str, object] = {item.name: item.default for item in fields(SamplerParams)}
