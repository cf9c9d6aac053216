"""The parts that an engine is put together from, and the putting together. Standard library only."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from octavo.backends import create_backend
from octavo.backends.adapters import AdapterPlaces, AdapterRoom
from octavo.backends.host_pages import HostPages
from octavo.backends.quantization import QuantConfig, QuantizedTensor, quantize
from octavo.core.errors import InvalidInput
from octavo.core.kv import KVCacheManager
from octavo.core.kv_eviction import Eviction
from octavo.core.scheduler import ContinuousBatchScheduler, SchedulerConfig
from octavo.decoding.grammar import GrammarCompiler
from octavo.engine.adapters import AdapterTable
from octavo.engine.core import EngineCore
from octavo.engine.disk_pages import DiskPages
from octavo.engine.eviction import forgetful
from octavo.engine.fixture import Fixture
from octavo.engine.followed import Followed
from octavo.engine.forcing import Forcing
from octavo.engine.identity import model_digest, namespace, numerics_id
from octavo.engine.metrics import Metrics
from octavo.engine.runner import ModelRunner
from octavo.engine.threads import cores_of
from octavo.engine.tiers import Tiers
from octavo.models.config import ModelConfig
from octavo.models.pooling import DEFAULT, Pooling
from octavo.models.registry import build_model

__all__ = ["ModelParts", "build_core", "check_tensors", "measure_swaps", "page_bytes", "parts_from_fixture"]

_NAMESPACES = 1024  # that are remembered
_NEVER_QUANTIZED = ("norm.weight", ".bias")


@dataclass(frozen=True)
class ModelParts:
    """A model with its weights on a backend, ready to run."""

    name: str
    config: ModelConfig
    model: Any  # the forward pass
    backend: Any
    weights: Mapping[str, Any]  # checkpoint name -> backend handle
    tokenizer: Any
    digest: str  # of configuration and weights
    weight_format: str = "fp32"
    weight_bytes: int = 0
    pooling: Pooling = DEFAULT
    lookup: tuple[int, int] | None = None  # the residual verifier's: `ModelRunner`

    @cached_property
    def numerics_id(self) -> str:
        """Equal ids promise equal bytes."""
        name = getattr(self.backend, "numerics_name", self.backend.name)
        kv_dtype = self.model.kv_groups()[0].dtype
        return numerics_id(
            name,
            weight_format=self.weight_format,
            kv_dtype=kv_dtype,
            ropes=self.model.ropes,
            verifier=f"residual {self.lookup}" if self.lookup else "",
            eviction=self._eviction,
        )

    @property
    def _eviction(self) -> str:
        """What is forgotten, in words that tell it from everything else that could be; empty: nothing."""
        c = self.config
        return str(c.voting or "") or (f"{c.window_sinks} {c.layer_windows}" if c.window_sinks else "")

    def namespace(self, salt: str = "", adapter: str = "") -> str:
        """Where this model's prefixes are kept, for one tenant's salt (a string, or ``InvalidInput``) and with an
        adapter, by the digest of its content.
        """
        if not isinstance(salt, str):
            raise InvalidInput("cache_salt", salt, "give a string")
        found = self._namespaces.get((salt, adapter))
        if found is None:
            if len(self._namespaces) >= _NAMESPACES:
                self._namespaces.clear()
            found = self._namespaces[salt, adapter] = namespace(
                model=self.digest,
                tokenizer=getattr(self.tokenizer, "identity", ""),
                numerics=self.numerics_id,
                groups=self.model.kv_groups(),
                adapter=adapter,
                salt=salt,
            )
        return found

    @cached_property
    def _namespaces(self) -> dict[tuple[str, str], str]:
        """Those of the last salts and adapters: every request asks for one."""
        return {}


def build_core(
    parts: ModelParts,
    *,
    num_pages: int,
    page_size: int,
    scheduling: SchedulerConfig,
    prefix_cache: bool = True,
    host_pages: int = 0,
    open_disk: Callable[[int, bytes], DiskPages] | None = None,
    seed_source: Callable[[], int] | None = None,
    clock: Callable[[], float] = time.monotonic,
    audit: bool = False,
    overlap: bool = False,
    adapters: AdapterRoom | None = None,
) -> EngineCore:
    """Pages, cache, scheduler and runner over ``parts``.

    ``host_pages``: pages of host memory for what the cache evicts. ``open_disk(bytes of a page, layout)``: where they
    go from there, if anywhere. ``overlap``: a step runs while the next is planned. ``adapters``: how many there may be.
    A model that forgets has no prefix cache: what a token's keys are depends on what was forgotten before it.
    """
    groups = parts.model.kv_groups()
    pool = parts.backend.allocate_kv(num_pages, page_size, groups)
    if hasattr(parts.model, "make_room"):  # a compiled model allocates all that its steps need now
        parts.model.make_room(pool, scheduling)
    host = HostPages(host_pages, pool.stored_bytes) if host_pages else None
    if host is not None and not scheduling.host_mb_per_s:
        rate = measure_swaps(parts.backend, pool, host, page_bytes(parts.model, page_size))
        scheduling = replace(scheduling, host_mb_per_s=rate)
    disk = None
    if host is not None and open_disk is not None:
        disk = open_disk(pool.stored_bytes, disk_layout(parts, page_size, pool.stored_bytes))
    kv = KVCacheManager(
        num_pages,
        page_size,
        groups,
        store=pool,
        enable_prefix_cache=prefix_cache and not parts.config.forgets,
        host_pages=host_pages,
        disk_pages=0 if disk is None else disk.num_pages,
        disk_columns=() if disk is None else disk.found,
    )
    scheduler = ContinuousBatchScheduler(
        kv, scheduling, vocab_size=parts.config.vocab_size, model=parts.name, seed_source=seed_source
    )
    metrics = Metrics(
        max_batched_tokens=scheduling.max_batched_tokens,
        page_size=page_size,
        page_bytes=page_bytes(parts.model, page_size),
        max_gap=scheduling.max_token_gap_ms / 1000.0,
        cores=cores_of(parts.backend),
    )
    grammars = GrammarCompiler(parts.tokenizer, parts.config.vocab_size, parts.config.eos_token_ids)
    followed = Followed(grammars)
    tiers = None if host is None else Tiers(parts.backend, pool, host, disk, clock)
    table = None if adapters is None or not adapters.places else _adapter_table(parts, adapters)
    runner = ModelRunner(
        parts.model,
        parts.backend,
        parts.weights,
        pool,
        num_groups=len(groups),
        vocab_size=parts.config.vocab_size,
        tiers=tiers,
        adapters=table,
        followed=followed,
        lookup=parts.lookup,
        voting=parts.config.voting,
        phase_seconds=metrics.phase_seconds,
        clock=clock,
    )
    core = EngineCore(scheduler, runner.execute, metrics, clock=clock, audit=audit, overlap=overlap, tiers=tiers)
    core.adapters, core.grammars, core.forcing = table, grammars, Forcing(grammars, followed)
    core.is_residual = parts.lookup is not None
    return core


def _adapter_table(parts: ModelParts, room: AdapterRoom) -> AdapterTable:
    """Room for adapters of a model, in its backend's memory."""
    model = parts.model
    places = model.adapter_places() if hasattr(model, "adapter_places") else AdapterPlaces(parts.backend)
    return AdapterTable(places, model.projections(), room)


def disk_layout(parts: ModelParts, page_size: int, stored_bytes: int) -> bytes:
    """What must be equal for the bytes of a page on disk to be of use. Whose they are is in the namespaces."""
    groups = [asdict(group) for group in parts.model.kv_groups()]
    told = {"numerics": parts.numerics_id, "page_size": page_size, "page_bytes": stored_bytes, "groups": groups}
    return json.dumps(told, sort_keys=True).encode("ascii")


def measure_swaps(backend: Any, pool: Any, host: HostPages, page_bytes: int) -> int:
    """MB of pages, at ``page_bytes`` each, that come back from host memory in a second, checksums and all; at least 1.

    The best of a few goes, over pages that hold nothing yet.
    """
    pairs = [(page, page) for page in range(min(pool.num_pages, host.num_pages, 128))]  # more than the caches hold
    best = math.inf
    for _ in range(3):
        backend.swap_out(pool, host, pairs)
        started = time.perf_counter()
        backend.swap_in(pool, host, pairs)
        best = min(best, time.perf_counter() - started)
    return max(1, int(len(pairs) * page_bytes / max(best, 1e-9) / 1e6))


def page_bytes(model: Any, page_size: int) -> int:
    """Bytes of one KV page: a compiled model knows its own, scales and padding included."""
    if hasattr(model, "page_bytes"):
        return int(model.page_bytes(page_size))
    return int(model.kv_groups()[0].page_bytes(page_size))


def check_tensors(found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]], tied: bool) -> None:
    """Names and shapes of a checkpoint against what the model needs. Raises ``InvalidInput`` naming what differs.

    A tied model may carry its output matrix as well; buffers that older checkpoints store are let pass.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        raise InvalidInput(
            "weights", _some(missing), f"{len(missing)} tensors that the configuration asks for are missing"
        )
    extra = [name for name in found if name not in expected and not _ignorable(name, tied)]
    if extra:
        raise InvalidInput("weights", _some(extra), f"{len(extra)} tensors have no place in this architecture")
    for name, shape in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise InvalidInput(f"weights: {name}", list(found[name]), f"the configuration asks for shape {list(shape)}")


def _ignorable(name: str, tied: bool) -> bool:
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def parts_from_fixture(
    fixture: Fixture,
    *,
    backend: str = "reference",
    quantization: QuantConfig | None = None,
    format: str = "auto",
    kv_dtype: str = "auto",
    adapters: AdapterRoom | None = None,
    eviction: Eviction | None = None,
    **options: Any,
) -> ModelParts:
    """The fixture's model on a backend; with ``quantization`` its matrices are packed integers (``reference`` only).

    ``format``, ``kv_dtype``, ``adapters`` and ``options`` (isa, threads) are for compiled backends.
    """
    config = forgetful(ModelConfig.from_dict(fixture.config), eviction)
    model, ops = build_model(config), create_backend(backend, **options)
    shapes = {name: _shape(values) for name, values in fixture.weights.items()}
    check_tensors(shapes, model.weight_shapes(), config.tie_word_embeddings)
    handles, size = {}, 0
    for name, values in fixture.weights.items():
        prepared = model.prepare(name, values)
        if quantization is not None and not name.endswith(_NEVER_QUANTIZED):
            prepared = quantize(prepared, quantization)
        size += prepared.num_bytes if isinstance(prepared, QuantizedTensor) else 4 * math.prod(shapes[name])
        handles[name] = ops.weight(name, prepared)
    weight_format = "fp32" if quantization is None else json.dumps(quantization.as_dict(), sort_keys=True)
    digest = model_digest(fixture.config, {name: _content(values) for name, values in fixture.weights.items()})
    if hasattr(ops, "compile"):
        model = ops.compile(model, format=format, kv_dtype=kv_dtype, adapters=adapters)
        model.load(handles.__getitem__)
        weight_format, size, handles = model.weight_format, model.weight_bytes(), {}
    return ModelParts(
        fixture.name, config, model, ops, handles, fixture.tokenizer, digest, weight_format, weight_bytes=size
    )


def _shape(values: Sequence[Any]) -> tuple[int, ...]:
    return (len(values), len(values[0])) if isinstance(values[0], list) else (len(values),)


def _content(values: Sequence[Any]) -> str:
    return hashlib.blake2b(json.dumps(values).encode("ascii"), digest_size=16).hexdigest()
