"""Weight formats of the native backend: which matrix gets which, and what `auto` means here."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.backends.native_lib import FORMATS, KV_TYPES
from octavo.core.errors import InvalidInput

# What the output matrix (and a tied embedding) gets: it decides the ranks of tokens, so it keeps 8 bits.
_HEAD = {"w8pc": "w8g64"} | {f"w4g{size}": "w8g64" for size in (32, 64, 128)}
_HEAD |= {f"w4a16g{size}": "bf16" for size in (32, 64, 128)}
# What `auto` stands for, by kernel table: the first whose weights take at most AUTO_SHARE of the machine's memory, else
# the last. bf16 is exact for checkpoints in bf16; tables that multiply int8 but not bf16 start at 8 bits.
_BY_SIZE, _BYTES_FIRST = ("bf16", "w8g64", "w4g32"), ("w8g64", "w4g32")
AUTO_SHARE = 0.5
AUTO_TABLE = {
    **dict.fromkeys(("amx", "avx512_vnni_bf16", "neon_i8mm"), _BY_SIZE),
    **dict.fromkeys(("avx2_vnni", "neon_dotprod"), _BYTES_FIRST),
    **dict.fromkeys(("avx512", "avx2", "neon", "generic"), _BY_SIZE),
}


def resolve_format(wanted: str) -> str:
    """The format that a name stands for; `auto` here is for memory enough. Raises InvalidInput for an unknown one."""
    if wanted == "auto":
        return "bf16"
    if wanted not in FORMATS:
        raise InvalidInput("format", wanted, f"the native backend has auto, {', '.join(FORMATS)}")
    return wanted


def resolve_kv_dtype(wanted: str, weight_format: str) -> str:
    """The type of keys and values: `auto` is fp32 beside fp32 weights (the oracle), else bf16."""
    if wanted == "auto":
        return "fp32" if resolve_format(weight_format) == "fp32" else "bf16"
    if wanted not in KV_TYPES:
        raise InvalidInput("kv_dtype", wanted, f"use auto or one of {', '.join(KV_TYPES)}")
    return wanted


class FormatPlan:
    """The format of each matrix, by its name and use. `exceptions` by weight name."""

    def __init__(self, default: str, exceptions: Mapping[str, str] | None = None) -> None:
        self.default, self.exceptions = resolve_format(default), dict(exceptions or {})
        for kind in self.exceptions.values():
            resolve_format(kind)

    def __call__(self, name: str, use: str) -> str:
        """`use`: linear, head, embed, router (kept exact: it is small and decides experts)."""
        if name in self.exceptions:
            return self.exceptions[name]
        if use == "router":
            return "fp32"
        return self.default if use == "linear" else _HEAD.get(self.default, self.default)

    def describe(self) -> str:
        """The plan as one word, for identities: equal words, equal formats."""
        extra = ",".join(f"{name}={kind}" for name, kind in sorted(self.exceptions.items()))
        return self.default + (f"({extra})" if extra else "")
