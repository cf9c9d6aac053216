"""LLM: many prompts in, all answers out, in this thread."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

from octavo.core.batch import TokenLogprobs
from octavo.core.errors import InvalidInput, OctavoError
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.decoding.grammar.checker import GrammarChecker
from octavo.decoding.ranking import best_of
from octavo.decoding.words import with_token_ids
from octavo.engine.config import EngineConfig
from octavo.engine.loader import LoadedEngine, load_engine
from octavo.engine.output import OutputDelta, OutputRouter
from octavo.engine.vectors import check_dimensions, vector_of

__all__ = ["LLM", "CompletionOutput", "RequestOutput"]

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one for each token, if asked for
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    hidden: bytes = b""  # a pooled state, if that is what was asked for: float32, little-endian
    cumulative_logprob: float | None = None  # of all its tokens, where candidates or beams were ranked, or it was asked


@dataclass
class RequestOutput:
    """All that one prompt came to. ``usage``: prompt_tokens, completion_tokens, total_tokens, cached_tokens."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_draft_tokens: int = 0  # guessed ahead and verified
    num_accepted_tokens: int = 0  # of them, those that were drawn
    num_output_tokens: int = 0  # of all candidates, returned or not

    @property
    def usage(self) -> dict[str, int]:
        """Token counts, in the words of the HTTP API."""
        completion, prompt = self.num_output_tokens, len(self.prompt_token_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "cached_tokens": self.num_cached_tokens,
        }


class LLM:
    """A model for offline use. Keyword arguments are the fields of `EngineConfig`.

    Raises ``InvalidInput`` for an unknown model or option, and where memory does not suffice.
    """

    def __init__(
        self,
        model: str = EngineConfig.model,
        *,
        loaded: LoadedEngine | None = None,
        say: Callable[[str], None] = print,
        **options: Any,
    ) -> None:
        if loaded is None:
            loaded = load_engine(_config(model, options), say=say)
        self.loaded = loaded
        self.tokenizer = loaded.parts.tokenizer
        self._router = OutputRouter(loaded.core, self.tokenizer)
        self._next_id = 0
        self._checker: GrammarChecker | None = None  # once there is a grammar

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts: texts, lists of token ids, or both mixed.

        ``params`` is one for all, or one for each. ``lora`` names an adapter, for all. ``use_tqdm`` shows a progress
        bar. Nothing runs if any prompt is refused (``InvalidInput``).
        """
        listed = _as_list(prompts)
        each = self._params_for(params, len(listed))
        adapter = "" if lora is None else self._adapter(lora)
        requests = [self._request(prompt, one, adapter) for prompt, one in zip(listed, each, strict=True)]
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        return self._run(requests, texts, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | None = None,
        use_tqdm: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several. A conversation is a list of ``{"role": ..., "content": ...}``."""
        from octavo.tokenizers.chat import encode_chat

        listed = _listed("messages", messages, "give a list of messages, or a list of such lists")
        conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
        prompts = [encode_chat(self.tokenizer, one, **template_options) for one in conversations]
        return self.generate(prompts, params, lora=lora, use_tqdm=use_tqdm)

    def load_lora(self, name: str, folder: str) -> None:
        """Serve the adapter in a folder (PEFT's two files) under a name. Raises ``InvalidInput``; see ``max_loras``."""
        core = self.loaded.core
        core.load_adapter(name, folder, core.served_adapters.read(folder))

    def unload_lora(self, name: str) -> None:
        """The name stands for nothing from now on. Raises ``InvalidInput`` for one that is not loaded."""
        self.loaded.core.unload_adapter(name)

    def _adapter(self, name: str) -> str:
        return self.loaded.core.served_adapters.named(name).digest

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        use_tqdm: bool = False,
    ) -> list[list[float]]:
        """A vector for each prompt, of ``dimensions`` float32 values (all that the model has, if None).

        ``pooling`` (last, mean, cls) and ``normalize`` (to length 1) are the model's, if None. Raises ``InvalidInput``
        for what cannot be had, and ``OctavoError`` if the model gives no vector.
        """
        own = self.loaded.parts.pooling
        check_dimensions(dimensions, self.loaded.parts.config.hidden_size)
        params = SamplingParams(max_tokens=0, pooling=own.kind if pooling is None else pooling)
        choices = [output.outputs[0] for output in self.generate(prompts, params, use_tqdm=use_tqdm)]
        failed = next((choice.error or choice.finish_reason for choice in choices if not choice.hidden), None)
        if failed is not None:
            raise OctavoError(f"a text has no vector: {failed}")
        long = own.normalize if normalize is None else normalize
        return [vector_of(choice.hidden, normalize=long, dimensions=dimensions) for choice in choices]

    def _params_for(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        listed = _listed("params", params, "give a SamplingParams, or a list of one for each prompt")
        if len(listed) != count:
            raise InvalidInput("params", f"{len(listed)} params", f"give one, or one for each of {count} prompts")
        return listed

    def _request(self, prompt: Prompt, params: SamplingParams, adapter: str = "") -> Request:
        parts = self.loaded.parts
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        self._next_id += 1
        return Request(
            f"llm-{self._next_id}",
            token_ids,
            with_token_ids(params, self.tokenizer),
            model=parts.name,
            arrival=time.monotonic(),
            adapter=adapter,
            namespace=parts.namespace(adapter=adapter),
            eos_token_ids=parts.config.eos_token_ids,
        )

    def _run(self, requests: Sequence[Request], texts: Sequence[str | None], use_tqdm: bool) -> list[RequestOutput]:
        core, outputs = self.loaded.core, {}
        self._submit(requests)
        for request, text in zip(requests, texts, strict=True):
            choices = [CompletionOutput(branch.choice) for branch in request.branches]
            outputs[request.request_id] = RequestOutput(
                request.request_id, text, list(request.prompt_token_ids), choices
            )
        try:
            with _progress(len(requests), use_tqdm) as advance:
                while core.has_work:
                    events = core.step(time.monotonic())
                    begun = core.clock()
                    for delta in self._router.take(events):
                        _add(outputs[delta.request_id], delta)
                        advance(delta.last)
                    core.delivered(begun)
        finally:
            self._abandon(requests)
        for request in requests:
            _rank(outputs[request.request_id], request.params)
        return [outputs[request.request_id] for request in requests]

    def _submit(self, requests: Sequence[Request]) -> None:
        core = self.loaded.core
        try:
            for request in requests:
                self._compile(request.params)
                core.submit(request, time.monotonic())
                self._router.open(request, whole=True)
        except BaseException:
            self._abandon(requests)
            raise

    def _compile(self, params: SamplingParams) -> None:
        """In a process that can be killed first: a grammar may come from a stranger here as well."""
        core = self.loaded.core
        if params.grammar is not None and not core.knows(params):
            self._checker = self._checker or GrammarChecker(sorted(self.tokenizer.traits.special))
            self._checker.check(params.grammar)
        core.compile(params)

    def _abandon(self, requests: Sequence[Request]) -> None:
        """After an interruption: no request is left behind in the engine."""
        core = self.loaded.core
        for request in requests:
            self._router.close(request.request_id)
            core.cancel(request.request_id)
        while core.has_work:
            core.step(time.monotonic())


def _config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    known = {name for name in EngineConfig.__dataclass_fields__ if name != "model"}
    for name in options:
        if name not in known:
            raise InvalidInput(name, options[name], "unknown option; known: " + ", ".join(sorted(known)))
    asked = options.get("speculative_config")
    told = {"speculative_config": json.dumps(asked)} if isinstance(asked, Mapping) else {}
    return replace(EngineConfig(model=model), **{**options, **told})


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    listed = _listed("prompts", prompts, "give a text, a list of token ids, or a list of either")
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def _listed(name: str, value: Any, remedy: str) -> list[Any]:
    """What can be gone through as a list; not a mapping, a text or a set, whose elements are something else."""
    if isinstance(value, (str, bytes, Mapping, Set)) or not isinstance(value, Iterable):
        raise InvalidInput(name, value, remedy)
    return list(value)


def _rank(output: RequestOutput, params: SamplingParams) -> None:
    """Keep the choices that are returned, best first where there were more, with what was asked for."""
    kept = best_of(params, [choice.logprobs for choice in output.outputs])
    output.outputs = [replace(output.outputs[at], index=index) for index, at in enumerate(kept)]
    for choice in output.outputs:
        if choice.logprobs:
            choice.cumulative_logprob = math.fsum(entry.logprob for entry in choice.logprobs)
        if not params.shows_logprobs:
            choice.logprobs = []


def _add(output: RequestOutput, delta: OutputDelta) -> None:
    choice = output.outputs[delta.choice]
    output.num_output_tokens += len(delta.token_ids)
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    choice.logprobs += delta.logprobs
    output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
    if len(delta.spent) > 2:
        output.num_draft_tokens, output.num_accepted_tokens = map(int, delta.spent[2:])
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = list(delta.prompt_logprobs)
    if delta.finish_reason is not None:
        choice.finish_reason, choice.stop_reason, choice.error = delta.finish_reason, delta.stop_reason, delta.error
        choice.hidden = delta.hidden


@contextlib.contextmanager
def _progress(total: int, shown: bool) -> Iterator[Callable[[bool], None]]:
    """A progress bar over finished requests, or nothing."""
    if not shown:
        yield lambda done: None
        return
    from rich.progress import Progress

    with Progress() as bar:
        task = bar.add_task("Generating", total=total)
        yield lambda done: bar.advance(task) if done else None
