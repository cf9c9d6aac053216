"""The native library through ctypes: the records of octavo_native.h, and one place that loads it."""

from __future__ import annotations

import ctypes as c
import functools
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.core.errors import InvalidInput

__all__ = ["FORMATS", "KV_TYPES", "BackendUnavailable", "chosen_isa", "library", "library_path"]

ABI_VERSION = 6
NONE = -1
ROWS_T, ROWS_R = 0, 1
EPI_STORE, EPI_ADD, EPI_SILU_MUL, EPI_GELU_MUL = range(4)
(EMBED, LINEAR, NORM, LAYER_NORM, ADD, SCALE, GATED, SELECT, ROPE_KV, ATTENTION, MOE, LORA) = range(12)

# as numbered in kernels.h
FORMATS = {
    name: number
    for number, name in enumerate(
        ("fp32", "bf16", "w8g64", "w8pc", "w4g32", "w4g64", "w4g128", "w4a16g32", "w4a16g64", "w4a16g128")
    )
}
KV_TYPES = {"fp32": 0, "bf16": 1, "int8": 2}

_I32, _I64, _F32, _F64, _P = c.c_int32, c.c_int64, c.c_float, c.c_double, c.c_void_p


class BackendUnavailable(InvalidInput):
    """The native library is not there, or does not fit this package or this machine."""


class Matrix(c.Structure):
    """octavo_matrix."""

    _fields_ = (
        *(("format", _I32), ("interleaved", _I32), ("n", _I64), ("k", _I64), ("data", _P), ("up", _P)),
        *(("codes", _P), ("scale", _P), ("offset", _P), ("group", _I64)),
    )


class Stored(c.Structure):
    """octavo_stored."""

    _fields_ = (
        *((name, _I32) for name in ("type", "heads", "mapped", "reserved")),
        *(("data", _P), ("bytes", _I64)),
    )


class Buffer(c.Structure):
    """octavo_buffer."""

    _fields_ = (("rows", _I32), ("reserved", _I32), ("cols", _I64))


class Op(c.Structure):
    """octavo_op."""

    _fields_ = (
        *(("code", _I32), ("inputs", _I32 * 4), ("outputs", _I32 * 4)),
        *(("weights", _I32 * 9), ("i", _I32 * 6), ("f", _F32 * 4)),
    )


class Rope(c.Structure):
    """octavo_rope."""

    _fields_ = (("inv_freq", c.POINTER(_F64)), ("factor", _F64), ("pairs", _I64))


class Target(c.Structure):
    """octavo_target."""

    _fields_ = (("n", _I64), ("k", _I64))


class ProgramSpec(c.Structure):
    """octavo_program_spec."""

    _fields_ = (
        *((name, _I32) for name in ("size", "num_buffers", "num_ops", "num_ropes", "num_layers", "num_groups")),
        *((name, _I32) for name in ("max_tokens", "max_sequences", "max_logit_rows", "max_positions")),
        *((name, _I32) for name in ("vocab_size", "logits", "hidden", "num_extra")),
        *(("buffers", c.POINTER(Buffer)), ("ops", c.POINTER(Op)), ("ropes", c.POINTER(Rope))),
        *((name, c.POINTER(_I32)) for name in ("layer_group", "layer_index", "extra")),
        ("adapters", _P),
    )


class Rules(c.Structure):
    """octavo_rules."""

    _fields_ = (
        *((name, _P) for name in ("bias_ids", "bias", "banned", "allowed")),
        *(("mask", c.c_char_p), ("prompt", _P), ("output", _P), ("allowed_bytes", _I64), ("mask_bytes", _I64)),
        *((name, _I32) for name in ("num_bias", "num_banned", "num_prompt", "num_output")),
        *((name, _F64) for name in ("repetition", "frequency", "presence")),
        *(("penalised", _P), ("penalties", _P), ("num_penalised", _I64)),
    )


class Logprobs(c.Structure):
    """octavo_logprobs."""

    _fields_ = (
        *((name, _I32) for name in ("row", "token", "top", "chosen")),
        *((name, _P) for name in ("chosen_ids", "top_ids", "values")),
        *(("rank", _I64), ("found", _I32), ("reserved", _I32)),
    )


class Shape(c.Structure):
    """octavo_shape."""

    _fields_ = (
        *((name, _F64) for name in ("typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold")),
        *((name, _F64) for name in ("dynatemp_range", "dynatemp_exponent")),
    )


class Sampling(c.Structure):
    """octavo_sampling."""

    _fields_ = (
        *(("row", _I32), ("top_k", _I32), ("temperature", _F64), ("top_p", _F64), ("min_p", _F64)),
        *(("seed", c.c_uint64), ("choice", c.c_uint32), ("index", c.c_uint32)),
        *(("purpose", c.c_uint32), ("mirostat", c.c_float), ("rules", _P), ("logprobs", _P)),
        ("shape", Shape),
    )


class Step(c.Structure):
    """octavo_step."""

    _fields_ = (
        *((name, _I32) for name in ("size", "tokens", "sequences", "logit_rows", "samples", "table_width")),
        ("table_rows", _I64),
        *((name, _P) for name in ("token_ids", "positions", "starts", "table_row", "page_table", "no_write", "rows")),
        *(
            (name, _P)
            for name in ("sampling", "sampled", "parent_rows", "grammar_masks", "hidden", "scores", "adapters")
        ),
        ("shifts", _P),
    )


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "octavo_abi_version": (_I32, ()),
    "octavo_kernel_version": (c.c_char_p, ()),
    "octavo_error": (c.c_char_p, ()),
    "octavo_isas": (c.c_char_p, ()),
    "octavo_cpus": (_I32, ()),
    "octavo_open": (_P, (c.c_char_p, _I32)),
    "octavo_close": (None, (_P,)),
    "octavo_isa": (c.c_char_p, (_P,)),
    "octavo_threads": (_I32, (_P,)),
    "octavo_weight_bytes": (_I64, (_P,)),
    "octavo_add_matrix": (_I64, (_P, c.POINTER(Matrix))),
    "octavo_add_stored": (_I64, (_P, _I32, _I64, _I64, c.POINTER(Stored), _I32)),
    "octavo_declare_matrix": (_I64, (_P, c.POINTER(Matrix))),
    "octavo_add_vector": (_I64, (_P, _P, _I64)),
    "octavo_pack_scaled": (_I32, (_P, _I64, c.POINTER(Stored), _I32, _P, _P)),
    "octavo_set_vector": (_I32, (_P, _I64, _P, _I64)),
    "octavo_matrix_bytes": (_I64, (_P, c.POINTER(Matrix))),
    "octavo_read_row": (_I32, (_P, _I64, _I64, _P)),
    "octavo_kv_open": (_P, (_P, _I32, _I32, _I32, _I32, _I32, _I64)),
    "octavo_kv_close": (None, (_P,)),
    "octavo_kv_page_bytes": (_I64, (_P,)),
    "octavo_kv_bytes": (_I64, (_P, _I32, _I32, _I32, _I32, _I32)),
    "octavo_kv_copy_pages": (_I32, (_P, _P, _I64)),
    "octavo_kv_move_slots": (_I32, (_P, _P, _I64)),
    "octavo_kv_write": (_I32, (_P, _I32, _I64, _P, _P)),
    "octavo_kv_read": (_I32, (_P, _I32, _I64, _P, _P)),
    "octavo_adapters_open": (_P, (_I32, _I32, c.POINTER(Target), _I32, _I32)),
    "octavo_adapters_close": (None, (_P,)),
    "octavo_adapters_bytes": (_I64, (_P,)),
    "octavo_adapters_set": (_I32, (_P, _I32, _I32, _I32, _P, _P)),
    "octavo_adapters_clear": (_I32, (_P, _I32)),
    "octavo_program_open": (_P, (_P, _P, c.POINTER(ProgramSpec))),
    "octavo_program_close": (None, (_P,)),
    "octavo_program_bytes": (_I64, (_P,)),
    "octavo_program_barriers": (_I32, (_P, _I32, _I32)),
    "octavo_run": (_I32, (_P, c.POINTER(Step))),
    "octavo_run_timed": (_I32, (_P, c.POINTER(Step), _P)),
    "octavo_logits": (_P, (_P, c.POINTER(_I64))),
    "octavo_values": (_P, (_P, _I32, c.POINTER(_I64))),
    "octavo_sample": (_I32, (_P, _P, _I64, _I64, _I64, c.POINTER(Sampling), _I32, _P)),
    "octavo_process": (_I32, (_P, _P, _I64, _I64, _I64, c.POINTER(Sampling), _I32, _P)),
    "octavo_logprobs_of": (_I32, (_P, _P, _I64, _I64, _I64, c.POINTER(Logprobs), _I32)),
    "octavo_allocations": (_I64, ()),
    "octavo_measure_read": (_F64, (_P, _I32, _I64, _I32)),
    "octavo_measure_dots": (_F64, (_P, _I32, _I32, _I64, _I32)),
    "octavo_measure_barrier": (_F64, (_P, _I32, _I64, _I32)),
}


def library_path() -> Path:
    """Where the library lies: $OCTAVO_NATIVE_LIBRARY, else beside this module."""
    override = os.environ.get("OCTAVO_NATIVE_LIBRARY")
    return Path(override) if override else Path(__file__).with_name("_native") / "liboctavo_native.so"


def library() -> Any:
    """The loaded library with its functions typed. Raises BackendUnavailable with the reason and the remedy."""
    return _load(library_path())


def chosen_isa() -> str:
    """The kernel table that an engine takes unless it is told another; "" without the library."""
    try:
        best: str = library().octavo_isas().decode().split()[0]
    except BackendUnavailable:
        return ""
    return os.environ.get("OCTAVO_NATIVE_ISA") or best


@functools.cache
def _load(path: Path) -> Any:
    if not path.exists():
        remedy = "the native library was not built; install Octavo where a C++ compiler is, or use backend='numpy'"
        raise BackendUnavailable("backend", "native", remedy)
    try:
        loaded = c.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        remedy = f"{path.name} cannot be loaded ({error}); build it again, or use backend='numpy'"
        raise BackendUnavailable("backend", "native", remedy) from error
    if loaded.octavo_abi_version() != ABI_VERSION:
        raise BackendUnavailable("backend", "native", f"{path.name} is of another version; build it again")
    return loaded


def most_sink_tokens() -> int:
    """That attention takes; 0 in libraries from before it did."""
    return int(getattr(library(), "octavo_most_sink_tokens", lambda: 0)())


def gives_mass() -> bool:
    """Whether the library knows what is looked at, and keeps that; one from before does not."""
    return hasattr(library(), "octavo_kv_keep")


def step_size() -> int:
    """Of its step record."""
    return c.sizeof(Step) if gives_mass() else Step.shifts.offset


def check(result: int, field: str = "native") -> int:
    """`result` of a library call, or InvalidInput with the library's reason when it is negative."""
    if result < 0:
        raise InvalidInput(field, result, library().octavo_error().decode())
    return result


def close_with(owner: object, close: Callable[[int], None], handle: int) -> None:
    """Call `close(handle)` when `owner` goes; not when the interpreter ends: a thread may still be in the library."""
    weakref.finalize(owner, close, handle).atexit = False
