"""How byte-level vocabularies cut a text before merging, by the name that GGUF files carry (`tokenizer.ggml.pre`).

The patterns are those of the original tokenizers. A name that is not here is refused: a wrong cut gives ids that look
right and make the model worse.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["PreRule", "pre_rule"]

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = f"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
_GPT4O = (
    f"{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)


@dataclass(frozen=True)
class PreRule:
    """`patterns` cut the text one after another (each match a piece of its own); `gpt2` adds GPT-2's cut after them.

    `digits`: each digit on its own first. `nfc`: the text is brought to NFC. `whole_words`: a piece that is a token as
    it stands is taken whole, without merging. `add_bos`: the default where the file does not say.
    """

    patterns: tuple[str, ...] = ()
    gpt2: bool = False
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def build(self) -> Any:
        """The library's pre-tokenizer for this rule, ending in the byte alphabet."""
        from tokenizers import Regex, pre_tokenizers

        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if self.digits else []
        steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2))
        return pre_tokenizers.Sequence(steps)


_GPT2 = PreRule(gpt2=True)
_SMOLLM = PreRule(gpt2=True, digits=True)
_LLAMA_BPE = PreRule((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN = PreRule((_QWEN2,), nfc=True)
_DEFAULT = PreRule((r"[\p{P}\$\+<=>\^~\|]+", r"\p{N}+", r"[0-9][0-9][0-9]"), gpt2=True)

_RULES = {
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "command-r": _SMOLLM,
    "codeshell": _SMOLLM,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama-bpe": _LLAMA_BPE,
    "smaug-bpe": PreRule((_LLAMA3,)),
    "qwen2": _QWEN,
    "stablelm2": PreRule((_QWEN2,)),
    "tekken": PreRule((_TEKKEN,), whole_words=True, add_bos=True),
    "gpt-4o": PreRule((_GPT4O,)),
    "llama4": PreRule((_GPT4O,), add_bos=True),
    "default": _DEFAULT,
}


def pre_rule(name: object) -> PreRule:
    """The rule for a `tokenizer.ggml.pre` name. Raises `InvalidInput` for one that is unknown."""
    rule = _RULES.get(name) if isinstance(name, str) else None
    if rule is None:
        raise InvalidInput("tokenizer.ggml.pre", name, f"unknown pre-tokenizer; known: {', '.join(sorted(_RULES))}")
    return rule
