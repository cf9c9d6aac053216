"""The ops and who runs them: `reference` (standard library, the oracle) and `numpy`.

A backend is looked up by name and imported only then, so that this package stays free of third-party imports.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["BACKENDS", "available_backends", "create_backend"]

# name -> (module:class, third-party modules it needs)
BACKENDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "reference": ("octavo.backends.reference:ReferenceBackend", ()),
    "numpy": ("octavo.backends.numpy_backend:NumpyBackend", ("numpy",)),
}


def available_backends() -> tuple[str, ...]:
    """Names of the backends whose requirements are installed, slowest first."""
    return tuple(
        name for name, (_, needs) in BACKENDS.items() if all(importlib.util.find_spec(module) for module in needs)
    )


def create_backend(name: str) -> Any:
    """A new backend by name; `auto` takes the fastest available.

    Raises InvalidInput for an unknown name (with the nearest known one) or a missing requirement.
    """
    if name == "auto":
        name = available_backends()[-1]
    if name not in BACKENDS:
        near = difflib.get_close_matches(name, BACKENDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InvalidInput("backend", name, f"{hint}known: {', '.join(BACKENDS)} or auto")
    path, needs = BACKENDS[name]
    for module in needs:
        if importlib.util.find_spec(module) is None:
            raise InvalidInput("backend", name, f"it needs the package {module}: pip install {module}")
    module_name, _, class_name = path.partition(":")
    return getattr(importlib.import_module(module_name), class_name)()
