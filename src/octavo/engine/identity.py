"""What must be equal for bytes to be equal: the numerics id of an engine, and the namespace of its prefix cache."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from octavo import __version__
from octavo.backends.ops import ATTENTION_BLOCK, ATTENTION_CHUNK

__all__ = ["SAMPLER_VERSION", "model_digest", "namespace", "numerics_id"]

SAMPLER_VERSION = 1  # raised when the noise, the order of candidates or a penalty changes


def _digest(parts: Any, key: bytes = b"") -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=_plain)
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16, key=key).hexdigest()


def _plain(value: object) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def numerics_id(
    backend: str,
    *,
    weight_format: str,
    kv_dtype: str,
    ropes: Sequence[Any],
    layout: str = "single",
    verifier: str = "",
    eviction: str = "",
) -> str:
    """A digest of all that decides rounding: equal ids, prompt, parameters and seed give equal bytes.

    ``ropes`` are the resolved tables of the layers. The interpreter's summation changed with Python 3.12, so it is in.
    ``verifier``: other than the exact one, which changes no token. ``eviction``: what is forgotten, if anything.
    """
    return _digest(
        {
            **({"verifier": verifier} if verifier else {}),
            **({"eviction": eviction} if eviction else {}),
            "engine": __version__,
            "backend": backend,
            "sum": "compensated" if sys.version_info >= (3, 12) else "plain",
            "weights": weight_format,
            "kv": kv_dtype,
            "layout": layout,
            "attention": [ATTENTION_BLOCK, ATTENTION_CHUNK],
            "rope": list(ropes),
            "sampler": SAMPLER_VERSION,
        }
    )


def model_digest(config: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    """A digest of a configuration and of what is said of its tensors (shapes, types, or a digest of the content)."""
    return _digest({"config": dict(config), "tensors": dict(tensors)})


def namespace(
    *, model: str, tokenizer: str, numerics: str, groups: Sequence[Any], adapter: str = "", salt: str = ""
) -> str:
    """Where prefixes may be shared: the same model, tokenizer and template, numbers, KV layout, adapter and salt.

    The tenant's salt is the key of the hash: without it, two tenants never meet in the cache.
    """
    parts = {"model": model, "tokenizer": tokenizer, "numerics": numerics, "groups": list(groups), "adapter": adapter}
    return _digest(parts, hashlib.blake2b(salt.encode("utf-8"), digest_size=32).digest())
