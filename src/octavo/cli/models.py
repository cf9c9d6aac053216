"""`octavo models`: what is known by name, and where it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo.weights.store import DEFAULT_MODEL, ModelStore

__all__ = ["known_models", "run_models"]


def known_models(store: ModelStore) -> list[dict[str, Any]]:
    """Every known model as plain values; `path` is None where it is not cached."""
    held = {model.name: model.path for model in store.cached_models()}
    return [
        {
            "name": model.name,
            "title": model.title,
            "default": model.name == DEFAULT_MODEL,
            "bytes": model.size,
            "licence": model.licence,
            "path": str(held[model.name]) if model.name in held else None,
            "sources": [str(source) for source in model.sources],
        }
        for model in store.known_models()
    ]


def run_models(as_json: bool, fetch: str, cache_dir: str) -> None:
    """Print the list, after fetching a model if asked to. Raises ``OctavoError`` if it cannot be had."""
    store = ModelStore(cache_dir or None)
    if fetch:
        found = store.resolve(fetch)
        print(found.path)
        return
    models = known_models(store)
    if as_json:
        print(json.dumps(models, indent=2))
        return
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for heading in ("name", "model", "size", "licence", "cached"):
        table.add_column(heading, no_wrap=heading != "model")
    for model in models:
        name = model["name"] + (" *" if model["default"] else "")
        size = f"{model['bytes'] / 1e6:.0f} MB"
        table.add_row(name, model["title"], size, model["licence"], "yes" if model["path"] else "no")
    console.print(table)
    for model in models:
        where = model["path"] or "fetched when first used"
        console.print(f"\n{model['name']}: {where}", markup=False, soft_wrap=True)
        for source in model["sources"]:
            console.print(f"  from {source}", style="dim", markup=False, soft_wrap=True)
    console.print(f"\ncache: {Path(store.cache_dir)}", markup=False, soft_wrap=True)
    console.print(
        "* the default. A hub id (org/name), a folder or a .gguf file works wherever a name does.", style="dim"
    )
