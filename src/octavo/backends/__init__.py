"""The ops and who runs them: `reference` (standard library, the oracle), `numpy`, and `native` (compiled programs).

`null` runs nothing: it is for measuring all the rest, and only who names it gets it.

A backend is looked up by name and imported only then, so that this package stays free of third-party imports.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["BACKENDS", "COMPILED", "available_backends", "create_backend"]

# name -> (module:class, third-party modules it needs); backends whose methods are the ops
BACKENDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "reference": ("octavo.backends.reference:ReferenceBackend", ()),
    "numpy": ("octavo.backends.numpy_backend:NumpyBackend", ("numpy",)),
}

# backends that run whole models: captured, lowered, packed
COMPILED: dict[str, tuple[str, tuple[str, ...]]] = {
    "native": ("octavo.backends.native_backend:NativeBackend", ("numpy",)),
}

STAND_INS: dict[str, tuple[str, tuple[str, ...]]] = {"null": ("octavo.backends.null_backend:NullBackend", ())}


def available_backends() -> tuple[str, ...]:
    """Names of the backends whose requirements are installed, slowest first."""
    return tuple(name for name, (_, needs) in (BACKENDS | COMPILED).items() if _installed(name, needs))


def _installed(name: str, needs: tuple[str, ...]) -> bool:
    if not all(importlib.util.find_spec(module) for module in needs):
        return False
    if name not in COMPILED:
        return True
    from octavo.backends.native_lib import BackendUnavailable, library

    try:
        library()
    except BackendUnavailable:
        return False
    return True


def create_backend(name: str, **options: Any) -> Any:
    """A new backend by name; `auto` takes the fastest available. `options` (isa, threads) are for compiled ones.

    Raises InvalidInput for an unknown name (with the nearest known one) or a missing requirement.
    """
    if name == "auto":
        name = available_backends()[-1]
        if name == "numpy":
            from octavo.backends.native_build import mention_once

            mention_once()
    known = BACKENDS | COMPILED
    if name not in known and name not in STAND_INS:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InvalidInput("backend", name, f"{hint}known: {', '.join(known)} or auto")
    path, needs = (known | STAND_INS)[name]
    for module in needs:
        if importlib.util.find_spec(module) is None:
            raise InvalidInput("backend", name, f"it needs the package {module}: pip install {module}")
    module_name, _, class_name = path.partition(":")
    made = getattr(importlib.import_module(module_name), class_name)
    return made() if name in BACKENDS else made(**options)
