"""A model file is untrusted: each lie is refused by name, quickly, and without memory that the file does not have."""

from __future__ import annotations

import os
import struct
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_files import ARRAY, STRING, entry, field, gguf, safetensors, string, tensor, tensors_f32, vocabulary

from octavo.core.errors import InvalidInput
from octavo.weights.config import load_config_dict
from octavo.weights.gguf import GgufFile
from octavo.weights.safetensors import INDEX_NAME, SafetensorsFile, ShardedSafetensors
from octavo.weights.tensors import CorruptFile

HUGE = [2**31, 2**32 - 1, 2**62, 2**63 - 8, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]
SLACK = 256 << 10  # what Python itself needs for a parse of nothing


def refused(make: Callable[[Path], Any], path: Path, content: bytes, *words: str) -> None:
    """Opening raises `CorruptFile` whose message holds `words`, with memory bounded by the file."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFile) as caught:
            make(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(content) + SLACK
    assert caught.value.path == path
    for word in (path.name, *words):
        assert word in str(caught.value)


def gguf_cases() -> dict[str, tuple[bytes, tuple[str, ...]]]:
    one = tensor("x", (4,), 0, 0)
    data = bytes(16)
    cases: dict[str, tuple[bytes, tuple[str, ...]]] = {
        "empty": (b"", ("file size", "0")),
        "short": (b"GGUF\x03", ("file size",)),
        "magic": (b"GGUX" + bytes(60), ("magic", "GGUX")),
        "version 1": (gguf([], [one], data, version=1), ("version", "1")),
        "big-endian": (gguf([], [one], data, version=3 << 24), ("version", "big-endian")),
        "no bytes after counts": (gguf([], [], counts=(1, 0))[:24], ("tensor count", "1")),
        "value type": (gguf([string("k") + struct.pack("<I", 13) + bytes(16)], []), ("k type", "13")),
        "bool of 2": (gguf([string("k") + struct.pack("<IB", 7, 2)], [], bytes(8)), ("k", "2")),
        "bools of 9": (gguf([string("k") + struct.pack("<IIQ2B", ARRAY, 7, 2, 1, 9)], [], bytes(8)), ("k", "9")),
        "nested array": (gguf([field("k", ARRAY, (ARRAY, [(4, [1])]))], []), ("k element type", "nest")),
        "duplicate key": (gguf([field("k", 4, 1), field("k", 4, 2)], []), ("key", "'k'", "twice")),
        "empty key": (gguf([field("", 4, 1)], [], bytes(32)), ("key", "empty")),
        "key not UTF-8": (gguf([field(b"\xff\xfe", 4, 1)], [], bytes(32)), ("key", "UTF-8")),
        "string not UTF-8": (gguf([field("k", STRING, b"\xc3(")], []), ("k", "UTF-8")),
        "item not UTF-8": (gguf([field("k", ARRAY, (STRING, [b"a", b"\xff"]))], []), ("k[1]", "UTF-8")),
        "long key": (gguf([field("k" * 300, 4, 1)], []), ("key length", "300")),
        "duplicate tensor": (gguf([], [one, tensor("x", (4,), 0, 32)], bytes(48)), ("tensor name", "'x'", "twice")),
        "unnamed tensor": (gguf([], [tensor("", (4,), 0, 0)], data), ("dimensions", "name")),
        "no dimension": (gguf([], [tensor("x", (), 0, 0) + bytes(8)], data), ("'x'", "dimensions", "0")),
        "five dimensions": (gguf([], [tensor("x", (1,) * 5, 0, 0)], data), ("dimensions", "5")),
        "zero dimension": (gguf([], [tensor("x", (4, 0), 0, 0)], data), ("dimensions", "[4, 0]")),
        "unknown type": (gguf([], [tensor("x", (4,), 99, 0)], data), ("type", "99", "Q4_K")),
        "removed type": (gguf([], [tensor("x", (32,), 4, 0)], bytes(32)), ("type", "4")),
        "row not whole blocks": (gguf([], [tensor("x", (33,), 8, 0)], bytes(68)), ("row length", "33", "Q8_0")),
        "misaligned": (gguf([], [tensor("x", (4,), 0, 8)], bytes(64)), ("offset", "8", "32")),
        "past the end": (gguf([], [tensor("x", (5,), 0, 0)], data), ("end", "4 bytes past")),
        "starts past the end": (gguf([], [tensor("x", (4,), 0, 1 << 40)], data), ("end", "past")),
        "overlap": (gguf([], [tensor("x", (9,), 0, 0), tensor("y", (4,), 0, 32)], bytes(48)), ("'y'", "overlaps")),
        "same place": (gguf([], [one, tensor("y", (4,), 0, 0)], data), ("overlaps",)),
        "product wraps to 4": (gguf([], [tensor("x", (2**62 + 1, 4), 0, 0)], data), ("dimensions", "2^62")),
        "product wraps to 0": (gguf([], [tensor("x", (2**32, 2**32), 0, 0)], data), ("dimensions", "2^62")),
    }
    for value in (0, 3, 33, 1 << 20):
        cases[f"alignment {value}"] = (gguf([field("general.alignment", 4, value)], []), ("alignment", str(value)))
    cases["alignment text"] = (gguf([field("general.alignment", STRING, "32")], []), ("alignment", "'32'"))
    for size in HUGE:
        cases[f"{size} tensors"] = (gguf([], [one], data, counts=(size, 0)), ("tensor count", str(size)))
        cases[f"{size} keys"] = (gguf([], [one], data, counts=(1, size)), ("key count", str(size)))
        long_key = struct.pack("<Q", size) + b"k" + bytes(40)
        cases[f"key of {size}"] = (gguf([long_key], []), ("key length", str(size)))
        long_string = string("k") + struct.pack("<IQ", STRING, size) + bytes(40)
        cases[f"string of {size}"] = (gguf([long_string], []), ("k length", str(size)))
        for kind in (0, 4, STRING, 12):
            long_array = string("k") + struct.pack("<IIQ", ARRAY, kind, size) + bytes(40)
            cases[f"array {kind} of {size}"] = (gguf([long_array], []), ("k length", str(size)))
        long_item = string("k") + struct.pack("<IIQQ", ARRAY, STRING, 2, size) + bytes(40)
        cases[f"item of {size}"] = (gguf([long_item], []), ("k[0] length", str(size)))
        cases[f"rank {size}"] = (
            gguf([], [string("x") + struct.pack("<I", size % 2**32 or 7) + bytes(60)]),
            ("dimens",),
        )
        cases[f"dimension {size}"] = (gguf([], [tensor("x", (size,), 0, 0)], data), ("'x'",))
        cases[f"offset {size}"] = (gguf([], [tensor("x", (4,), 0, size & ~31)], data), ("'x'", "past"))
    return cases


GGUF_CASES = gguf_cases()


@pytest.mark.parametrize("case", GGUF_CASES)
def test_hostile_gguf_is_refused(case: str, tmp_path: Path) -> None:
    content, words = GGUF_CASES[case]
    refused(GgufFile, tmp_path / "m.gguf", content, *words)


TOKENS = ["<unk>", "a", "<0x0A>"]
VOCABULARIES: dict[str, tuple[list[bytes], str]] = {
    "no tokens": (vocabulary([]), "tokens"),
    "tokens are numbers": ([field("tokenizer.ggml.tokens", ARRAY, (4, [1, 2]))], "tokens"),
    "tokens are text": ([field("tokenizer.ggml.tokens", STRING, "abc")], "tokens"),
    "a token of 100,000 characters": (vocabulary(["a", "b" * 100_000]), "too many characters"),
    "scores short": (vocabulary(TOKENS, scores=(ARRAY, (6, [0.0, 1.0]))), "scores"),
    "scores are integers": (vocabulary(TOKENS, scores=(ARRAY, (5, [0, 1, 2]))), "scores"),
    "scores are a number": (vocabulary(TOKENS, scores=(6, 1.0)), "scores"),
    "a score is NaN": (vocabulary(TOKENS, scores=(ARRAY, (6, [0.0, float("nan"), 1.0]))), "finite"),
    "a score is infinite": (vocabulary(TOKENS, scores=(ARRAY, (6, [0.0, float("-inf"), 1.0]))), "finite"),
    "types long": (vocabulary(TOKENS, token_type=(ARRAY, (5, [1, 1, 1, 1]))), "token_type"),
    "type -1": (vocabulary(TOKENS, token_type=(ARRAY, (5, [1, -1, 1]))), "token_type"),
    "type 7": (vocabulary(TOKENS, token_type=(ARRAY, (5, [1, 1, 7]))), "token_type"),
    "types are strings": (vocabulary(TOKENS, token_type=(ARRAY, (STRING, ["1", "1", "1"]))), "token_type"),
    "byte token <0x-1>": (vocabulary(["<0x-1>"], token_type=(ARRAY, (5, [6]))), "<0x-1>"),
    "byte token <0x100>": (vocabulary(["<0x100>"], token_type=(ARRAY, (5, [6]))), "<0x100>"),
    "byte token a": (vocabulary(["a"], token_type=(ARRAY, (5, [6]))), "byte token"),
    "merge without a space": (vocabulary(TOKENS, merges=(ARRAY, (STRING, ["a b", "ab"]))), "merges[1]"),
    "merge without a right part": (vocabulary(TOKENS, merges=(ARRAY, (STRING, ["a "]))), "merges[0]"),
    "merges are numbers": (vocabulary(TOKENS, merges=(ARRAY, (4, [1]))), "merges"),
    "eos outside": (vocabulary(TOKENS, eos_token_id=(4, 3)), "eos_token_id"),
    "eos negative": (vocabulary(TOKENS, eos_token_id=(5, -1)), "eos_token_id"),
    "eos near 2^64": (vocabulary(TOKENS, eos_token_id=(10, 2**64 - 1)), "eos_token_id"),
    "eos is text": (vocabulary(TOKENS, eos_token_id=(STRING, "</s>")), "eos_token_id"),
    "eos is true": (vocabulary(TOKENS, eos_token_id=(7, True)), "eos_token_id"),
    "unknown outside": (vocabulary(TOKENS, unknown_token_id=(4, 2**32 - 1)), "unknown_token_id"),
}


@pytest.mark.parametrize("case", VOCABULARIES)
def test_a_bad_vocabulary_is_refused(case: str, tmp_path: Path) -> None:
    fields, word = VOCABULARIES[case]
    refused(GgufFile, tmp_path / "m.gguf", gguf(fields, []), word)


def test_an_embedding_must_have_a_row_for_each_token(tmp_path: Path) -> None:
    infos, data = tensors_f32({"token_embd.weight": np.zeros((2, 4), np.float32)})
    refused(GgufFile, tmp_path / "m.gguf", gguf(vocabulary(TOKENS), infos, data), "token_embd.weight", "3 tokens")


def safetensors_cases() -> dict[str, tuple[bytes, tuple[str, ...]]]:
    good = {"x": entry(0, 8, [2])}
    data = bytes(8)
    cases: dict[str, tuple[bytes, tuple[str, ...]]] = {
        "empty": (b"", ("file size", "0")),
        "short": (bytes(9), ("file size", "9")),
        "not JSON": (safetensors(b"{'x': 1}"), ("header",)),
        "not UTF-8": (safetensors(b'{"\xff": 1}'), ("header",)),
        "a list": (safetensors(b"[1, 2]"), ("header", "object")),
        "cut header": (safetensors(good, data)[:40], ("header length",)),
        "duplicate": (safetensors(b'{"x": {}, "x": {}}'), ("header", "duplicate key 'x'")),
        "deep": (safetensors(b'{"x":' + b"[" * 12_000 + b"]" * 12_000 + b"}"), ("header", "deep")),
        "dense": (safetensors(b'{"x":[' + b"[]," * 30_000 + b"0]}"), ("header", "dense")),
        "number of 5,000 digits": (safetensors(b'{"x":' + b"9" * 5000 + b"}"), ("header",)),
        "NaN": (safetensors(b'{"x": NaN}'), ("header", "NaN")),
        "entry is a number": (safetensors({"x": 1}), ("'x'", "dtype")),
        "key missing": (safetensors({"x": {"dtype": "F32", "shape": [2]}}, data), ("'x'", "data_offsets")),
        "key too many": (safetensors({"x": {**entry(0, 8, [2]), "code": "y"}}, data), ("'x'", "exactly")),
        "metadata of numbers": (safetensors({"__metadata__": {"a": 1}}, b""), ("__metadata__",)),
        "gap": (safetensors({"x": entry(8, 16, [2])}, bytes(16)), ("'x'", "gap")),
        "overlap": (safetensors({"x": entry(0, 8, [2]), "y": entry(4, 12, [2])}, bytes(12)), ("'y'", "overlaps")),
        "same place": (safetensors({"x": entry(0, 8, [2]), "y": entry(0, 8, [2])}, data), ("overlaps",)),
        "data missing": (safetensors(good, bytes(7)), ("file size", "end at byte")),
        "data left over": (safetensors(good, bytes(9)), ("file size",)),
        "backwards": (safetensors({"x": entry(8, 0, [2])}, data), ("'x'", "data_offsets")),
        "wrong length": (safetensors({"x": entry(0, 8, [3])}, data), ("'x'", "12 bytes")),
        "nine dimensions": (safetensors({"x": entry(0, 4, [1] * 9)}, bytes(4)), ("shape",)),
    }
    for size in [0, 1, *HUGE]:
        cases[f"header of {size}"] = (safetensors(good, data, length=size), ("header length", str(size)))
    for shape in ([0], [2, 0], [-2], [2.0], ["2"], [True], [None], [2**63], [2**62, 4], "2", None, {"a": 1}, [[2]]):
        cases[f"shape {shape}"] = (safetensors({"x": entry(0, 8, shape)}, data), ("'x'",))  # type: ignore[arg-type]
    for dtype in ("F33", "f32", "", None, 7, ["F32"], {"F32": 1}):
        cases[f"dtype {dtype}"] = (safetensors({"x": entry(0, 8, [2], dtype)}, data), ("dtype",))  # type: ignore[arg-type]
    for offsets in ([0], [0, 8, 8], [-8, 0], [0.0, 8.0], ["0", "8"], [2**64, 2**64 + 8], None, "08", [False, 8]):
        header = {"x": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}
        cases[f"offsets {offsets}"] = (safetensors(header, data), ("'x'", "data_offsets"))
    return cases


SAFETENSORS_CASES = safetensors_cases()


@pytest.mark.parametrize("case", SAFETENSORS_CASES)
def test_hostile_safetensors_is_refused(case: str, tmp_path: Path) -> None:
    content, words = SAFETENSORS_CASES[case]
    refused(SafetensorsFile, tmp_path / "m.safetensors", content, *words)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"{}", "weight_map"),
        (b'{"weight_map": []}', "weight_map"),
        (b'{"weight_map": {"x": 1}}', "weight_map"),
        (b'{"weight_map": {"x": "../m.safetensors"}}', "same folder"),
        (b'{"weight_map": {"x": "/etc/m.safetensors"}}', "same folder"),
        (b'{"weight_map": {"x": "model.bin"}}', "same folder"),
        (b'{"weight_map": {"y": "m.safetensors"}}', "no such tensor"),
    ],
)
def test_a_hostile_index_is_refused(content: bytes, word: str, tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(safetensors({"x": entry(0, 8, [2])}, bytes(8)))
    refused(lambda path: ShardedSafetensors(path.parent), tmp_path / INDEX_NAME, content, word)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "content"), (b"[]", "object"), (b"{", "content"), (b'{"a":' * 5000, "deep"),
        (b" " * (2 << 20), "file size"), (b'{"eos_token_id": "x"}', "eos_token_id"),
    ],
)  # fmt: skip
def test_a_hostile_config_is_refused(content: bytes, word: str, tmp_path: Path) -> None:
    refused(lambda path: load_config_dict(path.parent), tmp_path / "config.json", content, word)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path, tmp_path / "pipe.gguf", tmp_path / "missing.gguf", Path(os.devnull)):
        for reader in (GgufFile, SafetensorsFile):
            with pytest.raises(InvalidInput, match="path"):
                reader(path)


SMALL_GGUF = gguf(
    [field("general.architecture", STRING, "llama"), *vocabulary(TOKENS, scores=(ARRAY, (6, [0.0, 1.0, 2.0])))],
    *tensors_f32({"token_embd.weight": np.ones((3, 4), np.float32), "output_norm.weight": np.ones(4, np.float32)}),
)
SMALL_SAFETENSORS = safetensors({"x": entry(0, 8, [2]), "y": entry(8, 12, [2], "F16")}, bytes(12))
PATCH = st.one_of(st.binary(min_size=1, max_size=9), st.sampled_from([struct.pack("<Q", size) for size in HUGE]))
EDITS = st.lists(st.tuples(st.floats(0, 1, exclude_max=True), PATCH), min_size=1, max_size=3)


def mutated(content: bytes, edits: list[tuple[float, bytes]], cut: float) -> bytes:
    raw = bytearray(content)
    for place, patch in edits:
        at = int(place * len(raw))
        raw[at : at + len(patch)] = patch
    return bytes(raw[: int(cut * len(raw))]) if cut < 0.9 else bytes(raw)


def read_everything(reader: Any, path: Path) -> None:
    with reader(path) as file:
        for name in file.names():
            shape = file.info(name).shape
            assert file.read(name).shape == shape


@pytest.mark.parametrize(("reader", "content"), [(GgufFile, SMALL_GGUF), (SafetensorsFile, SMALL_SAFETENSORS)])
@settings(max_examples=500, deadline=None)
@given(edits=EDITS, cut=st.floats(0, 2))
def test_a_mutated_file_reads_or_is_refused(
    reader: Any, content: bytes, edits: list, cut: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.bin"
    path.write_bytes(mutated(content, edits, cut))
    tracemalloc.start()
    try:
        read_everything(reader, path)
    except InvalidInput:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2 * len(content) + SLACK


def test_the_small_files_are_sound(tmp_path: Path) -> None:
    for reader, content in ((GgufFile, SMALL_GGUF), (SafetensorsFile, SMALL_SAFETENSORS)):
        (tmp_path / "m").write_bytes(content)
        read_everything(reader, tmp_path / "m")


def test_numbers_stay_compact(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([string("k") + struct.pack("<IIQ", ARRAY, 4, 500_000) + bytes(2_000_000)], []))
    tracemalloc.start()
    with GgufFile(path) as file:
        assert isinstance(file.metadata["k"], array)
        assert len(file.metadata["k"]) == 500_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
