"""`octavo inspect`: how a model is stored, what would multiply what, its captured program, and where backends part."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from octavo.backends import BACKENDS
from octavo.backends.capture import Program, Side, Weight, Weights, capture, difference_from, first_difference
from octavo.backends.native_formats import FormatPlan
from octavo.backends.operand_types import OPERANDS, packed_bytes
from octavo.core.errors import InvalidInput
from octavo.engine.config import EngineConfig
from octavo.engine.formats import resolve_auto
from octavo.engine.loader import load_parts
from octavo.engine.memory import available_memory, show_size
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model

__all__ = ["MatrixUse", "diff_backends", "matrix_uses", "run_diff", "run_inspect", "run_program"]

NATIVE = "native"
_REFERENCE_BYTES = 32  # a float object and its pointer


@dataclass(frozen=True)
class MatrixUse:
    """One matrix: as stored, as run, and what a token reads of it (a row of an embedding, the chosen experts)."""

    name: str
    use: str  # linear, head, embed, router, expert
    shape: tuple[int, int]
    stored: str
    stored_bytes: int
    format: str
    operands: str  # weights x activations -> sums
    bytes_per_token: int


def run_inspect(model: str, weight_format: str, as_json: bool, cache_dir: str) -> None:
    """Print every matrix of a model. Raises ``InvalidInput`` for an unknown model or format."""
    from octavo.weights.names import open_weights

    with open_weights(_path(model, cache_dir)) as source:
        plan = FormatPlan(_resolved(weight_format, source))
        uses = list(matrix_uses(source, plan))
    if as_json:
        print(json.dumps({"format": plan.describe(), "matrices": [asdict(use) for use in uses]}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("matrix", "shape", "stored", "bytes", "runs as", "operands", "bytes a token"):
        right = heading.startswith("bytes")
        table.add_column(heading, no_wrap=True, justify="right" if right else "left")
    for use in uses:
        shape = " x ".join(map(str, use.shape))
        sizes = f"{use.stored_bytes:,}", f"{use.bytes_per_token:,}"
        table.add_row(use.name, shape, use.stored, sizes[0], use.format, use.operands, sizes[1])
    Console(highlight=False, width=_width(uses)).print(table)
    stored = sum({use.name: use.stored_bytes for use in uses}.values())  # a tied matrix counts once
    read = sum(use.bytes_per_token for use in uses)
    print(f"\nstored {show_size(stored)}; a token alone in its step reads {show_size(read)} as {plan.describe()}")


def _resolved(weight_format: str, source: Any) -> str:
    """The format, with `auto` as an engine would take it."""
    if weight_format != "auto":
        return weight_format
    return resolve_auto(source.own_format(), build_model(ModelConfig.from_dict(source.config)))[0]


def _width(uses: list[MatrixUse]) -> int:
    return 110 + max(len(use.name) for use in uses)


def matrix_uses(source: Any, plan: FormatPlan) -> Iterator[MatrixUse]:
    """Every matrix that the forward pass multiplies or looks up, in its order; a tied one appears in both uses."""
    model = build_model(ModelConfig.from_dict(source.config))
    shapes = model.weight_shapes()
    for name, use, share in _places(capture(model.forward, shapes)):
        rows, columns = shapes[name]
        kind = plan(name, "linear" if use == "expert" else use)
        whole = packed_bytes((rows, columns), kind)
        o = OPERANDS[kind]
        yield MatrixUse(
            name=name,
            use=use,
            shape=(rows, columns),
            stored=source.info(name).dtype,
            stored_bytes=source.stored_bytes(name),
            format=kind,
            operands="row lookup" if use == "embed" else f"{o.weights} x {o.activations} -> {o.sums}",
            bytes_per_token=whole // (-(-rows // 64) * 64) if use == "embed" else math.ceil(whole * share),
        )


def _places(program: Program) -> Iterator[tuple[str, str, float]]:
    """(name, use, share of it that one token reads) of every matrix."""
    uses = {"embed": ("table", "embed"), "linear": ("weight", "linear"), "logits": ("weight", "head")}
    for record in program.records:
        given = dict(record.operands)
        if record.op in uses:
            place, use = uses[record.op]
            operand = given[place]
            if isinstance(operand, Weight):
                yield operand.name, use, 1.0
        elif record.op == "moe":
            router, lists = given["router"], [given[key] for key in ("gate", "up", "down")]
            if isinstance(router, Weight):
                yield router.name, "router", 1.0
            share = given["top_k"].value / len(lists[0].names)  # type: ignore[union-attr]
            for part in lists:
                if isinstance(part, Weights):
                    yield from ((name, "expert", share) for name in part.names)


def run_program(model: str, cache_dir: str) -> None:
    """Print the captured forward pass of a model."""
    found = build_model(ModelConfig.from_dict(_config(model, cache_dir)))
    print(capture(found.forward, found.weight_shapes()).describe())


def run_diff(model: str, pair: str, prompt: str, cache_dir: str) -> None:
    """Print the first op whose outputs differ between two backends on a prompt, or that there is none."""
    names = [name.strip() for name in pair.split(",")]
    if len(names) != 2 or any(name not in (*BACKENDS, NATIVE) for name in names) or names == [NATIVE, NATIVE]:
        remedy = f"give two of {', '.join((*BACKENDS, NATIVE))}, as in native,numpy"
        raise InvalidInput("diff", pair, remedy)
    found, count = diff_backends(model, names[0], names[1], prompt, cache_dir)
    print(f"{names[0]} and {names[1]}: {found}" if found else f"{names[0]} and {names[1]} agree in all {count} ops")


def diff_backends(model: str, first: str, second: str, prompt: str, cache_dir: str) -> tuple[Any, int]:
    """(the first `Difference` or None, number of ops compared) of two backends, each with its own weights and pages.

    The native one runs in fp32 and keeps every value of its program: what was fused is compared as one.
    """
    shape = build_model(ModelConfig.from_dict(_config(model, cache_dir)))
    needed = _REFERENCE_BYTES * sum(math.prod(s) for s in shape.weight_shapes().values())
    available = available_memory()
    if "reference" in (first, second) and available is not None and needed > available:
        raise InvalidInput("diff", "reference", f"would take {show_size(needed)}: use a smaller model")
    program = capture(shape.forward, shape.weight_shapes())
    if NATIVE in (first, second):
        known = _native_values(_parts(model, NATIVE, cache_dir), prompt)
        side = _side(_parts(model, second if first == NATIVE else first, cache_dir), prompt)
        compared = sum(any(value in known for value in record.outputs) for record in program.records)
        return difference_from(program, known, side), compared
    sides = [_side(_parts(model, name, cache_dir), prompt) for name in (first, second)]
    return first_difference(program, sides[0], sides[1]), len(program.records)


def _parts(model: str, backend: str, cache_dir: str) -> Any:
    return load_parts(EngineConfig(model=model, backend=backend, format="fp32", cache_dir=cache_dir))


def _ids(parts: Any, prompt: str) -> list[int]:
    ids: list[int] = parts.tokenizer.encode(prompt)
    if not ids:
        raise InvalidInput("prompt", prompt, "has no tokens")
    return ids


def _side(parts: Any, prompt: str) -> Side:
    ids, groups = _ids(parts, prompt), parts.model.kv_groups()
    pages = -(-len(ids) // 16)
    pool = parts.backend.allocate_kv(pages * len(groups), 16, groups)
    tables = [[list(range(g * pages, (g + 1) * pages))] for g in range(len(groups))]
    batch = parts.backend.batch(ids, list(range(len(ids))), [len(ids)], tables, pool)
    return parts.backend, parts.weights, batch


def _native_values(parts: Any, prompt: str) -> dict[int, Any]:
    """What each value of the captured program was in the native one, as lists."""
    ids, lowered = _ids(parts, prompt), parts.model.lower(keep=True)
    program, pool = parts.model.run_once(lowered, ids, [len(ids) - 1])
    known = {value: program.values(buffer).tolist() for value, buffer in lowered.shown.items()}
    del program, pool
    return known


def _path(model: str, cache_dir: str) -> Any:
    from octavo.weights.store import ModelStore

    return ModelStore(cache_dir or None).resolve(model).path


def _config(model: str, cache_dir: str) -> Any:
    """A model's configuration: of a fixture, a folder or a file."""
    if model.endswith(".json"):
        from octavo.engine.fixture import load_fixture

        return load_fixture(model).config
    from octavo.weights.names import open_weights

    with open_weights(_path(model, cache_dir)) as source:
        return source.config
