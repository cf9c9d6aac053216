"""API keys: a file of names and SHA-256 digests, with what each may use. The keys themselves are nowhere."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import stat
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.core.errors import InvalidInput

__all__ = ["Key", "Keyring", "read_keys"]

_MAX_BYTES = 1 << 20
_MAX_KEYS = 4096
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key, and its quotas; 0: no limit."""

    name: str  # the tenant
    sha256: str  # of the key, in hex
    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # of prompts and answers
    concurrent: int = 0  # requests


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[Key]


class Keyring:
    """Finds the key that a secret is."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = tuple(keys)

    def named(self, name: str) -> Key | None:
        """The key of that name, or None."""
        return next((key for key in self._keys if key.name == name), None)

    def find(self, secret: str) -> Key | None:
        """The key, or None. Takes the same time whatever the secret is, and wherever its key stands."""
        digest = hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found


def read_keys(path: str) -> Keyring:
    """The keys of a file: ``{"keys": [{"name": "ann", "sha256": "..."}]}``. Raises ``InvalidInput``."""
    content = _content(path)
    try:
        keys = msgspec.convert(json.loads(content, object_pairs_hook=_unique), _File).keys
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise InvalidInput("key_file", path, f'must be {{"keys": [{{"name", "sha256", ...}}]}}: {error}') from error
    _check(path, keys)
    return Keyring(keys)


def _content(path: str) -> bytes:
    """The file's bytes; each process reads it for itself, so it must be one that is there to stay."""
    try:
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode):
            raise InvalidInput("key_file", path, "is no plain file; write the keys into one")
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidInput("key_file", path, f"cannot be read: {error.strerror}") from error
    if mode & stat.S_IWOTH:
        raise InvalidInput("key_file", path, "everybody may write into it: chmod o-w")
    if len(content) > _MAX_BYTES:
        raise InvalidInput("key_file", path, f"must have at most {_MAX_BYTES} bytes")
    return content


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same name twice")
    return found


def _check(path: str, keys: Sequence[Key]) -> None:
    if not 1 <= len(keys) <= _MAX_KEYS:
        raise InvalidInput("key_file", path, f"must have 1 to {_MAX_KEYS} keys")
    for key in keys:
        if not _NAME.fullmatch(key.name):
            raise InvalidInput("key_file", path, "each name must have 1 to 64 letters, digits or any of . _ -")
        if not _DIGEST.fullmatch(key.sha256):
            remedy = f"sha256 of {key.name} must be 64 digits of hex, as of: printf %s KEY | sha256sum"
            raise InvalidInput("key_file", path, remedy)
        if min(key.requests_per_minute, key.tokens_per_minute, key.concurrent) < 0:
            raise InvalidInput("key_file", path, f"quotas of {key.name} must be at least 0")
    for what in ("name", "sha256"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise InvalidInput("key_file", path, f"two keys have the same {what}")
