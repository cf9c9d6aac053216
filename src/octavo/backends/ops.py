"""The op table: every op of a forward pass and of sampling, declared once as data, and the values they share.

A backend is a class whose methods carry these names. Rows of all sequences are concatenated; no op infers meaning
from a shape. Dimensions, everywhere:

    T token rows of the step     S sequences            R rows that need logits      G KV groups
    H hidden size                V vocabulary           I intermediate size          E experts
    Q = query heads * head_dim   KV = kv heads * head_dim   D head_dim
    K, N inner and outer size of a product                  nH query heads
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.core.errors import InvalidInput, InvariantBroken
from octavo.core.params import SamplingParams

ATTENTION_BLOCK = 64  # absolute positions per softmax block
ATTENTION_CHUNK = 512  # absolute positions per chunk; chunks are combined in ascending order
NO_SLOT = -1  # in slot_mapping: write nothing; in page_table: a freed page
NO_ADAPTER = -1  # a row that has none


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of an op: dimensions by name, dtype (float, int, weight, batch, object), meaning."""

    name: str
    dims: tuple[str, ...]
    dtype: str = "float"
    meaning: str = ""
    optional: bool = False


@dataclass(frozen=True)
class OpSpec:
    """One op. `used`: some forward pass or sampler calls it now, so every backend has it and is compared on it.

    `tensor` says that the op belongs to a captured program; the others run outside of it (sampling, page moves).
    """

    name: str
    doc: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    attrs: tuple[str, ...] = ()
    used: bool = True
    tensor: bool = True


@dataclass(frozen=True)
class RopeTable:
    """Rotary frequencies, resolved once from the configured length (models/rope.py), never from the current one.

    Pair i of a head, (x[i], x[i + rotary_dim / 2]), turns by `position * inv_freq[i]`; cosine and sine are multiplied
    by `attention_factor`; dimensions from `rotary_dim` on pass through.
    """

    inv_freq: tuple[float, ...]  # rotary_dim / 2, radians per position
    rotary_dim: int
    attention_factor: float = 1.0


@dataclass(frozen=True)
class SamplingRow:
    """What one row of logits needs to become a token: parameters, noise coordinates, counts."""

    params: SamplingParams
    seed: int  # 64 bits are used
    choice: int = 0
    output_index: int = 0  # index of the output token being chosen
    prompt_counts: Mapping[int, int] = field(default_factory=dict)
    output_counts: Mapping[int, int] = field(default_factory=dict)
    banned_now: tuple[int, ...] = ()  # eos and stop ids while output_index < min_tokens, and what history.py bans
    grammar_mask: bytes | None = None  # bit (id & 7) of byte (id >> 3) set: allowed; ids past its end are banned
    purpose: int = 0  # 0: the token itself; other noise streams of the same token take other numbers
    penalties: Mapping[int, float] = field(default_factory=dict)  # what logits lose besides: history.py
    mu: float = 0.0  # bits of surprise that mirostat allows
    guess: int | None = None  # the residual verifier's draft in the token's place, -1: none; None: another draws


@dataclass(frozen=True)
class PoolSpan:
    """Rows [first, stop) of the states, at least one: consecutive tokens of one sequence that becomes one vector."""

    first: int
    stop: int
    kind: str  # last, mean or cls (the first token's)
    carried: Any = None  # what `pool` gave for the tokens before them; None: there are none


@dataclass(frozen=True)
class RowAdapters:
    """The low-rank adapters of one projection in a step: row t adds scale * (x A^T) B^T of its adapter (LoRA, Hu et
    al., 2021). A row whose place is not among the factors adds nothing.
    """

    rows: Sequence[int]  # [T] the place of each row's adapter, or NO_ADAPTER
    factors: Mapping[int, tuple[Any, Any, float]]  # place -> A [r, K], B [N, r], scale


@dataclass
class ForwardBatch:
    """One step as arrays, in the backend's own types (plain lists on `reference`). Made by `Backend.batch`."""

    token_ids: Any  # [T]
    positions: Any  # [T] absolute
    cu_seqlens_q: Any  # [S + 1] row r owns tokens cu[r] .. cu[r + 1]
    seq_lens: Any  # [S] tokens with K/V after this step's writes
    page_table: Any  # [G][S][*] page of position p: entry p // page_size; NO_SLOT: freed, behind the window
    slot_mapping: Any  # [G][T] page * page_size + offset, or NO_SLOT
    logit_rows: Any  # [R] any token rows, in the order of the logits
    kv: Any  # the backend's KVPool
    request_ids: tuple[str, ...] = ()  # [S] for the access log
    parent_rows: Any = ()  # [S] tree rows: the row of its sequence that each follows (-1: the history); (): chains
    sampling: tuple[SamplingRow, ...] = ()  # [R] draws that a backend may make during the step; (): none
    draws: Any = None  # [R] the same as a backend's own records, for its `draw`
    adapters: Mapping[str, RowAdapters] = field(default_factory=dict)  # by projection (a weight's name without .weight)
    rope_positions: Any = None  # [T] by which rows turn, where that is not `positions`: keys before them were left out
    mass: dict[int, Any] | None = None  # `attention` puts its mass there: by layer, [kv heads][keys]
    cache: dict[Any, Any] = field(default_factory=dict)  # what a backend computes once per step


def _spec(name: str, dims: str, dtype: str = "float", meaning: str = "", optional: bool = False) -> TensorSpec:
    return TensorSpec(name, tuple(dims.split()), dtype, meaning, optional)


def _weight(name: str, dims: str, meaning: str = "", optional: bool = False) -> TensorSpec:
    return _spec(name, dims, "weight", meaning, optional)


_X = _spec("x", "T H", meaning="rows of all sequences")
_BATCH = _spec("batch", "", "batch", "positions, page tables, slots of the step")
_LOGITS = _spec("logits", "R V")
_ROWS = _spec("rows", "R", "object", "SamplingRow of each row")
_KV_POOL = _spec("kv", "", "object", "KVPool")
_PAIRS = _spec("pairs", "* 2", "int", "(source, target)")
_HOST = _spec("host", "", "object", "HostPages")

_FORWARD = (
    OpSpec(
        "embed",
        "Row ids[t] of the table.",
        (_spec("ids", "T", "int", "token ids, 0 <= id < V"), _weight("table", "V H")),
        (_spec("y", "T H"),),
    ),
    OpSpec(
        "rms_norm",
        "s = x + residual (or x); y = s / sqrt(mean(s^2) + eps) * weight. Returns (y, s).",
        (_X, _weight("weight", "H"), _spec("residual", "T H", optional=True)),
        (_spec("y", "T H"), _spec("s", "T H", meaning="the new residual")),
        ("eps",),
    ),
    OpSpec(
        "layer_norm",
        "(x - mean) / sqrt(variance + eps) * weight + bias; the variance is the population's.",
        (_X, _weight("weight", "H"), _weight("bias", "H", optional=True)),
        (_spec("y", "T H"),),
        ("eps",),
    ),
    OpSpec(
        "linear",
        "x @ weight^T + bias, then + scale * (x A^T) B^T in rows that have an adapter. Dense or quantized weight. Rows "
        "without an adapter skip it: nothing adds zero.",
        (
            _spec("x", "T K"),
            _weight("weight", "N K"),
            _weight("bias", "N", optional=True),
            _spec("adapters", "", "object", "RowAdapters of this projection", optional=True),
        ),
        (_spec("y", "T N"),),
    ),
    OpSpec(
        "qk_norm",
        "rms_norm over each head of head_dim values, one weight for all heads.",
        (_spec("x", "T Q"), _weight("weight", "D")),
        (_spec("y", "T Q"),),
        ("eps", "head_dim"),
    ),
    OpSpec(
        "rope",
        "Half-rotation of every head by its token's absolute position: batch.rope_positions, where given. "
        "Returns (q, k).",
        (_spec("q", "T Q"), _spec("k", "T KV"), _BATCH),
        (_spec("q", "T Q"), _spec("k", "T KV")),
        ("rope", "head_dim"),
    ),
    OpSpec(
        "write_kv",
        "Stores each row's K and V of one layer at slot_mapping; NO_SLOT rows write nothing.",
        (_spec("k", "T KV"), _spec("v", "T KV"), _BATCH),
        (),
        ("layer",),
    ),
    OpSpec(
        "attention",
        "softmax(scale * q . k, soft-capped) . v over the pages of the row's sequence, positions (p - window, p], or "
        "all up to p with window 0. Blocks of 64 and chunks of 512 absolute positions, ascending, one running maximum. "
        "soft_cap c > 0: score = c * tanh(score / c). sinks: a logit per head that joins the denominator only. "
        "A tree row sees its ancestors at their absolute positions: bit for bit what it sees at the end of that chain. "
        "sink_tokens n, with a window: the first n tokens are seen as well, as near as sinks and window are long: for "
        "them q at p is turned back by max(0, p - (n + window - 1)) positions of `rope` (StreamingLLM). They are a "
        "block of their own, before all others. "
        "With batch.mass, of one chain, and no window: of each key the weights that the rows give it go there, summed "
        "over the rows and the query heads that share it, ascending.",
        (_spec("q", "T Q"), _BATCH, _weight("sinks", "nH", "extra logit per query head", optional=True)),
        (_spec("y", "T Q"),),
        ("layer", "scale", "window", "soft_cap", "head_dim", "sink_tokens", "rope"),
    ),
    OpSpec(
        "gated_activation",
        "act(gate) * up; kind silu: g / (1 + exp(-g)); gelu_tanh: the tanh form.",
        (_spec("gate", "T I"), _spec("up", "T I")),
        (_spec("y", "T I"),),
        ("kind",),
    ),
    OpSpec(
        "moe",
        "softmax of router logits over all experts, the top_k largest (ties: lower id), optionally renormalised; "
        "down(act(gate x) * up x) of each, combined in slot order.",
        (
            _X,
            _weight("router", "E H"),
            _weight("gate", "E I H", "list of E matrices"),
            _weight("up", "E I H", "list of E matrices"),
            _weight("down", "E H I", "list of E matrices"),
        ),
        (_spec("y", "T H"),),
        ("top_k", "normalize", "kind"),
    ),
    OpSpec("add", "x + y.", (_X, _spec("y", "T H")), (_spec("z", "T H"),)),
    OpSpec("scale", "x * s.", (_X,), (_spec("y", "T H"),), ("s",)),
    OpSpec("select_rows", "Rows batch.logit_rows of x.", (_X, _BATCH), (_spec("y", "R H"),)),
    OpSpec(
        "logits",
        "x @ weight^T, soft-capped as in attention.",
        (_spec("x", "R H"), _weight("weight", "V H")),
        (_spec("y", "R V"),),
        ("soft_cap",),
    ),
    OpSpec(
        "latent_attention",
        "Attention over a compressed K/V of one latent vector per token and layer.",
        (_spec("q", "T Q"), _BATCH),
        (_spec("y", "T Q"),),
        ("layer", "scale", "latent_dim", "rope_dim"),
        used=False,
    ),
    OpSpec(
        "scan",
        "Linear recurrence over a sequence's tokens; its state lives in a page of kind `state`.",
        (_X, _BATCH),
        (_spec("y", "T H"),),
        ("layer", "kind"),
        used=False,
    ),
    OpSpec("all_reduce", "Sum over ranks in rank order.", (_X,), (_spec("y", "T H"),), ("group",), used=False),
    OpSpec("all_gather", "Concatenation of all ranks' columns.", (_X,), (_spec("y", "T N"),), ("group",), used=False),
    OpSpec("send", "Rows to the next pipeline rank.", (_X,), (), ("rank",), used=False),
    OpSpec("recv", "Rows from the previous pipeline rank.", (_BATCH,), (_X,), ("rank",), used=False),
)

_SAMPLING = (
    OpSpec(
        "process_logits",
        "New logits after, in this order: logit bias; allowed, banned and (before min_tokens) end ids; grammar mask; "
        "repetition penalty (prompt and output), frequency and presence penalties (output), DRY. Banned: -inf. "
        "The input is not changed and is returned itself when no row asks for anything.",
        (_LOGITS, _ROWS),
        (_LOGITS,),
        tensor=False,
    ),
    OpSpec(
        "sample",
        "One id per row. Temperature 0: the largest logit. Otherwise candidates ordered (logit descending, id "
        "ascending) are cut by top_n_sigma, top_k, typical_p, top_p, min_p, XTC; the survivor with the largest "
        "(logit - max) / temperature + Gumbel(seed; choice, output index, id, purpose). "
        "Ties: the lowest id. RowError names rows with no finite candidate or a NaN (indices into `rows`).",
        (_LOGITS, _ROWS),
        (_spec("ids", "R", "int"),),
        tensor=False,
    ),
    OpSpec(
        "logprobs",
        "TokenLogprobs of each row from the raw logits (before process_logits): log-softmax of ids[r], its rank, the "
        "k[r] most likely (ties: lower id), and of the ids chosen[r].",
        (
            _LOGITS,
            _spec("ids", "R", "int", "the token of each row"),
            _spec("k", "R", "int", "how many most likely tokens, per row"),
            _spec("chosen", "R", "object", "further ids, per row"),
        ),
        (_spec("logprobs", "R", "object", "TokenLogprobs"),),
        tensor=False,
    ),
)

_POOLING = (
    OpSpec(
        "pool",
        "One vector for each span. last: its last row. cls: the first row of the sequence. mean: the sum of the rows, "
        "in float64 and in token order, whatever chunks they come in; whoever has the last one divides.",
        (_X, _spec("spans", "S", "object", "PoolSpan")),
        (_spec("y", "S H"),),
        tensor=False,
    ),
)

_PAGES = (
    OpSpec(
        "copy_pages",
        "All bytes of page source to page target, for each pair.",
        (_KV_POOL, _PAIRS),
        (),
        tensor=False,
    ),
    OpSpec(
        "move_slots",
        "K/V of slot source to slot target, all layers of their group, in order (accepted tree rows are compacted).",
        (_KV_POOL, _spec("moves", "* 2", "int", "(source, target)")),
        (),
        tensor=False,
    ),
    OpSpec(
        "compact",
        "Of the tokens in pages `sources` of a KV group, those that stay go to places 0, 1, ... of pages `targets`, "
        "for each layer and kv head by itself, as `policy.kept` says of their mass (without targets: all stay where "
        "they are). Returns the mass of those that stay, to which what they are given later is added.",
        (
            *(_KV_POOL, _spec("sources", "*", "int"), _spec("targets", "*", "int")),
            _spec("mass", "", "object", "of each layer, [kv heads][tokens]"),
            _spec("policy", "", "object", "SnapKV or H2O"),
            _spec("carried", "", "object", "the same of the first tokens, to be added to mass", optional=True),
        ),
        (_spec("mass", "", "object", "of each layer, [kv heads][tokens that stay]"),),
        tensor=False,
    ),
    OpSpec(
        "swap_out",
        "All bytes of page source into host page target, with their checksum, for each pair.",
        (_KV_POOL, _HOST, _PAIRS),
        (),
        tensor=False,
    ),
    OpSpec(
        "swap_in",
        "All bytes of host page source into page target, for each pair. CorruptPages names those that are not what was "
        "written there; then no page has changed.",
        (_KV_POOL, _HOST, _PAIRS),
        (),
        tensor=False,
    ),
)

OPS: dict[str, OpSpec] = {spec.name: spec for spec in (*_FORWARD, *_SAMPLING, *_POOLING, *_PAGES)}


def check_sinks(sink_tokens: int, window: int, rope: RopeTable, parent_rows: Sequence[Sequence[int]]) -> None:
    """Raises InvalidInput for sink tokens that `attention` does not define."""
    if not 0 < sink_tokens <= ATTENTION_BLOCK:
        raise InvalidInput("sink_tokens", sink_tokens, f"give 1 to {ATTENTION_BLOCK}: they are one block")
    if window < 1:
        raise InvalidInput("window", window, "sink tokens need a window behind them")
    if rope.attention_factor != 1.0:
        raise InvalidInput("rope", rope.attention_factor, "sink tokens need a rope that only turns: no yarn")
    if any(parent_rows):
        raise InvalidInput("parent_rows", parent_rows, "trees are not defined beside sink tokens: give chains")


def check_mass(window: int, batch: ForwardBatch) -> None:
    """Raises InvalidInput where the attention mass of a step is not defined."""
    if window or any(batch.parent_rows) or len(batch.seq_lens) != 1:
        raise InvalidInput("mass", window, "it is defined for one chain that sees all before it")


def batch_fields(
    token_ids: Sequence[int],
    positions: Sequence[int],
    query_lens: Sequence[int],
    page_table: Sequence[Sequence[Sequence[int]]],
    page_size: int,
    no_write: Sequence[bool] = (),
    parent_rows: Sequence[Sequence[int]] = (),
    shifts: Sequence[int] = (),
) -> dict[str, Any]:
    """The fields of a ForwardBatch that follow from the given ones, as plain lists. Arguments as in `Backend.batch`.

    Sequence s owns `query_lens[s]` rows, row i in the slot of its first position + i: a chain's rows at their
    positions, a tree's beside each other. The slots of a `no_write` sequence are NO_SLOT. `shifts[s]`: how much further
    than to their positions its rows turn.
    Raises InvariantBroken when a token would be written to a freed page, InvalidInput for what is no tree.
    """
    starts = [0]
    for length in query_lens:
        starts.append(starts[-1] + length)
    silent = list(no_write) or [False] * len(query_lens)
    for row, parents in enumerate(parent_rows):
        check_tree(positions[starts[row] : starts[row + 1]], parents)
    slots = []
    for pages in page_table:
        group: list[int] = []
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            places = range(positions[start], positions[start] + stop - start)
            group += _row_slots(places, pages[row], page_size, silent[row])
        slots.append(group)
    return {
        "token_ids": list(token_ids),
        "positions": list(positions),
        "cu_seqlens_q": starts,
        "seq_lens": [positions[start] + stop - start for start, stop in itertools.pairwise(starts)],
        "page_table": page_table,
        "slot_mapping": slots,
        "parent_rows": tuple(map(tuple, parent_rows)),
        "rope_positions": _turning(positions, starts, shifts) if any(shifts) else None,
    }


def _turning(positions: Sequence[int], starts: Sequence[int], shifts: Sequence[int]) -> list[int]:
    spans = zip(itertools.pairwise(starts), shifts, strict=True)
    return [position + shift for (start, stop), shift in spans for position in positions[start:stop]]


def check_tree(positions: Sequence[int], parents: Sequence[int]) -> None:
    """Raises InvalidInput unless each row follows an earlier one at its position + 1, or the history (-1)."""
    if parents and len(parents) != len(positions):
        raise InvalidInput("parent_rows", len(parents), f"give one for each of {len(positions)} rows, or none")
    for row, parent in enumerate(parents):
        if not -1 <= parent < row:
            raise InvalidInput("parent_rows", parent, f"row {row} follows an earlier one, or -1: the history")
        depth = positions[0] if parent < 0 else positions[parent] + 1
        if positions[row] != depth:
            raise InvalidInput("positions", positions[row], f"tree row {row} stands at {depth}")


def path_moves(first: int, path: Sequence[int], pages: Sequence[int], page_size: int) -> list[tuple[int, int]]:
    """What `move_slots` does to have an accepted path of tree rows in the slots of its positions, `first` and on: to be
    done in this order, before the next step. `pages`: the sequence's page table in one group.
    """
    places = ((first + row, first + depth) for depth, row in enumerate(path) if row != depth)
    slot = [pages[p // page_size] * page_size + p % page_size for pair in places for p in pair]
    return list(zip(slot[::2], slot[1::2], strict=True))


def _row_slots(positions: range, pages: Sequence[int], page_size: int, silent: bool) -> list[int]:
    if silent:
        return [NO_SLOT] * len(positions)
    slots = [pages[p // page_size] * page_size + p % page_size for p in positions]
    if min(slots) < 0:
        raise InvariantBroken(f"positions {positions[0]}..{positions[-1]} would be written to a freed page")
    return slots
