"""How a model's hidden states become one vector for a text, unless a request says otherwise."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT", "Pooling"]


@dataclass(frozen=True)
class Pooling:
    """``kind``: of `octavo.core.params.POOLINGS`; ``normalize``: whether vectors have length 1."""

    kind: str = "last"  # a causal model's last token is the only one that has seen all of the text
    normalize: bool = True


DEFAULT = Pooling()
