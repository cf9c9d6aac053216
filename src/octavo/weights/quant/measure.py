"""What quantization costs a model: KL divergence and perplexity on a text, against the weights it came from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.capture import Program
from octavo.models.decoder import EMBEDDING, OUTPUT
from octavo.weights.quant.tapping import LazyWeights, hidden_states
from octavo.weights.quant.targets import Target

__all__ = ["Comparison", "compare", "round_inputs"]

Floats = NDArray[np.float32]
Read = Callable[[str], Floats]

_ROWS = 64  # positions whose logits exist at a time


@dataclass(frozen=True)
class Comparison:
    """Over the positions of a text: mean KL(before || after) in nats, its largest value, perplexities, and how often
    the most likely token stayed."""

    positions: int
    kl_mean: float
    kl_max: float
    perplexity_before: float
    perplexity_after: float
    same_top: float


def round_inputs(x: Floats, target: Target) -> Floats:
    """Activations as the target's kernel sees them: int8 with a scale for each row (and group), or bfloat16's 8 bits
    left alone. [T, K]."""
    if target.activation_bits != 8:
        return x
    rows, columns = x.shape
    size = target.group_size or columns
    padded = np.pad(x, ((0, 0), (0, -columns % size))).reshape(rows, -1, size)
    scales = np.abs(padded).max(axis=2, keepdims=True) / np.float32(127)
    scales[scales == 0] = 1
    return (np.rint(padded / scales) * scales).reshape(rows, -1)[:, :columns]


def compare(
    model: Any,
    program: Program,
    sequences: Sequence[Sequence[int]],
    before: Read,
    after: Read,
    target: Target,
    quantized: Collection[str],
) -> Comparison:
    """Run a text through both sets of weights; `after` with the inputs of `quantized` matrices rounded as the
    target's kernel rounds them.

    The output matrix is the one that was stored, in float32 on both sides.
    """
    shapes = model.weight_shapes()
    old = hidden_states(model, program, sequences, LazyWeights(shapes, before), lambda name, x: (x, before(name)))

    def rounded(name: str, x: Floats) -> tuple[Floats, Floats]:
        return (round_inputs(x, target) if name in quantized else x), after(name)

    new = hidden_states(model, program, sequences, LazyWeights(shapes, after), rounded)
    head = EMBEDDING if model.config.tie_word_embeddings else OUTPUT
    heads = before(head), after(head)
    cap = model.config.final_soft_cap
    nexts = np.array([token for ids in sequences for token in (*ids[1:], -1)])
    sums = [_rows(old[i : i + _ROWS], new[i : i + _ROWS], heads, cap, nexts[i : i + _ROWS]) for i in range(0, len(old), _ROWS)]  # fmt: skip  # noqa: E501
    kl, loss_before, loss_after, same = (np.concatenate(column) for column in zip(*sums, strict=True))
    return Comparison(
        positions=len(kl),
        kl_mean=float(kl.mean()),
        kl_max=float(kl.max()),
        perplexity_before=float(np.exp(loss_before.mean())),
        perplexity_after=float(np.exp(loss_after.mean())),
        same_top=float(same.mean()),
    )


def _rows(old: Floats, new: Floats, heads: tuple[Floats, Floats], cap: float, nexts: NDArray[Any]) -> Any:
    """(KL of each row, loss before and after of rows that have a next token, whether the top token stayed)."""
    p, q = (_log_softmax(x @ head.T, cap) for x, head in zip((old, new), heads, strict=True))
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    rows = np.flatnonzero(nexts >= 0)
    return kl, -p[rows, nexts[rows]], -q[rows, nexts[rows]], p.argmax(axis=1) == q.argmax(axis=1)


def _log_softmax(logits: Floats, cap: float) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    if cap:
        wide = cap * np.tanh(wide / cap)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
