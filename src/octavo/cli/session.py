"""A model in this process for commands that talk to it directly: the API's requests, without HTTP.

The engine and its event loop live in one background thread; the commands stay ordinary blocking code, so Ctrl-C reaches
them at once.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import aclosing
from typing import Any, TypeVar

from octavo.cli.errors import Refused
from octavo.core.errors import OctavoError
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.config import EngineConfig
from octavo.serve.config import ServeConfig
from octavo.serve.errors import ApiError
from octavo.serve.generate import Job, run
from octavo.serve.metrics import Metrics
from octavo.serve.names import Warnings, decode_request
from octavo.serve.params import sampling_params
from octavo.serve.port import Delta
from octavo.serve.prompts import encode_chat_prompt, encode_prompts, ending_at_turns, fit_context
from octavo.serve.protocol import ChatRequest, CompletionRequest, GenerationRequest

__all__ = ["Session"]

_Result = TypeVar("_Result")
_NO_LIMIT = float(10**9)  # seconds; a command has no deadline

_TEXT = "an answer holds its text; ask a server for more"
_AS_WRITTEN = "calls and thoughts are left in the text as the model writes them; ask a server for more"
_OF_ANSWERS = (
    "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", "thinking_token_budget",
    "include_reasoning", "separate_reasoning",
)  # fmt: skip
_WHY = {
    "model": "the model is the one given by --model, or an adapter given by --lora",
    "priority": "the lines are taken in order",
    **dict.fromkeys(_OF_ANSWERS, _AS_WRITTEN),
}
_HTTP_ONLY = (
    "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "return_token_ids", "echo", "stream",
    "stream_options", "priority", "request_id", *_OF_ANSWERS,
)  # fmt: skip


class Session:
    """A loaded model. Use as a context manager."""

    def __init__(self, config: EngineConfig, say: Callable[[str], None]) -> None:
        self._engine = AsyncEngine.load(config, say=say)
        self._metrics = Metrics(self._engine, self._engine.model_name)
        self._limits = ServeConfig()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="octavo-session", daemon=True)

    def __enter__(self) -> Session:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._engine.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def model_name(self) -> str:
        """What is loaded."""
        return self._engine.model_name

    @property
    def max_seq_len(self) -> int:
        """Tokens of a prompt and its answer together."""
        return self._engine.max_seq_len

    def call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """Run a coroutine in the session's loop and wait for it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def job(self, body: dict[str, Any]) -> tuple[Job, Warnings]:
        """An API body as work for the engine, and what of it has no effect here. Raises ``ApiError``."""
        limits, engine = self._limits, self._engine
        request: GenerationRequest
        if "messages" in body:
            request, warnings = chat, _ = decode_request(body, ChatRequest)
            prompts = await asyncio.to_thread(encode_chat_prompt, chat, engine, limits)
        else:
            request, warnings = text, _ = decode_request(body, CompletionRequest)
            prompts = await asyncio.to_thread(encode_prompts, text, engine, limits)
        params = sampling_params(request, limits, engine.vocab_size, engine.tokenizer)
        if "messages" in body:
            params = ending_at_turns(params, engine)
        fit_context(prompts, params, engine, "messages" if "messages" in body else "prompt")
        adapter = self._adapters().get(request.model or "", "")
        return Job(uuid.uuid4().hex, prompts, params, _NO_LIMIT, adapter=adapter), warnings + self._unused(request)

    def _adapters(self) -> dict[str, str]:
        """The digest of each adapter, by its name."""
        return {adapter.name: adapter.digest for adapter in self._engine.adapters()}

    def _unused(self, request: GenerationRequest) -> Warnings:
        """A warning for each known parameter that only an HTTP answer honours."""
        asked = [name for name in _HTTP_ONLY if getattr(request, name, None) not in (None, False)]
        if request.model not in (None, self.model_name, *self._adapters()):
            asked.append("model")
        return [{"param": name, "message": f"{name} has no effect here: {_WHY.get(name, _TEXT)}."} for name in asked]

    async def deltas(self, job: Job) -> AsyncIterator[tuple[int, Delta]]:
        """(index, delta) as they come."""
        async with aclosing(run(self._engine, job, self._metrics)) as deltas:
            async for item in deltas:
                yield item

    def stream(self, body: dict[str, Any]) -> Generator[Delta, None, None]:
        """The deltas of a body's first choice. Closing the iterator cancels the request. Raises ``OctavoError``."""
        arrived: queue.SimpleQueue[Delta | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for _, delta in self.deltas((await self.job(body))[0]):
                    arrived.put(delta)
                arrived.put(None)
            except ApiError as error:
                arrived.put(Refused(error.message) if error.status == 400 else OctavoError(error.message))
            except Exception as error:
                arrived.put(error)

        future = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        try:
            while (item := arrived.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            future.cancel()
