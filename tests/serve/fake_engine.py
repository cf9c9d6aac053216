"""An engine without a model: the seam at which the HTTP layer is tested.

Its answer is a fixed function of the prompt: the prompt's text in upper case, then `" ✓"`, then the end token. A byte
is a token, so one character may take several deltas, as with real models. What it was asked is kept for assertions.
"""

from __future__ import annotations

import asyncio
import codecs
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.core.batch import TokenLogprobs
from octavo.core.errors import InvalidInput
from octavo.core.params import SamplingParams
from octavo.engine.adapters import ServedAdapter
from octavo.models.pooling import DEFAULT, Pooling
from octavo.tokenizers.simple import SimpleTokenizer

EOS = 256
HIDDEN = 6  # values of a pooled state
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"


def byte_tokenizer(template: str = TEMPLATE) -> SimpleTokenizer:
    """Bytes 0 to 255 are ids 0 to 255; 256 ends a text."""
    vocab = [f"<0x{byte:02X}>" for byte in range(256)] + ["<eos>"]
    return SimpleTokenizer(vocab, kind="bytes", eos=["<eos>"], chat_template=template)


@dataclass(frozen=True)
class FakeDelta:
    """See `octavo.serve.port.Delta`."""

    choice: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    error: str | None = None
    first: tuple[float, ...] = ()
    spent: tuple[float, ...] = ()
    hidden: bytes = b""


@dataclass
class FakeEngine:
    """See `octavo.serve.port.EnginePort`. `fail_after`, `hold` and `hold_after` make it misbehave."""

    model_name: str = "fake"
    max_seq_len: int = 512
    vocab_size: int = 257
    model_bytes: int = 4711
    hidden_size: int = HIDDEN
    pooling: Pooling = DEFAULT
    tokenizer: SimpleTokenizer = field(default_factory=byte_tokenizer)
    fail_after: int | None = None  # raise after this many tokens
    fail_with: Exception = field(default_factory=lambda: RuntimeError("secret /path/of/engine"))
    answer: str | None = None  # instead of the prompt's text
    stop_with: str | None = None  # the stop reason of every choice
    hold: bool = False  # generate never comes to its first token
    hold_after: int | None = None  # nor past this many tokens
    problem: str | None = None
    asked: list[tuple[tuple[int, ...], SamplingParams, str]] = field(default_factory=list)
    tenants: list[str] = field(default_factory=list)
    salts: list[str] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    bulk: list[bool] = field(default_factory=list)
    prefill_tokens_per_s: float = 0.0
    refusals: list[tuple[str, str, int, float]] = field(default_factory=list)
    last_step_age: float = 0.0
    seen: dict[str, Any] = field(default_factory=dict)  # what `look` answers
    looks: int = 0
    flushes: int = 0
    served: dict[str, ServedAdapter] = field(default_factory=dict)
    adapted: list[str] = field(default_factory=list)  # digest of each request's adapter
    live: int = 0
    cancelled: int = 0

    def flush_cache(self) -> None:
        self.flushes += 1

    def adapters(self) -> tuple[ServedAdapter, ...]:
        return tuple(self.served.values())

    async def load_adapter(self, name: str, path: str) -> None:
        if path == "bad":
            raise InvalidInput("adapter: r", 99, "there is no room for it")
        self.served[name] = ServedAdapter(name, path, f"digest of {path}", 4)

    async def unload_adapter(self, name: str) -> None:
        if self.served.pop(name, None) is None:
            raise InvalidInput("lora_name", name, "no such adapter is loaded")

    def note_refusal(self, request_id: str, reason: str, status: int, retry_after: float) -> None:
        self.refusals.append((request_id, reason, status, retry_after))

    async def explain(self, request_id: str, tenant: str) -> list[dict[str, Any]]:
        return [{"request": request_id}] if tenant in self.tenants else []

    async def look(self) -> dict[str, Any] | None:
        self.looks += 1
        return None if self.problem else self.seen

    def health_problem(self) -> str | None:
        return self.problem

    def stats(self) -> dict[str, float]:
        return {
            "num_running": self.live,
            "num_waiting": 0,
            "max_running": 4,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "pages_total": 8,
            "pages_free": 6,
            "pages_cached": 1,
            "steps": 3,
            "last_step_age": self.last_step_age,
        }

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        tenant: str = "",
        cache_salt: str = "",
        bulk: bool = False,
        adapter: str = "",
        express: Callable[[FakeDelta], bool] | None = None,
    ) -> AsyncGenerator[FakeDelta, None]:
        prompt = tuple(prompt_token_ids)
        self.adapted.append(adapter)
        self.asked.append((prompt, params, request_id))
        self.tenants.append(tenant)
        self.salts.append(cache_salt)
        self.priorities.append(priority)
        self.bulk.append(bulk)
        self.live += 1
        done = False
        try:
            if self.hold:
                await asyncio.Event().wait()
            writers = [_Writer(prompt, params, choice, self.answer) for choice in range(params.num_branches)]
            deltas = [delta for writer in writers for delta in writer.deltas()]
            for delta in deltas:
                await asyncio.sleep(0)
                if self.fail_after is not None and delta.num_output_tokens > self.fail_after:
                    raise self.fail_with
                if self.hold_after is not None and delta.num_output_tokens > self.hold_after:
                    await asyncio.Event().wait()
                if express is not None and express(delta):
                    continue
                yield replace(delta, stop_reason=self.stop_with) if delta.finish_reason and self.stop_with else delta
            done = True
        finally:
            self.live -= 1
            self.cancelled += not done


class _Writer:
    """All deltas of one choice."""

    def __init__(self, prompt: tuple[int, ...], params: SamplingParams, choice: int, answer: str | None) -> None:
        text = bytes(i for i in prompt if i < EOS).decode("utf-8", "replace").upper() + f" ✓{choice or ''}"
        text = text if answer is None else answer
        self._answer = [*text.encode(), EOS]
        self._prompt = prompt
        self._params = params
        self._choice = choice

    def deltas(self) -> list[FakeDelta]:
        limit = 10**9 if self._params.max_tokens is None else self._params.max_tokens
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        deltas: list[FakeDelta] = []
        for count, token in enumerate(self._answer[:limit], 1):
            ended = token == EOS
            text = decoder.decode(b"" if ended else bytes([token]), final=ended or count == limit)
            deltas.append(self._delta(text, token, count))
        reason, stop = ("length", None) if len(self._answer) > limit else ("stop", None)
        if not deltas:
            end = FakeDelta(self._choice, finish_reason=reason, num_prompt_tokens=len(self._prompt))
            pooled = self._params.pooling is not None
            return [replace(end, finish_reason="stop", hidden=state_of(self._prompt)) if pooled else end]
        deltas[-1] = replace(deltas[-1], finish_reason=reason, stop_reason=stop)
        return self._cut(deltas)

    def _cut(self, deltas: list[FakeDelta]) -> list[FakeDelta]:
        """Apply one-character stop strings, the kind whose text needs no holding back."""
        for index, delta in enumerate(deltas):
            if delta.text and delta.text in self._params.stop:
                return [*deltas[:index], replace(delta, text="", finish_reason="stop", stop_reason=delta.text)]
        return deltas

    def _delta(self, text: str, token: int, count: int) -> FakeDelta:
        asked = self._params.logprobs
        if asked is None and self._params.draws_logprobs:
            asked = 0
        entries = () if asked is None else (_entry(token, asked),)
        ask_prompt = self._params.prompt_logprobs if count == 1 else None
        of_prompt = None if ask_prompt is None else (None, *(_entry(i, ask_prompt) for i in self._prompt[1:]))
        return FakeDelta(
            self._choice,
            text,
            (token,),
            entries,
            num_prompt_tokens=len(self._prompt),
            num_output_tokens=count,
            num_cached_tokens=len(self._prompt) // 2,
            prompt_logprobs=of_prompt,
        )


def state_of(prompt: Sequence[int]) -> bytes:
    """The state of a prompt: for each of some letters, how often it occurs, and a bit."""
    return struct.pack(f"<{HIDDEN}f", *(prompt.count(97 + i) + 0.25 for i in range(HIDDEN)))


def _entry(token: int, top: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.25, 1, tuple((i, -0.25 - i) for i in range(top)))


def refusing(field_name: str) -> FakeEngine:
    """An engine that refuses every request at submit."""
    error = InvalidInput(field_name, "text of the user", "say something else")
    return FakeEngine(fail_after=0, fail_with=error)
