"""What one choice shows to its reader: a fold over its output ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from octavo.core.batch import TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.decoding.detokenizer import IncrementalDetokenizer
from octavo.decoding.loops import LoopDetector
from octavo.decoding.stops import StopMatcher
from octavo.tokenizers.base import Tokenizer

__all__ = ["LogprobEntry", "OutputProcessor", "TextDelta", "TokenText", "describe_logprobs", "token_text"]


LOOPED = "repetition"  # the stop reason of a choice that went in circles


@dataclass(slots=True)  # not frozen: one is made for every token
class TextDelta:
    """What one token (or the end) adds.

    `text` may be empty while characters or a possible stop string are held back. `token_ids` are the ids consumed.
    `offset` is where the first of them begins, in characters of the text before stop strings are cut; a token that goes
    on with a character has that character's offset. `finished` says that text ends here, by `stop_reason`: a stop
    string, a stop token id, `LOOPED`, or None for EOS. `truncate_at`: the number of output tokens to keep, so the token
    at which a stop string or a loop was complete is the last one; None unless one of these ended the text.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    offset: int = 0
    finished: bool = False
    stop_reason: int | str | None = None
    truncate_at: int | None = None


class OutputProcessor:
    """Detokenizer, stop strings and token accounting of one choice.

    A pure fold: `push` the same ids and the same deltas come out, whatever process does it, so a restart replays the
    ids. Ids pushed after the end change nothing. The token that ends a choice (EOS, or one of `stop_token_ids`) is no
    text, unless `include_stop_str_in_output` asks for it. The first `min_tokens` tokens neither end the text nor
    complete a stop string.
    """

    __slots__ = (
        "_detokenizer",
        "_end",
        "_end_ids",
        "_eos_ids",
        "_loops",
        "_matcher",
        "_params",
        "_stop_ids",
        "_watches",
        "num_tokens",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        prompt_tail_ids: Iterable[int] = (),
        eos_ids: Iterable[int] | None = None,
    ) -> None:
        """`eos_ids` replaces the tokenizer's own (a model's config may know more)."""
        self._params = params
        self._eos_ids = frozenset(tokenizer.eos_ids if eos_ids is None else eos_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, prompt_tail_ids, skip_special_tokens=params.skip_special_tokens
        )
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        loops = params.repetition_detection
        self._loops = None if loops is None else LoopDetector(loops)
        self._watches = params.watches_output
        self._end: TextDelta | None = None
        self._end_ids = self._stop_ids | self._eos_ids_in_force()
        self.num_tokens = 0  # consumed, the ending one included

    @property
    def finished(self) -> bool:
        """True once a stop string, a stop token, EOS or `finish` ended the text."""
        return self._end is not None

    def push(self, token_id: int) -> TextDelta:
        """Consume one token. After the end: the ending again, with no text and no tokens."""
        if self._end is not None:
            return self._end
        offset = self._detokenizer.num_chars
        if not self._watches and token_id not in self._end_ids:  # most tokens
            self.num_tokens += 1
            return TextDelta(self._detokenizer.push_one(token_id), (token_id,), offset)
        may_end = self.num_tokens >= self._params.min_tokens
        self.num_tokens += 1
        ends = may_end and token_id in self._end_ids
        hidden = ends and not self._params.include_stop_str_in_output
        text = "" if hidden else self._detokenizer.push((token_id,))
        shown, stop = self._matcher.push(text, active=may_end)
        looped = self._loops is not None and self._loops.push(token_id) and may_end and not ends
        if stop is None and (ends or looped):
            rest, stop = self._flushed(may_end)
            shown += rest
        reason: int | str | None = stop
        if stop is None and ends and token_id not in self._eos_ids_in_force():
            reason = token_id
        elif stop is None and looped:
            reason = LOOPED
        kept = self.num_tokens if stop is not None or looped else None
        delta = TextDelta(shown, (token_id,), offset, ends or looped or stop is not None, reason, kept)
        if delta.finished:
            self._end = TextDelta(finished=True, stop_reason=reason, truncate_at=kept, offset=offset + len(text))
        return delta

    def push_plain(self, token_id: int) -> str | None:
        """The text of one more token where nothing can end; None, and nothing is consumed, where `push` has to look."""
        if self._end is not None or self._watches or token_id in self._end_ids:
            return None
        self.num_tokens += 1
        return self._detokenizer.push_one(token_id)

    def push_all(self, token_ids: Sequence[int]) -> str:
        """`push` of each; the text that they show together."""
        if self._watches or not self._end_ids.isdisjoint(token_ids) or self._end is not None:
            return "".join([self.push(token_id).text for token_id in token_ids])
        self.num_tokens += len(token_ids)
        return self._detokenizer.push(token_ids)

    def finish(self) -> TextDelta:
        """The end for another reason (length, cancel): what was held back. Nothing if the text has ended already."""
        if self._end is not None:
            return self._end
        offset = self._detokenizer.num_chars
        shown, stop = self._flushed(self.num_tokens > self._params.min_tokens)
        kept = self.num_tokens if stop is not None else None
        self._end = TextDelta(finished=True, stop_reason=stop, truncate_at=kept, offset=offset)
        return TextDelta(shown, (), offset, True, stop, kept)

    def replay(self, token_ids: Iterable[int]) -> str:
        """Consume ids that were already shown; the text they showed."""
        return self.push_all(list(token_ids))

    def _eos_ids_in_force(self) -> frozenset[int]:
        return frozenset() if self._params.ignore_eos else self._eos_ids

    def _flushed(self, active: bool) -> tuple[str, str | None]:
        """All text that was held back. The last broken character may still complete a stop string."""
        shown, stop = self._matcher.push(self._detokenizer.finish(), active=active)
        return (shown, stop) if stop is not None else (shown + self._matcher.finish(), None)


@dataclass(frozen=True)
class TokenText:
    """A token as logprobs show it: its bytes, and these as text (U+FFFD for parts of characters)."""

    token_id: int
    text: str
    bytes: bytes


@dataclass(frozen=True)
class LogprobEntry:
    """The logprobs at one output position, in the form that the APIs return.

    `offset` is as in `TextDelta`. `top` are the most likely tokens, best first, then those asked for by id.
    """

    token: TokenText
    logprob: float
    rank: int
    offset: int
    top: tuple[tuple[TokenText, float], ...]


def token_text(tokenizer: Tokenizer, token_id: int) -> TokenText:
    """A token's text and bytes; special tokens show their own text."""
    raw = tokenizer.token_bytes(token_id, skip_special_tokens=False)
    return TokenText(token_id, raw.decode("utf-8", "replace"), raw)


def describe_logprobs(tokenizer: Tokenizer, logprobs: TokenLogprobs, offset: int = 0) -> LogprobEntry:
    """Ids to text and bytes. A token that is among the most likely and asked for by id appears once."""
    listed: Mapping[int, float] = dict([*logprobs.top, *logprobs.chosen])
    top = tuple((token_text(tokenizer, index), value) for index, value in listed.items())
    return LogprobEntry(token_text(tokenizer, logprobs.token_id), logprobs.logprob, logprobs.rank, offset, top)
