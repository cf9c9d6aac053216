"""Each op in the place where the library runs it, over random ragged steps, against the numpy backend in float32;
products of integers exactly, at the ends of their ranges too. On every instruction set, on 1 to 4 threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from model_harness import Loaded, batches, forward
from native_harness import ISAS

from octavo.backends import create_backend
from octavo.backends.native_backend import NativeBackend, NativeModel
from octavo.backends.native_formats import FormatPlan
from octavo.backends.native_program import StepLimits
from octavo.backends.operand_types import OPERANDS
from octavo.backends.ops import RopeTable
from octavo.core.kv_groups import make_kv_groups
from octavo.weights.quant.integer import GroupCodes

VOCAB = 70
Shapes = dict[str, tuple[int, ...]]
Body = Callable[[Any, Mapping[str, Any], Any, Any], Any]  # ops, weights, x [T, H], batch -> [T, W]


@dataclass
class OneOp:
    """A model that embeds its tokens, runs one op or a few that the library joins, and multiplies what comes out."""

    shapes: Shapes
    width: int
    body: Body
    windows: tuple[int, ...] = (0,)
    kv: tuple[int, int] = (1, 16)  # heads, head size
    soft_cap: float = 0.0

    @property
    def config(self) -> Any:
        return SimpleNamespace(vocab_size=VOCAB)

    def weight_shapes(self) -> Shapes:
        return self.shapes | {"head": (VOCAB, self.width)}

    def kv_groups(self, dtype: str = "fp32") -> Any:
        return make_kv_groups(self.windows, *self.kv, self.kv[1], dtype)

    def forward(self, ops: Any, w: Any, batch: Any) -> Any:
        y = self.body(ops, w, ops.embed(batch.token_ids, w["table"]), batch)
        return ops.logits(ops.select_rows(y, batch), w["head"], soft_cap=self.soft_cap)


def table(width: int) -> Shapes:
    return {"table": (VOCAB, width)}


def width_of(rng: random.Random) -> int:
    return rng.choice([1, 15, 16, 17, 64, 65, rng.randint(2, 300)])


Case = Callable[[random.Random], OneOp]
OPS: dict[str, Case] = {}


def case(made: Case) -> Case:
    OPS[made.__name__] = made
    return made


@case
def norms(rng: random.Random) -> OneOp:
    """RMS norms: before products, after them, read twice, with and without something to add."""
    n, m = width_of(rng), width_of(rng)

    def body(ops: Any, w: Any, x: Any, batch: Any) -> Any:
        y, s = ops.rms_norm(x, w["first"], 1e-5, residual=ops.linear(x, w["square"]))
        z, _ = ops.rms_norm(ops.linear(y, w["wide"]), w["second"], 1e-6)
        t, _ = ops.rms_norm(ops.linear(z, w["back"]), w["third"], 1e-5, residual=s)
        return ops.linear(ops.add(y, t), w["wide"])

    shapes = {"first": (n,), "second": (m,), "third": (n,), "square": (n, n), "wide": (m, n), "back": (n, m)}
    return OneOp(table(n) | shapes, m, body)


@case
def layer_norms(rng: random.Random) -> OneOp:
    n = width_of(rng)
    bias = rng.random() < 0.5

    def body(ops: Any, w: Any, x: Any, batch: Any) -> Any:
        return ops.layer_norm(ops.scale(x, 1.5), w["weight"], w["bias"] if bias else None, 1e-5)

    return OneOp(table(n) | {"weight": (n,)} | ({"bias": (n,)} if bias else {}), n, body)


@case
def products(rng: random.Random) -> OneOp:
    """Several matrices of one input, biases, sums, a soft cap."""
    n, sizes = width_of(rng), [width_of(rng) for _ in range(6)]
    shapes: Shapes = {}
    for i, size in enumerate(sizes):
        shapes |= {f"w{i}": (size, n), f"b{i}": (size,), f"back{i}": (n, size)}

    def body(ops: Any, w: Any, x: Any, batch: Any) -> Any:
        outs = [ops.linear(x, w[f"w{i}"], w[f"b{i}"] if i % 2 else None) for i in range(len(sizes))]
        for i, out in enumerate(outs):
            x = ops.add(x, ops.linear(out, w[f"back{i}"]))
        return ops.scale(x, 0.3)

    return OneOp(table(n) | shapes, n, body, soft_cap=rng.choice([0.0, 2.0]))


@case
def activations(rng: random.Random) -> OneOp:
    """Gated activations as the epilogue of a pair of matrices, with biases or without, and by themselves."""
    n, m, kind = width_of(rng), width_of(rng), rng.choice(["silu", "gelu_tanh"])
    bias = rng.random() < 0.5

    def body(ops: Any, w: Any, x: Any, batch: Any) -> Any:
        gate, up = (ops.linear(x, w[name], w[f"{name} bias"] if bias else None) for name in ("gate", "up"))
        y = ops.linear(ops.gated_activation(gate, up, kind=kind), w["down"])
        return ops.gated_activation(y, ops.add(x, y), kind=kind)

    shapes: Shapes = {"gate": (m, n), "up": (m, n), "down": (n, m)}
    return OneOp(table(n) | shapes | ({"gate bias": (m,), "up bias": (m,)} if bias else {}), n, body)


@case
def mixtures(rng: random.Random) -> OneOp:
    n, m, count = width_of(rng), width_of(rng), rng.randint(1, 9)
    top_k, normalize, kind = rng.randint(1, count), rng.random() < 0.5, rng.choice(["silu", "gelu_tanh"])
    shapes: Shapes = {f"{name} {e}": (m, n) for name in ("gate", "up") for e in range(count)}
    shapes |= {f"down {e}": (n, m) for e in range(count)} | {"router": (count, n), "norm": (n,)}

    def body(ops: Any, w: Any, x: Any, batch: Any) -> Any:
        y, s = ops.rms_norm(x, w["norm"], 1e-5)
        experts = ([w[f"{name} {e}"] for e in range(count)] for name in ("gate", "up", "down"))
        mixed = ops.moe(y, w["router"], *experts, top_k=top_k, normalize=normalize, kind=kind)
        return ops.rms_norm(s, w["norm"], 1e-5, residual=mixed)[0]

    return OneOp(table(n) | shapes, n, body)


@case
def attention(rng: random.Random) -> OneOp:
    """Head norms, rotation (of a part of a head, too), pages, windows, soft caps, sinks; two groups of pages."""
    heads, group, dim = rng.randint(1, 3), rng.randint(1, 4), rng.choice([4, 16, 24, 40, 64, 80, 128])
    n, windows = width_of(rng), rng.choice([(0,), (0, 9), (33,), (20, 70)])
    normed, capped, sunk = rng.random() < 0.5, rng.choice([0.0, 2.0]), rng.random() < 0.5
    ropes = [RopeTable(tuple(100.0 ** (-2 * j / dim) for j in range(pairs)), 1.0) for pairs in (dim // 2, dim // 4)]
    shapes: Shapes = {"q": (heads * group * dim, n), "k": (heads * dim, n), "v": (heads * dim, n)}
    shapes |= {"o": (n, heads * group * dim), "q norm": (dim,), "k norm": (dim,), "sinks": (heads * group,)}

    def body(ops: Any, w: Any, x: Any, batch: Any) -> Any:
        for layer, window in enumerate(windows):
            q, k, v = (ops.linear(x, w[name]) for name in "qkv")
            if normed:
                q, k = (ops.qk_norm(y, w[f"{name} norm"], 1e-6, head_dim=dim) for y, name in ((q, "q"), (k, "k")))
            q, k = ops.rope(q, k, batch, rope=ropes[layer], head_dim=dim)
            ops.write_kv(k, v, batch, layer=layer)
            options = {"scale": dim**-0.5, "window": window, "soft_cap": capped, "sinks": w["sinks"] if sunk else None}
            x = ops.add(x, ops.linear(ops.attention(q, batch, layer=layer, head_dim=dim, **options), w["o"]))
        return x

    return OneOp(table(n) | shapes, n, body, windows, (heads, dim))


def draw(shape: tuple[int, ...], rng: np.random.RandomState) -> Any:
    """Weights that keep activations about one."""
    noise = rng.standard_normal(shape) * (1.0 if len(shape) == 1 else shape[1] ** -0.5)
    return (noise * 0.3 + 1 if len(shape) == 1 else noise).astype(np.float32)


def ragged(rng: random.Random) -> tuple[list[list[int]], list[list[int]]]:
    """Some sequences, each cut into steps of its own: one token, a few, all at once."""
    lengths = [rng.choice([1, 2, rng.randint(3, 60), rng.randint(60, 140)]) for _ in range(rng.randint(1, 5))]
    cuts = []
    for length in lengths:
        sizes: list[int] = []
        while sum(sizes) < length:
            sizes.append(min(length - sum(sizes), rng.choice([1, rng.randint(1, 9), length])))
        cuts.append(sizes)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths], cuts


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", OPS)
def test_every_op_in_its_place(name: str, isa: str) -> None:
    for seed in range(4):
        rng, numbers = random.Random(f"{name} {seed}"), np.random.RandomState(seed)
        model, oracle = OPS[name](rng), create_backend("numpy")
        weights = {weight: draw(shape, numbers) for weight, shape in model.weight_shapes().items()}
        if seed % 2 and "router" in weights:
            weights["router"][::2] = 0  # experts that tie: the first of them are taken
        backend = NativeBackend(isa, 1 + seed)
        native = NativeModel(backend, model, FormatPlan("fp32"), "fp32")
        native.limits = StepLimits(1024, 8, 256)
        native.load(weights.__getitem__)
        exact = Loaded(oracle, model, {weight: oracle.weight(weight, values) for weight, values in weights.items()})
        sequences, cuts = ragged(rng)
        sizes = {"page_size": rng.choice([16, 32, 64]), "seed": seed}
        for (here, _), (there, _) in zip(
            batches(Loaded(backend, native, {}), sequences, cuts, **sizes),
            batches(exact, sequences, cuts, **sizes),
            strict=True,
        ):
            found, want = (np.array(forward(*pair)) for pair in ((Loaded(backend, native, {}), here), (exact, there)))
            assert found.shape == want.shape and np.isfinite(want).all()
            assert np.abs(found - want).max() <= 2e-5 * max(1.0, np.abs(want).max()), (seed, sizes)


# ---- integers


@dataclass
class OneProduct:
    """Rows of a table times one matrix."""

    rows: int
    inputs: int
    outputs: int

    @property
    def config(self) -> Any:
        return SimpleNamespace(vocab_size=max(self.rows, self.outputs))

    def weight_shapes(self) -> Shapes:
        vocab = self.config.vocab_size
        return {"table": (vocab, self.inputs), "matrix": (vocab, self.inputs)}

    def kv_groups(self, dtype: str = "fp32") -> Any:
        return make_kv_groups((0,), 1, 16, 16, dtype)

    def forward(self, ops: Any, w: Any, batch: Any) -> Any:
        return ops.logits(ops.select_rows(ops.embed(batch.token_ids, w["table"]), batch), w["matrix"])


def integers(rng: np.random.RandomState, rows: int, columns: int, least: int, most: int, extreme: bool) -> Any:
    """Numbers of a range; extreme ones lie at its ends alone."""
    if extreme:
        return rng.choice([least, most], (rows, columns))
    return rng.randint(least, most + 1, (rows, columns))


SIZES = ((1, 64, 70), (3, 200, 130), (37, 330, 64), (70, 128, 65), (129, 640, 17))  # rows, inputs, outputs


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", [name for name, operands in OPERANDS.items() if operands.sums == "int32"])
def test_integers_are_multiplied_exactly(kind: str, isa: str) -> None:
    """Scales of one, and rows whose largest number is 127 in every group: sums are whole numbers, and all are right.

    Extreme codes would show a product of 8 bits that saturates before it is summed.
    """
    bits = OPERANDS[kind].code_bits
    for seed, (rows, inputs, outputs) in enumerate(SIZES):
        rng = np.random.RandomState(seed)
        model = OneProduct(rows, inputs, outputs)
        vocab, group = model.config.vocab_size, OPERANDS[kind].group or inputs
        x = integers(rng, vocab, inputs, -127, 127, extreme=seed % 2 == 0)
        x[:, ::group] = 127
        x[:, ::group] *= rng.choice([-1, 1], x[:, ::group].shape)
        least, most = (0, 15) if bits == 4 else (-128, 127)
        codes = integers(rng, vocab, inputs, least, most, extreme=seed % 3 == 0)
        groups = -(-inputs // group)
        offsets = rng.randint(-15, 1, (vocab, groups)) * (bits == 4)
        tables = (np.ones((vocab, groups), np.float32), offsets.astype(np.float32))
        stored = GroupCodes(bits, group, codes.astype(np.uint8 if bits == 4 else np.int8), *tables)
        found = product(model, kind, isa, x.astype(np.float32), stored, threads=1 + seed % 4)
        matrix = codes + offsets.repeat(group, axis=1)[:, :inputs]
        want = x[:rows].astype(np.int64) @ matrix.astype(np.int64).T
        assert np.array_equal(found, want), (seed, np.argwhere(found != want)[:3])


def product(model: OneProduct, kind: str, isa: str, x: Any, stored: GroupCodes, threads: int) -> Any:
    """The rows of x times the stored matrix, in one step."""
    backend = NativeBackend(isa, threads)
    native = NativeModel(backend, model, FormatPlan(kind, {"table": "fp32", "matrix": kind}), "fp32")
    native.load({"table": x}.__getitem__, {"matrix": stored}.get)
    kv = backend.allocate_kv(8, 64, native.kv_groups())
    ids: Sequence[int] = range(model.rows)
    pages = [list(range(-(-model.rows // 64)))]
    batch = backend.batch(ids, ids, [model.rows], [pages], kv, logit_rows=ids)
    return np.array(native.forward(backend, {}, batch)).astype(np.float64)
