"""Sampling parameters that leave no law for each of several rows at once: what the residual verifier refuses."""

from __future__ import annotations

from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["check_params"]

_REFUSED = {
    "use_beam_search": "beams are not drawn",
}


def check_params(params: Any) -> None:
    """Raises InvalidInput, naming it, for a sampling parameter that leaves no law for each of several rows at once."""
    for name, why in _REFUSED.items():
        value = getattr(params, name, None)
        if value:
            raise InvalidInput(name, value, f"the residual verifier cannot do it ({why}); choose the exact verifier")
