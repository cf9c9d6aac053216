"""Tokenizers from GGUF metadata: byte-level BPE (`gpt2`) and SentencePiece-style BPE with scores (`llama`).

The vocabulary is checked first (`gguf_vocab.py`), so that a hostile file is refused before anything is built.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.tokenizers.base import TokenizerTraits, content_digest
from octavo.tokenizers.fast import BYTE_LEVEL, SPACE_MARK, FastTokenizer, guarded
from octavo.tokenizers.gguf_vocab import CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, read_vocabulary
from octavo.tokenizers.pretokenize import PreRule, pre_rule

__all__ = ["derive_merges", "load_metadata"]

_MARK = "\u2581"
_MAX_TEMPLATE = 1 << 20
# tokens that end a turn; files often name only one EOS
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")


def load_metadata(metadata: Mapping[str, Any]) -> FastTokenizer:
    """The tokenizer in a GGUF file's metadata. Raises `InvalidInput` naming the key that is wrong."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise InvalidInput("tokenizer.ggml.model", kind, "must be gpt2 (byte-level BPE) or llama (SentencePiece BPE)")
    vocabulary = read_vocabulary(metadata, byte_level=kind == "gpt2")
    if kind == "gpt2":
        return _byte_level(vocabulary, metadata)
    return _space_mark(vocabulary, metadata)


def _byte_level(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> FastTokenizer:
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, normalizers

    rule: PreRule = pre_rule(metadata.get("tokenizer.ggml.pre", "default"))
    core = guarded(
        "tokenizer.ggml.merges",
        len(vocabulary.merges),
        lambda: Core(models.BPE(vocabulary.ids, list(vocabulary.merges), ignore_merges=rule.whole_words)),
    )
    if rule.nfc:
        core.normalizer = normalizers.NFC()
    core.pre_tokenizer = rule.build()
    core.decoder = decoders.ByteLevel()
    _add_tokens(core, vocabulary)
    traits = _traits(vocabulary, metadata, add_bos=rule.add_bos, strip=False)
    return FastTokenizer(core, traits, BYTE_LEVEL)


def _space_mark(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> FastTokenizer:
    from tokenizers import Tokenizer as Core
    from tokenizers import decoders, models, normalizers

    merges = derive_merges(vocabulary)
    unknown = vocabulary.tokens[vocabulary.unknown_id] if vocabulary.unknown_id is not None else None
    model = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": vocabulary.has_bytes}
    core = guarded("tokenizer.ggml.scores", len(merges), lambda: Core(models.BPE(vocabulary.ids, merges, **model)))
    add_space = _flag(metadata, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", _MARK)
    core.normalizer = normalizers.Sequence([normalizers.Prepend(_MARK), spaces]) if add_space else spaces
    core.decoder = decoders.Sequence([decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_tokens(core, vocabulary)
    traits = _traits(vocabulary, metadata, add_bos=True, strip=add_space)
    return FastTokenizer(core, traits, SPACE_MARK)


def derive_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merge list that a vocabulary with scores stands for, best first.

    Every way to cut a piece into two pieces of the vocabulary is a merge; it ranks by the piece's score, among equal
    scores by the longer left part, then the longer right part. This is the order in which published tokenizer files
    list the merges of such a vocabulary. User-defined pieces come before all others. O(total characters).
    """
    known = {token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind != CONTROL}
    scored = [
        (0.0 if kind == USER_DEFINED else score, token)
        for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
        if kind in (0, 1, USER_DEFINED)
    ]
    scored.sort(key=lambda item: -item[0])  # stable: equal scores stay in order of id
    several = {score for score, count in Counter(score for score, _ in scored).items() if count > 1}
    merges: list[tuple[str, str]] = []
    for shared, run in groupby(scored, lambda item: item[0] if item[0] in several else None):
        found = [
            (left, piece[cut:])
            for _, piece in run
            for cut in range(len(piece) - 1, 0, -1)
            if (left := piece[:cut]) in known and piece[cut:] in known
        ]
        if shared is not None:
            found.sort(key=lambda pair: (-len(pair[0]), -len(pair[1])))
        merges += found
    return merges


def _add_tokens(core: Any, vocabulary: Vocabulary) -> None:
    """Control tokens are special; user-defined ones are text that is never cut. Neither is normalised."""
    from tokenizers import AddedToken

    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    core.add_tokens(added)


def _traits(vocabulary: Vocabulary, metadata: Mapping[str, Any], *, add_bos: bool, strip: bool) -> TokenizerTraits:
    eos_ids = _eos_ids(vocabulary)
    bos = vocabulary.bos_id
    add_bos = _flag(metadata, "add_bos_token", add_bos) and bos is not None
    add_eos = _flag(metadata, "add_eos_token", False) and bool(eos_ids)
    templates = _templates(metadata)
    rules = [metadata.get("tokenizer.ggml.pre"), bos, eos_ids, add_bos, add_eos, strip, sorted(templates.items())]
    return TokenizerTraits(
        identity=content_digest([*_digest_parts(vocabulary), json.dumps(rules)]),
        special=vocabulary.control,
        bos_id=bos,
        eos_ids=eos_ids,
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        suffix_ids=eos_ids[:1] if add_eos else (),
        strip_leading_space=strip,
        chat_template=templates.get("default"),
        named_templates=templates,
    )


def _digest_parts(vocabulary: Vocabulary) -> Sequence[str | bytes]:
    merges = "\n".join(left + " " + right for left, right in vocabulary.merges)
    scores = array("d", vocabulary.scores).tobytes()
    return ["gguf", "\n".join(vocabulary.tokens), merges, scores, bytes(vocabulary.types)]


def _eos_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    found = [vocabulary.eos_id, vocabulary.eot_id, vocabulary.eom_id]
    found += [vocabulary.control.get(token) for token in _TURN_ENDS]
    return tuple(dict.fromkeys(index for index in found if index is not None))


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise InvalidInput(f"tokenizer.ggml.{name}", value, "must be true or false")
    return value


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Name to template: `tokenizer.chat_template` is the default, `tokenizer.chat_template.NAME` are others."""
    key = "tokenizer.chat_template"
    found = {name[len(key) + 1 :] or "default": text for name, text in metadata.items() if _is_template(name, key)}
    for name, text in found.items():
        if not isinstance(text, str) or len(text) > _MAX_TEMPLATE:
            raise InvalidInput(f"{key} ({name})", text, f"must be text of at most {_MAX_TEMPLATE} characters")
    return found


def _is_template(name: str, key: str) -> bool:
    return name == key or name.startswith(key + ".")
