"""The pooling that a model's files ask for: the modules of a sentence-transformers folder, or GGUF's pooling type."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.models.pooling import DEFAULT, Pooling
from octavo.weights.jsonfile import parse_json, read_json
from octavo.weights.tensors import CorruptFile, open_regular

__all__ = ["pooling_of_folder", "pooling_of_metadata"]

_MAX_BYTES = 64 << 10
_FOLDER = re.compile(r"[A-Za-z0-9_\-]{1,64}")
_MODES = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_FLAGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
_GGUF = {1: "mean", 2: "cls", 3: "last"}


def pooling_of_folder(folder: str | os.PathLike[str]) -> Pooling:
    """What ``modules.json`` says; without one, the default. Raises ``InvalidInput`` for modules that are not run here
    (a vector without them would be another one), and `CorruptFile`.
    """
    path = Path(folder) / "modules.json"
    if not path.exists():
        return DEFAULT
    kinds = [(_kind_of(module, path), module) for module in _modules(path)]
    kind = "last"
    for name, module in kinds:
        if name == "Pooling":
            kind = _mode_of(path, module.get("path"))
        elif name not in ("Transformer", "Normalize"):
            raise InvalidInput("modules.json", name, "this server runs Transformer, Pooling and Normalize alone")
    return Pooling(kind, any(name == "Normalize" for name, _ in kinds))


def _modules(path: Path) -> list[Any]:
    file, size = open_regular(path)
    with file:
        if size > _MAX_BYTES:
            raise CorruptFile(path, "file size", size, f"at most {_MAX_BYTES} bytes are read")
        raw = file.read(size)
    modules = parse_json(b'{"modules":' + raw + b"}", path, "content")["modules"]  # a list, under the same checks
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise CorruptFile(path, "content", type(modules).__name__, "must be a list of objects")
    return modules


def _kind_of(module: Mapping[str, Any], path: Path) -> str:
    kind = module.get("type")
    if not isinstance(kind, str):
        raise CorruptFile(path, "type", kind, "must be a string")
    return kind.rsplit(".", 1)[-1][:64]


def _mode_of(path: Path, where: Any) -> str:
    if not isinstance(where, str) or not _FOLDER.fullmatch(where):
        raise CorruptFile(path, "path", where, "must name a folder beside it")
    place = path.parent / where / "config.json"
    config = read_json(place, _MAX_BYTES)
    named = config.get("pooling_mode")
    on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    found = [_MODES.get(str(named))] if named is not None else [_FLAGS.get(name) for name in on]
    if len(found) != 1 or found[0] is None:
        told = str(named) if named is not None else ", ".join(on)
        raise InvalidInput("pooling_mode", told[:200], f"one of {', '.join(_MODES)} is run here")
    return found[0]


def pooling_of_metadata(metadata: Mapping[str, Any]) -> Pooling:
    """What a GGUF file says of it; the default where it says nothing."""
    architecture = metadata.get("general.architecture", "")
    return Pooling(_GGUF.get(metadata.get(f"{architecture}.pooling_type", 0), DEFAULT.kind))
