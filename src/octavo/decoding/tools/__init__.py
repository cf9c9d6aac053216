"""Tool calls: how models write them, and how they are read, asked for and enforced."""

from octavo.decoding.tools.dialects import DIALECTS, ToolDialect, dialect_named, dialect_of, shows_tools, written
from octavo.decoding.tools.parser import ToolParser

__all__ = ["DIALECTS", "ToolDialect", "ToolParser", "dialect_named", "dialect_of", "shows_tools", "written"]
