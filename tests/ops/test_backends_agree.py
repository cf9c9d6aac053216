"""Every op in use, on every backend, over random ragged steps: the reference is right, the others must agree with it.

Integers, Philox and the Gumbel function agree exactly (test_noise.py has the latter two), floats to TOLERANCE.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from op_cases import WINDOW, Scene, matrix

from octavo.backends import BACKENDS, create_backend
from octavo.backends.host_pages import HostPages
from octavo.backends.ops import OPS, PoolSpan, RopeTable, SamplingRow
from octavo.backends.quantization import QuantConfig, quantize
from octavo.backends.random import round32
from octavo.core.batch import TokenLogprobs
from octavo.core.errors import CorruptPages
from octavo.core.kv_eviction import H2O, SnapKV
from octavo.core.kv_groups import KVGroup
from octavo.core.params import POOLINGS, SamplingParams

TOLERANCE = 2e-5  # |a - b| <= TOLERANCE * (1 + |a|)
SEEDS = range(12)

Run = Callable[[Any], Any]  # backend -> a result in plain values
Comparison = Callable[[random.Random], Run]
COMPARISONS: dict[str, Comparison] = {}


def compares(comparison: Comparison) -> Comparison:
    COMPARISONS[comparison.__name__] = comparison
    return comparison


def close(a: Any, b: Any, where: str = "") -> None:
    """Equal structure; ints and ids exactly, floats to the tolerance."""
    if isinstance(a, TokenLogprobs):
        a, b = vars(a), vars(b)
    if isinstance(a, dict):
        a, b = list(a.items()), list(b.items())
    if isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            close(x, y, f"{where}[{i}]")
    elif isinstance(a, float):
        assert a == b or abs(a - b) <= TOLERANCE * (1.0 + abs(a)), (where, a, b)
    else:
        assert a == b, where


@pytest.mark.parametrize("name", [name for name, spec in OPS.items() if spec.used])
def test_every_used_op_agrees_on_every_backend(name: str) -> None:
    for seed in SEEDS:
        run = COMPARISONS[name](random.Random(f"{name} {seed}"))
        expected, *others = (run(create_backend(backend)) for backend in BACKENDS)
        for other in others:
            close(expected, other, f"{name} seed {seed} ")


@compares
def pool(rng: random.Random) -> Run:
    """Ragged sequences, each in chunks: a step pools one chunk of some of them."""
    width, lengths = rng.randint(1, 24), [rng.randint(1, 30) for _ in range(rng.randint(1, 5))]
    kinds = [rng.choice(POOLINGS) for _ in lengths]
    states = [matrix(rng, length, width) for length in lengths]
    cuts = [sorted({0, length, *(rng.randrange(1, length + 1) for _ in range(3))}) for length in lengths]

    def run(b: Any) -> Any:
        found: list[Any] = [None] * len(lengths)
        for turn in range(4):
            going = [i for i, cut in enumerate(cuts) if turn + 1 < len(cut)]
            rows, spans = [], []
            for i in going:
                begin, (start, stop) = len(rows), cuts[i][turn : turn + 2]
                rows += states[i][start:stop]
                spans.append(PoolSpan(begin, len(rows), kinds[i], found[i]))
            for i, vector in zip(going, b.pool(b.weight("x", rows), spans) if going else (), strict=True):
                found[i] = vector
        whole = b.pool(b.weight("x", list(itertools.chain(*states))), _whole_spans(kinds, lengths))
        assert [list(map(float, v)) for v in found] == [list(map(float, v)) for v in whole]
        return [list(map(float, v)) for v in whole]

    return run


def _whole_spans(kinds: list[str], lengths: list[int]) -> list[PoolSpan]:
    stops = list(itertools.accumulate(lengths))
    return [PoolSpan(stop - n, stop, kind) for kind, n, stop in zip(kinds, lengths, stops, strict=True)]


def handles(backend: Any, *values: Any) -> list[Any]:
    return [None if v is None else backend.weight("w", v) for v in values]


def sizes(rng: random.Random) -> tuple[int, int, int]:
    return rng.randint(1, 40), rng.choice([4, 16, 24]), rng.randint(1, 30)


def maybe_quantized(rng: random.Random, rows: int, columns: int) -> Any:
    values = matrix(rng, rows, columns)
    if rng.random() < 0.5:
        return values
    return quantize(values, QuantConfig(rng.choice([4, 8]), rng.choice([16, 32]), rng.random() < 0.5))


@compares
def embed(rng: random.Random) -> Run:
    tokens, width, vocab = sizes(rng)
    table, ids = maybe_quantized(rng, vocab, width), [rng.randrange(vocab) for _ in range(tokens)]
    return lambda b: b.to_lists(b.embed(ids, b.weight("w", table)))


@compares
def rms_norm(rng: random.Random) -> Run:
    tokens, width, _ = sizes(rng)
    x, weight = matrix(rng, tokens, width), matrix(rng, 1, width)[0]
    residual = matrix(rng, tokens, width) if rng.random() < 0.5 else None

    def run(b: Any) -> Any:
        x_, weight_, residual_ = handles(b, x, weight, residual)
        return [b.to_lists(part) for part in b.rms_norm(x_, weight_, 1e-5, residual=residual_)]

    return run


@compares
def layer_norm(rng: random.Random) -> Run:
    tokens, width, _ = sizes(rng)
    x, weight, bias = matrix(rng, tokens, width), matrix(rng, 1, width)[0], rng.choice([None, matrix(rng, 1, width)[0]])
    return lambda b: b.to_lists(b.layer_norm(*handles(b, x, weight, bias), 1e-5))


@compares
def linear(rng: random.Random) -> Run:
    tokens, width, out = sizes(rng)
    x, weight, bias = matrix(rng, tokens, width), maybe_quantized(rng, out, width), matrix(rng, 1, out)[0]
    given = (x, weight, bias) if rng.random() < 0.5 else (x, weight)
    return lambda b: b.to_lists(b.linear(*handles(b, *given)))


@compares
def qk_norm(rng: random.Random) -> Run:
    x, weight = matrix(rng, rng.randint(1, 9), 24), matrix(rng, 1, 8)[0]
    return lambda b: b.to_lists(b.qk_norm(*handles(b, x, weight), 1e-6, head_dim=8))


@compares
def gated_activation(rng: random.Random) -> Run:
    tokens, width, _ = sizes(rng)
    gate, up = matrix(rng, tokens, width, 30.0), matrix(rng, tokens, width)
    gate[0][:2] = [-1e4, 1e4]
    kind = rng.choice(["silu", "gelu_tanh"])
    return lambda b: b.to_lists(b.gated_activation(*handles(b, gate, up), kind=kind))


@compares
def moe(rng: random.Random) -> Run:
    tokens, width, inner, experts = rng.randint(1, 12), 8, 12, rng.randint(2, 6)
    x, router = matrix(rng, tokens, width), matrix(rng, experts, width)
    router[-1] = router[0]  # a tie: the lower id goes first
    gate, up = ([matrix(rng, inner, width) for _ in range(experts)] for _ in range(2))
    down = [matrix(rng, width, inner) for _ in range(experts)]
    top_k, normalize, kind = rng.randint(1, experts), rng.random() < 0.5, rng.choice(["silu", "gelu_tanh"])

    def run(b: Any) -> Any:
        banks = ([b.weight("w", expert) for expert in bank] for bank in (gate, up, down))
        return b.to_lists(b.moe(*handles(b, x, router), *banks, top_k=top_k, normalize=normalize, kind=kind))

    return run


@compares
def add(rng: random.Random) -> Run:
    x, y = matrix(rng, 5, 7), matrix(rng, 5, 7)
    return lambda b: b.to_lists(b.add(*handles(b, x, y)))


@compares
def scale(rng: random.Random) -> Run:
    x, s = matrix(rng, 5, 7), rng.gauss(0.0, 3.0)
    return lambda b: b.to_lists(b.scale(*handles(b, x), s))


@compares
def select_rows(rng: random.Random) -> Run:
    scene = Scene.draw(rng)
    x = matrix(rng, scene.num_tokens, 5)
    rows = rng.choice([None, [rng.randrange(scene.num_tokens) for _ in range(rng.randint(0, 5))]])

    def run(b: Any) -> Any:
        batch = scene.batch(b, scene.pool(b), logit_rows=rows)
        return b.to_lists(b.select_rows(*handles(b, x), batch))

    return run


@compares
def logits(rng: random.Random) -> Run:
    tokens, width, vocab = sizes(rng)
    x, weight, cap = matrix(rng, tokens, width), maybe_quantized(rng, vocab, width), rng.choice([0.0, 3.0])
    return lambda b: b.to_lists(b.logits(*handles(b, x, weight), soft_cap=cap))


@compares
def rope(rng: random.Random) -> Run:
    scene = Scene.draw(rng, longest=300)
    rotary = rng.choice([scene.dim, 2])
    table = RopeTable(tuple(rng.random() for _ in range(rotary // 2)), rotary, rng.choice([1.0, 1.3]))
    q = matrix(rng, scene.num_tokens, scene.heads * scene.dim)
    k = matrix(rng, scene.num_tokens, scene.kv_heads * scene.dim)

    def run(b: Any) -> Any:
        batch = scene.batch(b, scene.pool(b))
        return [b.to_lists(part) for part in b.rope(*handles(b, q, k), batch, rope=table, head_dim=scene.dim)]

    return run


@compares
def write_kv(rng: random.Random) -> Run:
    scene = Scene.draw(rng)
    k, v = (matrix(rng, scene.num_tokens, scene.kv_heads * scene.dim) for _ in range(2))
    silent = [length > 0 and rng.random() < 0.3 for length in scene.lengths]

    def run(b: Any) -> Any:
        pool = scene.pool(b)
        batch = scene.batch(b, pool, no_write=silent)
        for layer in (0, 1):
            b.write_kv(*handles(b, k, v), batch, layer=layer)
        return [
            pool.read(*divmod(slot, scene.page_size)) for slots in batch.slot_mapping for slot in slots if slot >= 0
        ]

    return run


@compares
def attention(rng: random.Random) -> Run:
    scene = Scene.draw(rng, longest=rng.choice([12, 90, 560]))
    q = matrix(rng, scene.num_tokens, scene.heads * scene.dim)
    k, v = (matrix(rng, scene.num_tokens, scene.kv_heads * scene.dim) for _ in range(2))
    sinks, cap = rng.choice([None, matrix(rng, 1, scene.heads)[0]]), rng.choice([0.0, 2.0])
    scene.parents = scene.parents if len(scene.lengths) > 1 else [[]]

    def run(b: Any) -> Any:
        batch = scene.batch(b, scene.pool(b))
        q_, k_, v_, sinks_ = handles(b, q, k, v, sinks)
        out = []
        if len(scene.lengths) == 1:
            batch.mass = {}
            b.write_kv(k_, v_, batch, layer=0)
            b.attention(q_, batch, layer=0, scale=0.3, soft_cap=cap, head_dim=scene.dim)
            out.append(b.to_lists(batch.mass[0]))
            batch.mass = None
        for layer, window in ((0, 0), (1, WINDOW)):
            b.write_kv(k_, v_, batch, layer=layer)
            asked = {"layer": layer, "scale": 0.3, "window": window, "soft_cap": cap, "head_dim": scene.dim}
            out.append(b.to_lists(b.attention(q_, batch, sinks=sinks_, **asked)))
        return out

    return run


@compares
def compact(rng: random.Random) -> Run:
    """One sequence in one KV group of two layers; what stays lies in places 0, 1, ... of other pages, with its mass."""
    shape, page_size = {"num_kv_heads": 2, "k_dim": 3, "v_dim": 3}, rng.choice([1, 2, 4])
    window, count = rng.randint(1, 4), rng.randint(9, 40)
    policy = rng.choice([SnapKV(rng.randint(window, 9), window, rng.choice([1, 3, 5]), 4), H2O(3, window, block=4)])
    stays = count - policy.dropped(count)
    columns = [-(-n // page_size) for n in (count, stays)]
    pages = rng.sample(range(sum(columns) + 3), sum(columns))
    tokens = matrix(rng, 2 * count, 2 * 2 * 3)
    mass = {layer: matrix(rng, 2, count) for layer in (0, 1)}
    known = rng.choice([0, count - 4, count])
    before = {layer: matrix(rng, 2, known) for layer in (0, 1)} if known else None

    def run(b: Any) -> Any:
        pool = b.allocate_kv(sum(columns) + 3, page_size, (KVGroup((0, 1), **shape),))
        for place in range(count):
            pool.write(pages[place // page_size], place % page_size, tokens[2 * place], tokens[2 * place + 1])
        was = [pool.read(page, 0) for page in pages[: columns[0]]]
        sources, targets = pages[: columns[0]], pages[columns[0] :]
        given = {at: b.weight("mass", each) for at, each in mass.items()}
        carried = before and {at: b.weight("mass", each) for at, each in before.items()}
        scores = b.compact(pool, sources, (), given, policy, carried)
        stay = b.compact(pool, sources, targets, given, policy, carried)
        assert [pool.read(page, 0) for page in sources] == was
        found = [pool.read(targets[place // page_size], place % page_size) for place in range(stays)]
        for layer, head in itertools.product((0, 1), (0, 1)):
            kept = policy.kept(b.to_lists(scores[layer])[head])
            assert b.to_lists(stay[layer])[head] == [b.to_lists(scores[layer])[head][at] for at in kept]
            part = slice(6 * layer + 3 * head, 6 * layer + 3 * head + 3)
            for half in (0, 1):
                assert [each[half][part] for each in found] == [tokens[2 * at + half][part] for at in kept]
        return [found, [b.to_lists(scores[layer]) for layer in (0, 1)]]

    return run


@compares
def copy_pages(rng: random.Random) -> Run:
    return moves(rng, by_page=True)


@compares
def move_slots(rng: random.Random) -> Run:
    return moves(rng, by_page=False)


@compares
def swap_out(rng: random.Random) -> Run:
    return swaps(rng, restores=False)


@compares
def swap_in(rng: random.Random) -> Run:
    return swaps(rng, restores=True)


def swaps(rng: random.Random, restores: bool) -> Run:
    """Pages go to host memory, are overwritten, and come back into other pages."""
    scene = Scene.draw(rng)
    scene.lengths = [max(1, length) for length in scene.lengths]
    scene.history = [matrix(rng, 2 * sum(scene.lengths), scene.kv_heads * scene.dim) for _ in range(2)]
    source = scene.tables[0][0][0]
    used = {page for table in scene.tables for row in table for page in row}
    target = next(page for page in range(scene.num_pages) if page not in used)

    def run(b: Any) -> Any:
        pool = scene.pool(b)
        host = HostPages(3, pool.stored_bytes)
        before = pool.read(source, 0)
        b.swap_out(pool, host, [(source, 2)])
        zeros = [0.0] * (scene.kv_heads * scene.dim)
        pool.write(source, 0, zeros, zeros)
        if not restores:
            return [before, pool.read(source, 0), host.is_sound(2), host.is_sound(1)]
        b.swap_in(pool, host, [(2, target), (2, source)])
        host.view(2)[0] ^= 1
        with pytest.raises(CorruptPages) as caught:
            b.swap_in(pool, host, [(2, target)])
        assert caught.value.pages == (2,)
        assert pool.read(source, 0) == before == pool.read(target, 0)
        return before

    return run


def moves(rng: random.Random, by_page: bool) -> Run:
    scene = Scene.draw(rng)
    scene.lengths = [max(1, length) for length in scene.lengths]
    scene.history = [matrix(rng, 2 * sum(scene.lengths), scene.kv_heads * scene.dim) for _ in range(2)]
    size, source = scene.page_size, scene.tables[0][0][0]
    used = {page for table in scene.tables for row in table for page in row}
    target = next(page for page in range(scene.num_pages) if page not in used)

    def run(b: Any) -> Any:
        pool = scene.pool(b)
        if by_page:
            b.copy_pages(pool, [(source, target)])
        else:
            b.move_slots(pool, [(source * size, target * size)])
        zeros = [0.0] * (scene.kv_heads * scene.dim)
        pool.write(source, 0, zeros, zeros)  # the copy does not follow its source
        return [pool.read(page, 0) for page in (source, target)]

    return run


def sampling_rows(rng: random.Random, count: int, vocab: int) -> list[SamplingRow]:
    """Rows that differ in every parameter."""
    rows = []
    for index in range(count):
        ids = rng.sample(range(vocab), 6)
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.3, 1.0, 2.5]),
            top_k=rng.choice([0, -1, 1, 5, vocab]),
            top_p=rng.choice([1.0, 0.9, 0.3]),
            min_p=rng.choice([0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.7]),
            frequency_penalty=rng.choice([0.0, -0.4]),
            logit_bias=rng.choice([{}, {ids[0]: 5.0, ids[1]: -100.0}]),
            allowed_token_ids=rng.choice([None, tuple(range(0, vocab, 2))]),
            banned_token_ids=rng.choice([(), (ids[2],)]),
        )
        mask = rng.choice([None, bytes(rng.choice([255, 0b01010111]) for _ in range(vocab // 8))])
        rows.append(
            SamplingRow(
                params, rng.getrandbits(64), index, rng.randrange(99), {ids[3]: 2}, {ids[4]: 3, ids[3]: 1},
                rng.choice([(), (ids[5],)]), mask,
            )
        )  # fmt: skip
    return rows


@compares
def process_logits(rng: random.Random) -> Run:
    vocab = rng.choice([16, 40])
    x, rows = matrix(rng, 4, vocab, 3.0), sampling_rows(rng, 4, vocab)
    return lambda b: b.to_lists(b.process_logits(*handles(b, x), rows))


@compares
def sample(rng: random.Random) -> Run:
    vocab = rng.choice([16, 40, 1500])
    count = 2 if vocab == 1500 else 12
    x, rows = matrix(rng, count, vocab, 2.0), sampling_rows(rng, count, vocab)
    x[0] = [round32(round(v)) for v in x[0]]  # many ties
    return lambda b: b.sample(b.process_logits(*handles(b, x), rows), rows)


@compares
def logprobs(rng: random.Random) -> Run:
    vocab = rng.choice([16, 40])
    x = [[float(round(v)) for v in row] for row in matrix(rng, 5, vocab, 4.0)]
    ids, k = [rng.randrange(vocab) for _ in x], [rng.choice([0, 1, 7, vocab + 3]) for _ in x]
    chosen = [tuple(rng.sample(range(vocab), 2)) for _ in x]
    return lambda b: b.logprobs(*handles(b, x), ids, k, chosen)
