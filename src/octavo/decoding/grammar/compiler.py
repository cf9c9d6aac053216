"""Compiling grammars, and a bounded cache of what was compiled. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.core.grammar import Grammar
from octavo.decoding.grammar.definition import definition
from octavo.decoding.grammar.matcher import GrammarFault, Matcher, guarded
from octavo.decoding.grammar.vocabulary import Vocabulary, vocabulary_of
from octavo.tokenizers.base import Tokenizer

__all__ = ["LIBRARY", "MAX_BYTES", "MAX_KEPT", "GrammarCompiler", "compiled", "most_bytes", "opened"]

LIBRARY = "it cannot be compiled: "  # before what the library says of a grammar

MAX_KEPT = 256  # compiled grammars
MAX_BYTES = 64 << 20  # that they take together, as far as that is known
_BYTES_EACH, _BYTES_PER_BYTE = 128 << 10, 128  # of memory for a grammar, and for each byte of its source
_BYTES_PER_TOKEN = 512  # of the model, once it is read
_LEXER_STATES = 20_000
_GRAMMAR_SIZE = 100_000  # symbols


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
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()  # or why there is none; the least recently used first
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
        state = self._found(grammar)
        if state is None:
            with self._compiling:
                state = self._found(grammar) or self._learn(grammar)
        if isinstance(state, InvalidInput):
            raise InvalidInput(state.field, state.value, state.remedy)
        return _matcher(state, self._opened)

    def _found(self, grammar: Grammar) -> Any:
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def _learn(self, grammar: Grammar) -> Any:
        begun = self._clock()
        try:
            state = self._compile(grammar)
        except InvalidInput as error:
            state = error
        self.num_compiled += 1
        self.seconds += self._clock() - begun
        with self._lock:
            self._kept[grammar] = state
            self._num_bytes += _price(grammar)
            for oldest in [other for other in self._kept if other not in self._held and other != grammar]:
                if len(self._kept) <= MAX_KEPT and self._num_bytes <= MAX_BYTES:
                    break
                del self._kept[oldest]
                self._num_bytes -= _price(oldest)
        return state

    def open(self) -> None:
        """Read the vocabulary, once: it holds up all threads for a while. Raises ``InvalidInput``."""
        with self._compiling:
            self._open()

    def _open(self) -> Any:
        if self._opened is None:
            tokenizer, size, eos_ids = self._model
            self._opened = opened(vocabulary_of(tokenizer, size, eos_ids), size)
        return self._opened

    def _compile(self, grammar: Grammar) -> Any:
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


def compiled(grammar: Grammar, tokenizer: Any) -> Any:
    """An `LLMatcher` at its beginning. Raises ``InvalidInput``: what is wrong with it, or what limit it met."""
    from llguidance import LLMatcher
    from llguidance._lib import LLParserLimits

    limits = LLParserLimits(max_lexer_states=_LEXER_STATES, max_grammar_size=_GRAMMAR_SIZE, verbose_errors=False)
    try:
        text = definition(grammar)
        state = guarded(lambda: LLMatcher(tokenizer, text, log_level=0, limits=limits))
        if state.is_error():
            raise InvalidInput(grammar.kind, None, _reason(state.get_error()))
        _matcher(state, tokenizer).mask()
    except GrammarFault as error:
        raise InvalidInput(grammar.kind, None, f"nothing can be said in it: {error}") from None
    return state


def _matcher(state: Any, tokenizer: Any) -> Matcher:
    return Matcher(guarded(state.deep_copy), tokenizer.vocab_size, frozenset(tokenizer.eos_tokens))


def _reason(error: str) -> str:
    """The library's words, without what surrounds them, on one line."""
    return LIBRARY + " ".join(error.split())[:300]
