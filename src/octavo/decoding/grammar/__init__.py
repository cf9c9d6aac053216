"""Structured output: grammars compiled by `llguidance`, and matchers that say which token may come next.

Grammar (plain data) -> definition (llguidance's text) -> compiled once per tokenizer -> a matcher for each choice
"""

from octavo.decoding.grammar.compiler import GrammarCompiler
from octavo.decoding.grammar.masks import OutputMasks
from octavo.decoding.grammar.matcher import GrammarFault, Matcher

__all__ = ["GrammarCompiler", "GrammarFault", "Matcher", "OutputMasks"]
