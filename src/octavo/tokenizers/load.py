"""Where tokenizers come from. What each source needs is imported when it is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.tokenizers.base import Tokenizer

__all__ = ["from_dict", "from_folder", "from_gguf_metadata"]


def from_folder(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model folder, by its `tokenizer.json` and the small files beside it.

    Raises `InvalidInput` for a missing, damaged or unsupported file. No code of the folder is run.
    """
    from octavo.tokenizers.hf import load_folder

    return load_folder(path)


def from_gguf_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata (keys `tokenizer.ggml.*` and `tokenizer.chat_template`).

    Raises `InvalidInput`, naming the key, for a vocabulary that is missing, damaged or of an unsupported kind.
    """
    from octavo.tokenizers.gguf import load_metadata

    return load_metadata(metadata)


def from_dict(spec: Mapping[str, Any]) -> Tokenizer:
    """The standard-library tokenizer of a JSON description, such as the tiny model's fixture."""
    from octavo.tokenizers.simple import SimpleTokenizer

    return SimpleTokenizer.from_dict(spec)
