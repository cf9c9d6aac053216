"""GGUF files that are sound: every value type, every layout detail."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_files import ARRAY, STRING, field, gguf, tensor, tensors_f32

from octavo.core.errors import InvalidInput
from octavo.weights.gguf import GgufFile
from octavo.weights.tensors import WeightSource

RANGES = {0: (0, 255), 1: (-128, 127), 2: (0, 2**16 - 1), 3: (-(2**15), 2**15 - 1), 4: (0, 2**32 - 1),
          5: (-(2**31), 2**31 - 1), 10: (0, 2**64 - 1), 11: (-(2**63), 2**63 - 1)}  # fmt: skip


ITEMS: dict[int, st.SearchStrategy[Any]] = {
    **{kind: st.integers(*bounds) for kind, bounds in RANGES.items()},
    6: st.floats(width=32, allow_nan=False),
    7: st.booleans(),
    STRING: st.text(max_size=9),
    12: st.floats(allow_nan=False),
}
KINDS = st.sampled_from(sorted(ITEMS))
SCALARS = KINDS.flatmap(lambda kind: st.tuples(st.just(kind), ITEMS[kind]))
ARRAYS = KINDS.flatmap(
    lambda kind: st.tuples(st.just(ARRAY), st.tuples(st.just(kind), st.lists(ITEMS[kind], max_size=5)))
)
KEYS = st.text(min_size=1, max_size=9)
Fields = dict[str, tuple[int, Any]]


@settings(max_examples=50, deadline=None)
@given(fields=st.dictionaries(KEYS, SCALARS | ARRAYS, max_size=6))
def test_every_value_type_reads_back(fields: Fields, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    path.write_bytes(gguf([field(key, kind, item) for key, (kind, item) in fields.items()], []))
    with GgufFile(path) as file:
        read = file.metadata
    assert list(read) == list(fields)
    for key, (kind, item) in fields.items():
        assert plain(read[key]) == (item[1] if kind == ARRAY else item)


def plain(item: Any) -> Any:
    return item.tolist() if isinstance(item, array) else item


def test_a_file_of_the_formats_own_writer_reads_back(tmp_path: Path) -> None:
    path, rng = tmp_path / "m.gguf", np.random.default_rng(0)
    first, second = rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=5).astype(np.float16)
    writer = GGUFWriter(path, "llama")
    writer.add_array("words", ["a", "", "ä\u0000🙂"])
    writer.add_tensor("first", first)
    writer.add_tensor("second", second)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile(path) as file:
        assert isinstance(file, WeightSource)
        assert file.metadata["words"] == ["a", "", "ä\u0000🙂"]
        assert file.names() == ["first", "second"]
        assert (file.info("first").shape, file.info("second").dtype) == ((3, 4), "F16")
        assert np.array_equal(file.read("first"), first)
        assert np.array_equal(file.read("second"), second.astype(np.float32))


def test_alignment_and_gaps_are_honoured(tmp_path: Path) -> None:
    fields = [field("general.alignment", 4, 64)]
    data = np.arange(2, dtype="<f4").tobytes() + bytes(120) + np.arange(7, 9, dtype="<f4").tobytes()
    infos = [tensor("late", (2,), 0, 128), tensor("early", (2, 1), 0, 0)]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(fields, infos, data, alignment=64))
    with GgufFile(path) as file:
        assert file.read("late").tolist() == [7.0, 8.0]
        assert file.read("early").tolist() == [[0.0, 1.0]]


def test_a_slice_is_a_row_of_the_whole(tmp_path: Path) -> None:
    stacked = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([], *tensors_f32({"experts": stacked})))
    with GgufFile(path) as file:
        for index in range(3):
            assert np.array_equal(file.read_slice("experts", index), stacked[index])
        with pytest.raises(InvalidInput, match="index into experts"):
            file.read_slice("experts", 3)


def test_what_is_read_is_the_callers_own_and_outlives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([], *tensors_f32({"x": np.ones((2, 2), np.float32)})))
    with GgufFile(path) as file:
        first = file.read("x")
        first += 1
        assert file.read("x").sum() == 4
    assert first.sum() == 8
    with pytest.raises(InvalidInput, match="closed"):
        file.read("x")
    with pytest.raises(InvalidInput, match="nothere"):
        file.info("nothere")


def test_a_type_that_we_do_not_decode_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf([], [tensor("x", (256,), 23, 0)], bytes(136)))
    with pytest.raises(InvalidInput, match=r"IQ4_XS.*use a file with F32"):
        GgufFile(path)
