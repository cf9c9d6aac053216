"""Tokenizers from a model folder: `tokenizer.json`, and what the small JSON files beside it say of special tokens."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.tokenizers.base import TokenizerTraits, content_digest
from octavo.tokenizers.fast import BYTE_LEVEL, SPACE_MARK, FastTokenizer, guarded

__all__ = ["load_folder"]

_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_CONFIG_BYTES = 16 << 20
# classes that build their own BOS rule from the config, whatever tokenizer.json says
_RULE_FROM_CONFIG = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")


def load_folder(path: str | os.PathLike[str]) -> FastTokenizer:
    """The tokenizer of a folder. Raises `InvalidInput` naming the file that is missing, damaged or unsupported."""
    folder = Path(path)
    main = folder / "tokenizer.json"
    if not main.is_file():
        raise InvalidInput("tokenizer", str(main), "not found; a model folder needs its tokenizer.json")
    text = _read(main, _MAX_TOKENIZER_BYTES)
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    templates = _templates(folder, config)
    core = _core(text, main)
    eos_ids = _eos_ids(core, config, folder)
    form, strip = _decoder_form(core)
    return FastTokenizer(core, _traits(core, config, templates, eos_ids, text, strip), form)


def _core(text: str, path: Path) -> Any:
    from tokenizers import Tokenizer as Core

    core = guarded(str(path), len(text), lambda: Core.from_str(text))
    core.no_padding()
    core.no_truncation()
    ids = core.get_vocab(with_added_tokens=True)
    if len(set(ids.values())) != len(ids):
        raise InvalidInput(str(path), len(ids) - len(set(ids.values())), "two tokens share one id")
    return core


def _traits(
    core: Any,
    config: Mapping[str, Any],
    templates: Mapping[str, str],
    eos_ids: tuple[int, ...],
    text: str,
    strip: bool,
) -> TokenizerTraits:
    special = {t.content: i for i, t in sorted(core.get_added_tokens_decoder().items()) if t.special}
    bos_id = _named_id(core, config, "bos_token")
    prefix, suffix = _surroundings(core)
    prefix = _config_rule(config, "add_bos_token", prefix, bos_id)
    suffix = _config_rule(config, "add_eos_token", suffix, eos_ids[0] if eos_ids else None)
    rules = json.dumps([bos_id, eos_ids, prefix, suffix, sorted(templates.items())])
    return TokenizerTraits(
        identity=content_digest(["tokenizer.json", text, rules]),
        special=special,
        bos_id=bos_id,
        eos_ids=eos_ids,
        prefix_ids=prefix,
        suffix_ids=suffix,
        strip_leading_space=strip,
        chat_template=templates.get("default"),
        named_templates=templates,
    )


def _surroundings(core: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text, seen on a sample."""
    bare = core.encode("a", add_special_tokens=False).ids
    full = core.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise InvalidInput("tokenizer.json post_processor", full, "must keep the text's ids together")


def _config_rule(config: Mapping[str, Any], key: str, found: tuple[int, ...], token_id: int | None) -> tuple[int, ...]:
    wanted = config.get(key)
    name = str(config.get("tokenizer_class", "")).removesuffix("Fast")
    if not isinstance(wanted, bool) or name not in _RULE_FROM_CONFIG:
        return found
    return (token_id,) if wanted and token_id is not None else ()


def _decoder_form(core: Any) -> tuple[str, bool]:
    """(how the vocabulary spells bytes, whether decoding takes a leading space away)."""
    state = {} if core.decoder is None else json.loads(core.decoder.__getstate__())
    parts = {part.get("type"): part for part in state.get("decoders", [state])}
    if "ByteLevel" in parts:
        return BYTE_LEVEL, False
    if "Metaspace" in parts:
        return SPACE_MARK, parts["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in parts or "Replace" in parts:
        return SPACE_MARK, parts.get("Strip", {}).get("start", 0) > 0
    raise InvalidInput("tokenizer.json decoder", state.get("type"), "must be ByteLevel, Metaspace or byte fallback")


def _eos_ids(core: Any, config: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """The tokenizer's own EOS first, then those of the generation and model configs, each once."""
    first = _named_id(core, config, "eos_token")
    found = [] if first is None else [first]
    size = core.get_vocab_size(with_added_tokens=True)
    for name in ("generation_config.json", "config.json"):
        value = _read_json(folder / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in listed:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
                raise InvalidInput(f"{name} eos_token_id", value, f"must be token ids below {size}")
            found.append(token_id)
    return tuple(dict.fromkeys(found))


def _named_id(core: Any, config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    content = value.get("content") if isinstance(value, dict) else value
    if content is None:
        return None
    index: int | None = core.token_to_id(content) if isinstance(content, str) else None
    if index is None:
        raise InvalidInput(key, content, "must be a token of tokenizer.json")
    return index


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name to chat template; `chat_template.jinja` wins over the JSON files."""
    given = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        given = _read(folder / "chat_template.jinja", _MAX_CONFIG_BYTES)
    if given is None:
        return {}
    if isinstance(given, str):
        return {"default": given}
    try:
        named = {item["name"]: item["template"] for item in given}
    except (TypeError, KeyError):
        named = {}
    if not named or not all(isinstance(part, str) for item in named.items() for part in item):
        raise InvalidInput("chat_template", given, "must be text, or a list of {name, template}")
    return named


def _read(path: Path, limit: int) -> str:
    size = path.stat().st_size
    if size > limit or not path.is_file():
        raise InvalidInput(str(path), size, f"must be a file of at most {limit} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(str(path), f"byte {error.start}", "must be UTF-8") from None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read(path, _MAX_CONFIG_BYTES))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidInput(str(path), str(error)[:80], "must be JSON") from None
    if not isinstance(value, dict):
        raise InvalidInput(str(path), type(value).__name__, "must be a JSON object")
    return value
