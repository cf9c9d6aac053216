"""Compiling grammars, and a bounded cache of what was compiled. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.decoding.grammar.definition import definition
from octavo.decoding.grammar.matcher import GrammarFault, Matcher, guarded
from octavo.decoding.grammar.vocabulary import Vocabulary, vocabulary_of
from octavo.tokenizers.base import Tokenizer

__all__ = ["LIBRARY", "MAX_BYTES", "MAX_KEPT", "Compiled", "GrammarCompiler", "compiled", "most_bytes", "opened"]

LIBRARY = "it cannot be compiled: "  # before what the library says of a grammar

MAX_KEPT = 256  # compiled grammars
MAX_BYTES = 64 << 20  # that they take together, as far as that is known
_BYTES_EACH, _BYTES_PER_BYTE = 128 << 10, 128  # of memory for a grammar, and for each byte of its source
_BYTES_PER_TOKEN = 512  # of the model, once it is read
_LEXER_STATES = 20_000
_GRAMMAR_SIZE = 100_000  # symbols
_STEP_FUEL, _STEP_ITEMS = 50_000, 5_000  # of one mask: ten times what schemas take, and more (docs/decoding.md)


@dataclass(frozen=True)
class Compiled:
    """An `LLMatcher` at its beginning, which is copied for each output, and its mask there."""

    state: Any
    size: int  # ids
    end_ids: frozenset[int]
    mask: bytes
    lock: threading.Lock = field(default_factory=threading.Lock)

    def matcher(self) -> Matcher:
        """One of its own at the beginning."""
        with self.lock:
            state = guarded(self.state.deep_copy)
        return Matcher(state, self.size, self.end_ids, self.lock, self.mask)


class GrammarCompiler:
    """The grammars of one model: its tokenizer, its number of ids, its end tokens. ``open`` or the first use reads
    the vocabulary.

    ``clock`` gives seconds. Raises ``InvalidInput`` for a model without an end token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.num_compiled, self.seconds = 0, 0.0  # grammars that were not kept, and what they took
        self._clock = clock
        self._model = tokenizer, vocab_size, tuple(eos_ids)
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self._opened: Any = None
        self._kept: OrderedDict[Grammar, Compiled | InvalidInput] = (
            OrderedDict()
        )  # or why there is none; the least recently used first
        self._num_bytes = 0  # of what is kept
        self._held: Counter[Grammar] = Counter()  # by those who run: these are kept in any case

    def knows(self, grammar: Grammar) -> bool:
        """True if ``matcher`` answers at once."""
        with self._lock:
            return grammar in self._kept

    @property
    def num_held(self) -> int:
        """Grammars that are kept for somebody."""
        return len(self._held)

    def may_hold(self, grammar: Grammar) -> bool:
        """True if ``hold`` would keep it."""
        price = sum(map(_price, self._held)) + _price(grammar)
        return not self._held or grammar in self._held or (len(self._held) < MAX_KEPT and price <= MAX_BYTES)

    def hold(self, grammar: Grammar) -> bool:
        """Keep it until ``release``, which is to be called as often. False: those that are held leave no room."""
        with self._lock:
            if not self.may_hold(grammar):
                return False
            self._held[grammar] += 1
            return True

    def release(self, grammar: Grammar) -> None:
        """One less holds it."""
        with self._lock:
            self._held -= Counter([grammar])

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of an output. Raises ``InvalidInput`` for what cannot be compiled."""
        found = self._found(grammar)
        if found is None:
            with self._compiling:
                found = self._found(grammar) or self._learn(grammar)
        if isinstance(found, InvalidInput):
            raise InvalidInput(found.field, found.value, found.remedy)
        return found.matcher()

    def apart(self, grammar: Grammar) -> Matcher:
        """A matcher that shares nothing with others, for one that failed: others may have brought its automaton to a
        limit. So nobody new gets that one, either. Raises ``InvalidInput``.
        """
        with self._lock:
            if self._kept.pop(grammar, None) is not None:
                self._num_bytes -= _price(grammar)
        with self._compiling:
            return self._compile(grammar).matcher()

    def _found(self, grammar: Grammar) -> Compiled | InvalidInput | None:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def _learn(self, grammar: Grammar) -> Compiled | InvalidInput:
        begun = self._clock()
        found: Compiled | InvalidInput
        try:
            found = self._compile(grammar)
        except InvalidInput as error:
            found = error
        self.num_compiled += 1
        self.seconds += self._clock() - begun
        with self._lock:
            self._kept[grammar] = found
            self._num_bytes += _price(grammar)
            for oldest in [other for other in self._kept if other not in self._held and other != grammar]:
                if len(self._kept) <= MAX_KEPT and self._num_bytes <= MAX_BYTES:
                    break
                del self._kept[oldest]
                self._num_bytes -= _price(oldest)
        return found

    def open(self) -> None:
        """Read the vocabulary, once: it holds up all threads for a while. Raises ``InvalidInput``."""
        with self._compiling:
            self._open()

    def _open(self) -> Any:
        if self._opened is None:
            tokenizer, size, eos_ids = self._model
            self._opened = opened(vocabulary_of(tokenizer, size, eos_ids), size)
        return self._opened

    def _compile(self, grammar: Grammar) -> Compiled:
        return compiled(grammar, self._open())


def most_bytes(vocab_size: int) -> int:
    """What is kept for a model at most."""
    return MAX_BYTES + _BYTES_PER_TOKEN * vocab_size


def _price(grammar: Grammar) -> int:
    """Bytes that a compiled grammar may take: the library does not say, so this is measured (docs/decoding.md)."""
    return _BYTES_EACH + _BYTES_PER_BYTE * (len(grammar.source.encode()) + len(grammar.before))


def opened(vocabulary: Vocabulary, size: int) -> Any:
    """An `LLTokenizer`. Raises ``InvalidInput`` for a vocabulary that the library cannot take."""
    try:
        return guarded(vocabulary.open, size)
    except GrammarFault as error:
        raise InvalidInput("grammar", None, f"this model's vocabulary cannot be constrained: {error}") from None


def compiled(grammar: Grammar, tokenizer: Any) -> Compiled:
    """Raises ``InvalidInput``: what is wrong with it, or what limit it met."""
    from llguidance import LLMatcher
    from llguidance._lib import LLParserLimits

    limits = LLParserLimits(
        max_lexer_states=_LEXER_STATES,
        max_grammar_size=_GRAMMAR_SIZE,
        step_lexer_fuel=_STEP_FUEL,
        step_max_items=_STEP_ITEMS,
        verbose_errors=False,
    )
    try:
        text = definition(grammar)
        state = guarded(lambda: LLMatcher(tokenizer, text, log_level=0, limits=limits))
        if state.is_error():
            raise InvalidInput(grammar.kind, None, _reason(state.get_error()))
        size, end_ids = tokenizer.vocab_size, frozenset(tokenizer.eos_tokens)
        mask = Matcher(guarded(state.deep_copy), size, end_ids, threading.Lock()).mask()
    except GrammarFault as error:
        raise InvalidInput(grammar.kind, None, f"nothing can be said in it: {error}") from None
    return Compiled(state, size, end_ids, mask)


def _reason(error: str) -> str:
    """The library's words, without what surrounds them, on one line."""
    return LIBRARY + " ".join(error.split())[:300]
