"""From a model's name to an engine that can run: files, configuration, tokenizer, weights on a backend, pages."""

from __future__ import annotations

import atexit
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from octavo.backends import available_backends, create_backend
from octavo.core.errors import InvalidInput
from octavo.core.facts import scheduler_facts
from octavo.core.kv_eviction import StreamingLLM
from octavo.engine.config import MAX_DEFAULT_CONTEXT, EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.disk_pages import TAIL_BYTES, DiskPages
from octavo.engine.draft_model import check_draft, draft_proposer
from octavo.engine.eviction import forgetful
from octavo.engine.fixture import load_fixture
from octavo.engine.formats import resolve_auto
from octavo.engine.identity import model_digest
from octavo.engine.memory import MemoryPlan, parse_size, show_size
from octavo.engine.parts import ModelParts, build_core, check_tensors, parts_from_fixture
from octavo.engine.recorder import Recorder
from octavo.engine.sizes import plan_for, scheduling_for
from octavo.engine.threads import limit_threads
from octavo.engine.vocabulary import no_collections, seed_source, tokenizer_in
from octavo.models.config import ModelConfig
from octavo.models.pooling import Pooling
from octavo.models.registry import build_model

__all__ = [
    "LoadedEngine",
    "load_engine",
    "load_parts",
    "plan_engine",
]

_SAMPLE = 1000  # characters
Say = Callable[[str], None]


@dataclass(frozen=True)
class LoadedEngine:
    """An engine with the model it runs and the plan that it keeps to."""

    config: EngineConfig
    parts: ModelParts
    plan: MemoryPlan
    core: EngineCore
    max_seq_len: int
    context_limit: int
    source: str = ""  # fixture, folder or file that it was loaded from: `load_tokenizer` takes it

    @property
    def source_bytes(self) -> int:
        """Bytes of the file, or of the files of the folder, that it was loaded from."""
        place = Path(self.source)
        files = place.iterdir() if place.is_dir() else (place,)
        return sum(file.stat().st_size for file in files if file.is_file())


def load_engine(config: EngineConfig, *, say: Say = print) -> LoadedEngine:
    """Resolve, check that it fits, load, and build. ``say`` gets the memory plan and progress, line by line.

    Raises ``InvalidInput`` (unknown model, unsupported configuration, wrong tensors, too little memory) before
    anything large is allocated, and whatever the model store raises for a model that cannot be fetched.
    """
    limit_threads(config.threads, say)
    with no_collections(), closing(_open(config)) as source, _opened_draft(config, say) as draft:
        config = source.with_format(config, say)
        plan, max_seq_len, running = _plan(config, source, draft)
        say(plan.describe())
        if config.eviction is not None:
            say(f"lossy: {config.kv_eviction} changes answers; nothing is shared between requests")
        if running:
            say(running)
        parts = replace(source.load(config), lookup=config.lookup)
        drafts = None if draft is None else draft.source.load(draft.config)
    core = build_core(
        parts,
        num_pages=plan.num_pages,
        page_size=config.page_size,
        scheduling=scheduling_for(config, max_seq_len),
        prefix_cache=config.prefix_cache,
        host_pages=plan.host_pages,
        open_disk=partial(_open_disk, config, say) if config.disk_kv else None,
        seed_source=seed_source(config.seed),
        audit=config.audit,
        overlap=config.overlap,
        adapters=config.adapter_room,
    )
    proposer = None if drafts is None else draft_proposer(config, drafts, parts, plan, max_seq_len)
    core.speculator = config.speculator(proposer)
    if core.speculator is not None:
        core.speculator.rehearse()
    core.load_adapters(config.lora_folders(), say)
    core.metrics.temporary_bytes = plan.needs.activations + plan.needs.workspace
    if config.record or config.disk_kv:
        atexit.register(core.close)  # at the latest
    if config.record:
        _record(core, config, parts, say)
    context_limit = parts.config.max_position_embeddings
    return LoadedEngine(config, parts, plan, core, max_seq_len, context_limit, str(source.path))


def _open_disk(config: EngineConfig, say: Say, page_bytes: int, layout: bytes) -> DiskPages:
    """The disk tier that the configuration names. Raises ``InvalidInput``."""
    size = parse_size(config.disk_kv_memory, "disk_kv_memory")
    num_pages = size // (page_bytes + TAIL_BYTES)
    if not num_pages:
        raise InvalidInput("disk_kv_memory", size, f"give a page at least: {show_size(page_bytes + TAIL_BYTES)}")
    wait_s = config.disk_kv_wait_ms / 1000.0
    disk = DiskPages(config.disk_kv, num_pages, page_bytes, layout, wait_s=wait_s, say=say)
    say(f"disk tier: {disk.num_pages} pages in {config.disk_kv}, {sum(len(c.pages) for c in disk.found)} of them held")
    return disk


def _record(core: EngineCore, config: EngineConfig, parts: ModelParts, say: Say) -> None:
    """Record into the file that the configuration names."""
    facts = {**scheduler_facts(core.scheduler), "numerics_id": parts.numerics_id, "engine": asdict(config)}
    core.recorder = Recorder(config.record, core.scheduler.timeline, facts, say)


def plan_engine(config: EngineConfig, *, say: Say = print) -> MemoryPlan:
    """What ``load_engine`` would hold, from headers and shapes alone. Raises ``InvalidInput`` where it does not fit."""
    with no_collections(), closing(_open(config)) as source, _opened_draft(config, say) as draft:
        return _plan(source.with_format(config, say), source, draft)[0]


def load_parts(config: EngineConfig) -> ModelParts:
    """The model alone, without pages or scheduler."""
    with closing(_open(config)) as source:
        return replace(source.load(source.with_format(config, lambda line: None)), lookup=config.lookup)


def _pooling(path: Path, weights: Any) -> Pooling:
    from octavo.weights.pooling import pooling_of_folder, pooling_of_metadata

    return pooling_of_folder(path) if path.is_dir() else pooling_of_metadata(weights.metadata)


def _plan(config: EngineConfig, source: _Source, draft: _Draft | None) -> tuple[MemoryPlan, int, str]:
    """The memory plan, the longest sequence, and how a compiled model will run (instruction set, formats)."""
    model_config = ModelConfig.from_dict(source.config)
    limit = model_config.max_position_embeddings
    if config.max_seq_len > limit and not isinstance(config.eviction, StreamingLLM):
        raise InvalidInput(
            "max_seq_len", config.max_seq_len, f"the model's context is {limit} tokens; give at most that"
        )
    max_seq_len = config.max_seq_len or min(limit, MAX_DEFAULT_CONTEXT)
    model, backend = source.compiled(config)
    running = model.describe() if hasattr(model, "describe") else ""
    beside = None if draft is None else draft.beside(model_config, backend)
    return plan_for(config, model, backend.name, max_seq_len, beside), max_seq_len, running


def _compiled(config: EngineConfig, model: Any, backend: Any) -> tuple[Any, Any]:
    """The model as its backend runs it, and the backend: a new one, if there is none."""
    if backend is None:
        backend = create_backend(config.backend, threads=config.threads)
    if hasattr(backend, "compile"):
        settings = {"format": config.format, "kv_dtype": config.kv_dtype, "adapters": config.adapter_room}
        return backend.compile(model, **settings), backend
    if config.format not in ("auto", "fp32") or config.kv_dtype not in ("auto", "fp32"):
        remedy = f"{backend.name} runs fp32; formats need the native backend (octavo doctor tells why it is not there)"
        raise InvalidInput("format", f"{config.format}, KV {config.kv_dtype}", remedy)
    return model, backend


class _Source(ABC):
    """Where a model comes from: its configuration at once, its weights when they fit."""

    path: Path

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self._compiled: dict[EngineConfig, tuple[Any, Any]] = {}

    def compiled(self, config: EngineConfig, backend: Any = None) -> tuple[Any, Any]:
        """The model as its backend runs it, and the backend: what was planned is what is loaded."""
        if config not in self._compiled:
            self._compiled[config] = _compiled(config, build_model(self.model_config(config)), backend)
        return self._compiled[config]

    def model_config(self, config: EngineConfig) -> ModelConfig:
        """The model's, as it runs: with what it forgets. Raises ``InvalidInput``."""
        return forgetful(ModelConfig.from_dict(self.config), config.eviction)

    @abstractmethod
    def load(self, config: EngineConfig) -> ModelParts:
        """The model with its weights on the backend that ``config`` names."""

    def with_format(self, config: EngineConfig, say: Say) -> EngineConfig:
        """The configuration with the format that `auto` stands for, which is said."""
        return config

    def close(self) -> None:  # noqa: B027 - a fixture holds no file
        """Give the files back."""


class _FixtureSource(_Source):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.fixture = load_fixture(path)
        super().__init__(self.fixture.config)

    def load(self, config: EngineConfig) -> ModelParts:
        return parts_from_fixture(
            self.fixture,
            backend=config.backend,
            format=config.format,
            kv_dtype=config.kv_dtype,
            adapters=config.adapter_room,
            eviction=config.eviction,
            threads=config.threads,
        )


class _FileSource(_Source):
    """A folder or a GGUF file, through ``octavo.weights``."""

    def __init__(self, name: str, path: Path) -> None:
        from octavo.weights.names import open_weights

        self.name, self.path = name, path
        self.weights = open_weights(path)
        super().__init__(self.weights.config)

    def with_format(self, config: EngineConfig, say: Say) -> EngineConfig:
        name = available_backends()[-1] if config.backend == "auto" else config.backend
        if name != "native" or config.format != "auto":
            return config
        kind, line = resolve_auto(self.weights.own_format(), build_model(ModelConfig.from_dict(self.config)))
        say(line)
        return replace(config, format=kind)

    def load(self, config: EngineConfig) -> ModelParts:
        model_config = self.model_config(config)
        model, backend = self.compiled(config)
        shapes = {name: self.weights.info(name).shape for name in self.weights.names()}
        expected = model.weight_shapes()
        check_tensors(shapes, expected, model_config.tie_word_embeddings)
        tokenizer = tokenizer_in(
            self.path, self.weights
        )  # first: what building it took is free again when memory is fullest
        handles: dict[str, Any] = {}
        weight_format, weight_bytes = "fp32", 4 * sum(math.prod(shape) for shape in expected.values())
        if hasattr(model, "load"):  # packs one weight after the other: no second copy of the model
            read = lambda name: model.prepare(name, self.weights.read(name))  # noqa: E731
            # `prepare` leaves matrices as they are
            model.load(read, self.weights.codes, self.weights.in_file, _sample(tokenizer, model_config.vocab_size))
            weight_format, weight_bytes = model.weight_format, model.weight_bytes()
        else:
            handles = {name: backend.weight(name, model.prepare(name, self.weights.read(name))) for name in expected}
        return ModelParts(
            name=self.name,
            config=model_config,
            model=model,
            backend=backend,
            weights=handles,
            tokenizer=tokenizer,
            digest=model_digest(self.config, self._identity()),
            weight_format=weight_format,
            weight_bytes=weight_bytes,
            pooling=_pooling(self.path, self.weights),
        )

    def _identity(self) -> dict[str, Any]:
        """Stored shapes and types, and which files they are: enough to tell models apart on one machine."""
        files = sorted(self.path.iterdir()) if self.path.is_dir() else [self.path]
        stats = {str(file): [os.stat(file).st_size, os.stat(file).st_mtime_ns] for file in files if file.is_file()}
        infos = {name: self.weights.info(name) for name in self.weights.names()}
        return {"files": stats, "tensors": {name: [list(i.shape), i.dtype] for name, i in infos.items()}}

    def close(self) -> None:
        self.weights.close()


@dataclass(frozen=True)
class _Draft:
    """The draft model that a configuration asks for."""

    config: EngineConfig
    source: _Source

    def beside(self, model_config: ModelConfig, backend: Any) -> Any:
        """The draft model as it runs on the backend of the model. Raises ``InvalidInput`` if it has other tokens."""
        check_draft(self.config.model, ModelConfig.from_dict(self.source.config), model_config)
        return self.source.compiled(self.config, backend)[0]


def _sample(tokenizer: Any, vocab_size: int) -> list[int]:
    """Token ids of a text that shows what is loud in a model."""
    from octavo.weights.quant.builtin_text import CALIBRATION

    ids: list[int] = tokenizer.encode(CALIBRATION[:_SAMPLE])
    return ids if all(0 <= token < vocab_size for token in ids) else []


def _open(config: EngineConfig) -> _Source:
    if config.model.endswith(".json"):
        return _FixtureSource(Path(config.model))
    from octavo.weights.store import ModelStore

    found = ModelStore(config.cache_dir or None, config.offline).resolve(config.model)
    return _FileSource(found.name, found.path)


@contextmanager
def _opened_draft(config: EngineConfig, say: Say) -> Iterator[_Draft | None]:
    asked = config.draft_model
    if asked is None:
        yield None
        return
    try:
        source = _open(asked)
    except InvalidInput as error:
        field = "speculative_config.model" if error.field == "model" else error.field
        raise InvalidInput(field, error.value, error.remedy) from None
    with closing(source):
        yield _Draft(source.with_format(asked, lambda line: say(f"draft model: {line}")), source)
