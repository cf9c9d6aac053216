"""Tokenizers and chat templates. Importing this package imports nothing third-party."""

from octavo.tokenizers.base import Tokenizer, TokenizerTraits
from octavo.tokenizers.load import from_dict, from_folder, from_gguf_metadata

__all__ = ["Tokenizer", "TokenizerTraits", "from_dict", "from_folder", "from_gguf_metadata"]
