"""How models mark what they think before they answer."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.errors import InvalidInput

__all__ = ["FORMATS", "ReasoningFormat", "format_named", "format_of"]


@dataclass(frozen=True)
class ReasoningFormat:
    """``opens`` thoughts ``closes`` answer. Where the template has opened the block, the output begins inside it."""

    name: str
    opens: str
    closes: str

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt leaves the block open, so that what follows is thought."""
        return prompt.rstrip().endswith(self.opens.rstrip())

    def goes_on(self, text: str) -> bool:
        """Whether a text that is gone on with ends within thoughts."""
        return text.rfind(self.opens) > text.rfind(self.closes)

    def is_closed(self, prompt: str) -> bool:
        """Whether a prompt ends with thoughts that are over, so that what follows is the answer."""
        return prompt.rstrip().endswith(self.closes.rstrip())


FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("gemma", "<|channel>thought\n", "<channel|>"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
    )
}
_ALIASES = {"deepseek_r1": "think", "qwen3": "think", "smollm3": "think", "seed_oss": "seed"}


def format_named(name: str) -> ReasoningFormat:
    """The format of this name. Raises ``InvalidInput``."""
    found = FORMATS.get(_ALIASES.get(name, name))
    if found is None:
        raise InvalidInput("reasoning_parser", name, f"use one of {', '.join(sorted({*FORMATS, *_ALIASES}))}")
    return found


def format_of(template: str) -> ReasoningFormat | None:
    """The format that a chat template speaks of; None where it speaks of none."""
    return next((each for each in FORMATS.values() if each.closes in template or each.opens in template), None)
