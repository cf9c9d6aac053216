"""Sampling parameters, validated: finite, in range, named in the error. Spelling follows vLLM."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.core import samplers
from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar

MAX_CHOICES = 64
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_LOGPROB_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_STOP_IDS = 1024
MAX_BANNED_IDS = 1024
MAX_ALLOWED_IDS = 1 << 18
MAX_COUNT = 2**31 - 1
SEED_RANGE = (-(2**63), 2**64 - 1)
GREEDY_BELOW = 1e-5
VERIFIERS = ("exact", "residual")  # of drafts: decoding/speculation
POOLINGS = ("last", "mean", "cls")
MAX_END_IDS = 16  # end-of-sequence and stop ids of a request with beams
MAX_BEAM_STOP_IDS = 8  # of them, those that the request may name

_FLOAT_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "length_penalty": (-10.0, 10.0),
}
_INT_RANGES: dict[str, tuple[int, int]] = {
    "min_tokens": (0, MAX_COUNT),
    "n": (1, MAX_CHOICES),
    "top_k": (-1, MAX_COUNT),
}
_OPTIONAL_INT_RANGES: dict[str, tuple[int, int]] = {
    "max_tokens": (0, MAX_COUNT),
    "seed": SEED_RANGE,
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "best_of": (1, MAX_CHOICES),
}
RANGES: Mapping[str, tuple[float, float]] = {
    **_FLOAT_RANGES,
    **samplers.FLOAT_RANGES,
    **samplers.INT_RANGES,
    **_INT_RANGES,
    **_OPTIONAL_INT_RANGES,
}
_BOOLS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "use_beam_search")
_ID_LISTS = {
    "stop_token_ids": MAX_STOP_IDS,
    "banned_token_ids": MAX_BANNED_IDS,
    "logprob_token_ids": MAX_LOGPROB_IDS,
}
# what has a meaning where nothing is drawn; anything else must be left as it is
_OF_BEAMS = frozenset(
    (
        *("max_tokens", "min_tokens", "n", "best_of", "use_beam_search", "length_penalty", "early_stopping", "seed"),
        *("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"),
        *("logprobs", "logprob_token_ids"),
    )
)


def check_int(name: str, value: object, low: int, high: int) -> int:
    """``value`` as an int with low <= value <= high; a bool is no int. Raises ``InvalidInput``."""
    remedy = f"give an integer from {low} to {high}"
    if isinstance(value, bool):
        raise InvalidInput(name, value, remedy)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidInput(name, value, remedy) from None
    if not low <= number <= high:
        raise InvalidInput(name, value, remedy)
    return number


def check_float(name: str, value: object, low: float, high: float) -> float:
    """``value`` as a finite float with low <= value <= high. Raises ``InvalidInput``."""
    remedy = f"give a finite number from {low:g} to {high:g}"
    if isinstance(value, (bool, str, bytes)):
        raise InvalidInput(name, value, remedy)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(name, value, remedy) from None
    if not (math.isfinite(number) and low <= number <= high):
        raise InvalidInput(name, value, remedy)
    return number


def check_ids(name: str, value: object, most: int) -> tuple[int, ...]:
    """``value`` as a tuple of at most ``most`` token ids (integers >= 0). Raises ``InvalidInput``."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise InvalidInput(name, value, "give a list of token ids")
    ids = tuple(value)
    if len(ids) > most:
        raise InvalidInput(name, f"{len(ids)} ids", f"give at most {most}")
    if all(type(token) is int and 0 <= token <= MAX_COUNT for token in ids):
        return ids
    return tuple(check_int(f"{name}[{i}]", token, 0, MAX_COUNT) for i, token in enumerate(ids))


def check_bool(name: str, value: object) -> bool:
    """``value`` if it is a bool. Raises ``InvalidInput``."""
    if not isinstance(value, bool):
        raise InvalidInput(name, value, "give true or false")
    return value


def check_stop_strings(name: str, value: object) -> tuple[str, ...]:
    """One string or a list of them, each non-empty and bounded. Raises ``InvalidInput``."""
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)):
        raise InvalidInput(name, value, "give a string or a list of strings")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidInput(name, f"{len(strings)} strings", f"give at most {MAX_STOP_STRINGS}")
    for i, text in enumerate(strings):
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidInput(f"{name}[{i}]", text, f"give a string of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(strings)


def check_words(name: str, value: object, most: int) -> tuple[str, ...]:
    """``value`` as a tuple of at most ``most`` short strings that are not empty. Raises ``InvalidInput``."""
    if not isinstance(value, (list, tuple)):
        raise InvalidInput(name, value, "give a list of strings")
    if len(value) > most:
        raise InvalidInput(name, f"{len(value)} strings", f"give at most {most}")
    for i, word in enumerate(value):
        if not isinstance(word, str) or not 1 <= len(word) <= samplers.MAX_WORD_CHARACTERS:
            raise InvalidInput(f"{name}[{i}]", word, f"give a string of 1 to {samplers.MAX_WORD_CHARACTERS} characters")
    return tuple(value)


def check_sequences(name: str, value: object, most: int) -> tuple[tuple[int, ...], ...]:
    """``value`` as at most ``most`` lists of token ids, none of them empty. Raises ``InvalidInput``."""
    if not isinstance(value, (list, tuple)):
        raise InvalidInput(name, value, "give a list of lists of token ids")
    if len(value) > most:
        raise InvalidInput(name, f"{len(value)} sequences", f"give at most {most}")
    found = tuple(check_ids(f"{name}[{i}]", ids, samplers.MAX_WORD_CHARACTERS) for i, ids in enumerate(value))
    if () in found:
        raise InvalidInput(f"{name}[{found.index(())}]", (), "give one token id at least")
    return found


def check_repetition(name: str, value: object) -> samplers.Repetition:
    """A mapping, or the numbers in their order, as a ``Repetition``. Raises ``InvalidInput``."""
    fields_ = samplers.Repetition._fields
    given: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    if isinstance(value, (list, tuple)) and len(value) <= len(fields_):
        given = dict(zip(fields_, value, strict=False))
    if "max_pattern_size" not in given or not set(given) <= set(fields_):
        raise InvalidInput(name, value, f"give max_pattern_size, and of {', '.join(fields_[1:])} what is to differ")
    limits = samplers.REPETITION_RANGES
    checked = {key: check_int(f"{name}.{key}", number, *limits[key]) for key, number in given.items()}
    found = samplers.Repetition(**checked)
    if found.min_pattern_size > found.max_pattern_size:
        remedy = f"give at most max_pattern_size = {found.max_pattern_size}"
        raise InvalidInput(f"{name}.min_pattern_size", found.min_pattern_size, remedy)
    return found


def check_logit_bias(name: str, value: object) -> dict[int, float]:
    """Token id (an integer, or its digits as JSON keys are) to bias in [-100, 100], by rising id."""
    if not isinstance(value, Mapping):
        raise InvalidInput(name, value, "give a mapping of token id to a number from -100 to 100")
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidInput(name, f"{len(value)} entries", f"give at most {MAX_LOGIT_BIAS}")
    bias = {}
    for key, number in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
        token = check_int(f"{name} key", int(key) if digits else key, 0, MAX_COUNT)
        bias[token] = check_float(f"{name}[{token}]", number, -100.0, 100.0)
    return dict(sorted(bias.items()))


_SAMPLER_CHECKS: dict[str, tuple[Any, ...]] = {
    **{name: (check_float, *limits) for name, limits in samplers.FLOAT_RANGES.items()},
    **{name: (check_int, *limits) for name, limits in samplers.INT_RANGES.items()},
    "dry_sequence_breakers": (check_words, samplers.MAX_BREAKERS),
    "dry_breaker_ids": (check_ids, samplers.MAX_BREAKER_IDS),
    "bad_words": (check_words, samplers.MAX_WORDS),
    "logits_processors": (check_words, samplers.MAX_PROCESSORS),
    "banned_sequences": (check_sequences, samplers.MAX_SEQUENCES),
    "repetition_detection": (check_repetition,),
}


@dataclass(frozen=True)
class SamplingParams(samplers.SamplerParams):
    """How the tokens of a request are chosen and when they end.

    Lists become tuples, a single ``stop`` string a tuple of one, numeric strings as keys of ``logit_bias`` integers.
    Raises ``InvalidInput`` (a ``ValueError``) at construction for a value of the wrong type or out of range.
    """

    max_tokens: int | None = 16  # None: up to the context limit
    min_tokens: int = 0  # no end-of-sequence or stop token before this many
    n: int = 1  # choices
    temperature: float = 1.0  # below 1e-5: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # None: the engine draws one
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none; k: the sampled token's and the k most likely
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None  # the output is a word of it, or ends with `length` or an error
    speculative_verifier: str | None = None  # who draws: "exact", "residual"; None: as the engine is set up
    pooling: str | None = None  # one vector is asked for, no token: of the last, of all, of the first position
    best_of: int | None = None  # candidates, of which the n best are returned; None: n. With beams: their number
    use_beam_search: bool = False  # the likeliest texts are looked for, nothing is drawn: `decoding.beam`
    length_penalty: float = 1.0  # a beam's score is its logprob / length ** length_penalty
    early_stopping: bool | str = False  # True: at best_of ended beams; False: by a guess; "never": surely none better

    def __post_init__(self) -> None:
        for name, limits in _FLOAT_RANGES.items():
            self._normalise(name, check_float, *limits)
        for name, bounds in _INT_RANGES.items():
            self._normalise(name, check_int, *bounds)
        for name, bounds in _OPTIONAL_INT_RANGES.items():
            if getattr(self, name) is not None:
                self._normalise(name, check_int, *bounds)
        for name in _BOOLS:
            self._normalise(name, check_bool)
        for name, most in _ID_LISTS.items():
            self._normalise(name, check_ids, most)
        self._normalise("stop", check_stop_strings)
        self._normalise("logit_bias", check_logit_bias)
        for name, default in samplers.DEFAULTS.items():
            if getattr(self, name) is not default:
                self._normalise_sampler(name)
        self._check_together()

    def _normalise(self, name: str, check: Callable[..., Any], *limits: float) -> None:
        object.__setattr__(self, name, check(name, getattr(self, name), *limits))

    def _normalise_sampler(self, name: str) -> None:
        self._normalise(name, *_SAMPLER_CHECKS[name])

    def looked_up(self) -> SamplingParams:
        """Itself, for an engine. Raises ``InvalidInput`` while it has words instead of token ids."""
        if self.has_words:
            remedy = "look the words up first: octavo.decoding.words.with_token_ids(params, tokenizer)"
            raise InvalidInput("params", "bad_words, or DRY's sequence breakers", remedy)
        return self

    def _check_together(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInput("min_tokens", self.min_tokens, f"give at most max_tokens = {self.max_tokens}")
        if self.grammar is not None:
            object.__setattr__(self, "grammar", Grammar.of(self.grammar))
            if self.ignore_eos:
                raise InvalidInput("ignore_eos", True, "a grammar says where an output ends: leave ignore_eos out")
        if self.speculative_verifier not in (None, *VERIFIERS):
            remedy = f"give one of {', '.join(VERIFIERS)}"
            raise InvalidInput("speculative_verifier", self.speculative_verifier, remedy)
        if self.pooling is not None:
            self._check_pooling(self.pooling)
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidInput("best_of", self.best_of, f"give at least n = {self.n}")
        self._check_beams()
        if self.allowed_token_ids is None:
            return
        self._normalise("allowed_token_ids", check_ids, MAX_ALLOWED_IDS)
        if not set(self.allowed_token_ids) - set(self.banned_token_ids):
            raise InvalidInput("allowed_token_ids", self.allowed_token_ids, "leave a token that is not banned")

    def _check_pooling(self, kind: str) -> None:
        if kind not in POOLINGS:
            raise InvalidInput("pooling", kind, f"give one of {', '.join(POOLINGS)}")
        none = dict.fromkeys(("best_of", "prompt_logprobs", "grammar", "speculative_verifier"))
        for name, only in {"max_tokens": 0, "n": 1, **none}.items():
            if getattr(self, name) != only:
                raise InvalidInput(name, getattr(self, name), f"with pooling no token is drawn: give {only}")

    def _check_beams(self) -> None:
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidInput("early_stopping", self.early_stopping, 'give true, false or "never"')
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != _default(name):
                    raise InvalidInput(
                        name, getattr(self, name), "it is for beams: set use_beam_search to true as well"
                    )
            return
        if self.temperature not in (0.0, 1.0):
            raise InvalidInput("temperature", self.temperature, "beam search draws nothing: leave it out")
        if len(self.stop_token_ids) > MAX_BEAM_STOP_IDS:
            raise InvalidInput(
                "stop_token_ids", f"{len(self.stop_token_ids)} ids", f"give {MAX_BEAM_STOP_IDS} at most with beams"
            )
        object.__setattr__(self, "temperature", 0.0)
        for item in fields(self):
            if item.name not in _OF_BEAMS and item.name != "temperature":
                value = getattr(self, item.name)
                if value != _default(item.name):
                    remedy = "beams are ranked by what the model alone thinks likely: leave it out, or use_beam_search"
                    raise InvalidInput(item.name, value, remedy)
        if self.max_tokens == 0:
            raise InvalidInput("max_tokens", 0, "beams are made of tokens: give 1 or more")

    def __hash__(self) -> int:
        values = [getattr(self, item.name) for item in fields(self) if item.name != "logit_bias"]
        return hash((tuple(values), tuple(self.logit_bias.items())))

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken (lowest id on ties): a temperature below 1e-5."""
        return self.temperature < GREEDY_BELOW

    @property
    def watches_output(self) -> bool:
        """True if the tokens themselves, other than end tokens, may end a choice: each has to be looked at."""
        return bool(self.stop) or self.repetition_detection is not None

    @property
    def num_branches(self) -> int:
        """Choices that are worked on, of which ``n`` are returned."""
        return self.n if self.best_of is None else self.best_of

    @property
    def shows_logprobs(self) -> bool:
        """True if logprobs of the output are asked for."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def draws_logprobs(self) -> bool:
        """True if every token drawn has logprobs: they are asked for, choices are ranked or mirostat goes by them."""
        ranked = self.use_beam_search or self.num_branches > self.n
        return self.shows_logprobs or ranked or self.mirostat > 0

    @property
    def num_top_logprobs(self) -> int:
        """How many of the likeliest tokens a draw tells of. Of a beam's, so many that, ends apart, as many are left as
        there are beams: no other can be among the best."""
        asked = self.logprobs or 0
        return max(asked, self.num_branches + MAX_END_IDS) if self.use_beam_search else asked

    @property
    def wants_logprobs(self) -> bool:
        """True if there are any logprobs, of the output or of the prompt."""
        return self.draws_logprobs or self.prompt_logprobs is not None

    @property
    def asks_more(self) -> bool:
        """True if more is asked for than output tokens."""
        return self.wants_logprobs or self.pooling is not None

    @property
    def pools_all(self) -> bool:
        """True if the vector needs more than the last position: then a prefix that is cached is computed again."""
        return self.pooling in ("mean", "cls")

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values; ``from_dict`` gives back an equal object, also after a trip through JSON."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values["logit_bias"] = {str(token): number for token, number in self.logit_bias.items()}
        values["grammar"] = None if self.grammar is None else self.grammar.to_dict()
        values["banned_sequences"] = [list(ids) for ids in self.banned_sequences]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The inverse of ``to_dict``; fields left out take their defaults. Raises ``InvalidInput``."""
        known = sorted((item.name for item in fields(cls)), key=lambda name: name in samplers.DEFAULTS)
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                remedy = f"did you mean {near[0]}?" if near else f"known fields: {', '.join(known)}"
                raise InvalidInput(str(name), values[name], remedy)
        return cls(**values)


_DEFAULTS = {item.name: item.default for item in fields(SamplingParams)} | {"logit_bias": {}}


def _default(name: str) -> Any:
    return _DEFAULTS[name]
