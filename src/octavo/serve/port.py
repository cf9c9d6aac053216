"""What the HTTP layer needs of an engine: the seam where tests put a fake one.

`octavo.engine.async_engine.AsyncEngine` has this shape. Nothing else of the engine is touched from here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol

from octavo.core.batch import TokenLogprobs
from octavo.core.params import SamplingParams
from octavo.engine.adapters import ServedAdapter
from octavo.models.pooling import Pooling
from octavo.tokenizers.base import Tokenizer

__all__ = ["Delta", "EnginePort", "TextModel"]


class Delta(Protocol):
    """What one step added to one choice: `octavo.engine.output.OutputDelta`."""

    @property
    def choice(self) -> int:
        """Index of the choice, from 0."""

    @property
    def text(self) -> str:
        """Text that is decided now; may be empty while a character or a stop string is undecided."""

    @property
    def token_ids(self) -> Sequence[int]:
        """New output tokens, the one that ended the choice included."""

    @property
    def logprobs(self) -> Sequence[TokenLogprobs] | None:
        """One entry for each of `token_ids`; empty or None when not asked for."""

    @property
    def finish_reason(self) -> str | None:
        """Set once, on the last delta of the choice."""

    @property
    def stop_reason(self) -> int | str | None:
        """The stop string or token id that ended the choice."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of this choice so far."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""

    @property
    def first(self) -> Sequence[float]:
        """With the request's first token: seconds of waiting, prefill and drawing; empty otherwise."""

    @property
    def spent(self) -> Sequence[float]:
        """With the request's end: seconds from its first to its last token, and its core-seconds; empty otherwise."""

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs | None] | None:
        """One entry for each prompt token (None for the first), on one delta only."""

    @property
    def hidden(self) -> bytes:
        """A pooled state (float32, little-endian), on the last delta of a choice that asked for one."""

    @property
    def error(self) -> str | None:
        """Why the choice failed, if it did."""


class TextModel(Protocol):
    """What of a model has to do with text."""

    @property
    def max_seq_len(self) -> int:
        """Prompt and output together."""

    @property
    def vocab_size(self) -> int:
        """Token ids lie in [0, vocab_size)."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""


class EnginePort(TextModel, Protocol):
    """The engine as HTTP sees it."""

    @property
    def model_name(self) -> str:
        """Name that the model was asked for by."""

    @property
    def hidden_size(self) -> int:
        """Values of a pooled state."""

    @property
    def pooling(self) -> Pooling:
        """How texts become vectors, unless a request says otherwise."""

    @property
    def model_bytes(self) -> int:
        """Bytes of the files that it was loaded from."""

    def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        /,
        *,
        request_id: str,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        bulk: bool = False,
        adapter: str = "",
        express: Callable[[Delta], bool] | None = None,
    ) -> AsyncIterator[Delta]:
        """Deltas of all choices until each has finished. Closing the iterator cancels the request.

        ``bulk``: it comes after all others. ``adapter``: the digest of one that `adapters` tells of. ``express`` is
        shown each delta first, in the event loop, while somebody waits for it: True takes it.
        """

    def stats(self) -> Mapping[str, float]:
        """Gauges and counters; cheap, callable from any thread."""

    def flush_cache(self) -> None:
        """Forget all that is cached and that nobody uses, in every tier. Callable from any thread."""

    def adapters(self) -> Sequence[ServedAdapter]:
        """The low-rank adapters that are served now."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve the adapter in a folder of the engine's machine under a name. Raises ``InvalidInput``."""

    async def unload_adapter(self, name: str) -> None:
        """The name stands for nothing from now on; requests that have it go on. Raises ``InvalidInput``."""

    def note_refusal(self, request_id: str, reason: str, status: int, retry_after: float) -> None:
        """A request was turned away at the door (429): for the timeline. Callable from any thread."""

    async def explain(self, request_id: str, tenant: str) -> list[dict[str, Any]]:
        """Why a tenant's request took as long as it did (`octavo.engine.explained`); empty: not known any more."""

    async def look(self) -> dict[str, Any] | None:
        """What it does right now (`octavo.engine.live.snapshot`), taken between two steps; None: it does not run."""

    def health_problem(self) -> str | None:
        """None while the engine makes progress; otherwise what is wrong."""
