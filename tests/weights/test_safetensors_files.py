"""safetensors: our reader and writer against the format's own package, and against each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from weight_files import entry, safetensors

from octavo.core.errors import InvalidInput
from octavo.weights.safetensors import SafetensorsFile, ShardedSafetensors, open_safetensors, write_safetensors
from octavo.weights.tensors import MappedFile

DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1", "?"]


def random_tensors(seed: int, shapes: list[list[int]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = [np.asarray(rng.normal(size=shape) * 50, DTYPES[i % len(DTYPES)]) for i, shape in enumerate(shapes)]
    return {f"layer.{i}.weight": array for i, array in enumerate(made)}


shapes = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=9)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), shapes=shapes)
def test_what_either_side_writes_the_other_reads(
    seed: int, shapes: list, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, tensors = tmp_path_factory.mktemp("st"), random_tensors(seed, shapes)
    write_safetensors(folder / "ours.safetensors", tensors, {"format": "pt"})
    save_file(tensors, folder / "theirs.safetensors", {"format": "pt"})
    theirs = load_file(folder / "ours.safetensors")
    for name, array in tensors.items():
        assert theirs[name].dtype == array.dtype
        assert np.array_equal(theirs[name], array)
    for path in (folder / "ours.safetensors", folder / "theirs.safetensors"):
        with SafetensorsFile(path) as file:
            assert sorted(file.names()) == sorted(tensors)
            assert file.metadata == {"format": "pt"}
            for name, array in tensors.items():
                assert file.info(name).shape == array.shape
                assert np.array_equal(file.read(name), array.astype(np.float32))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 999), shapes=shapes, limit=st.integers(1, 300))
def test_shards_read_as_one(seed: int, shapes: list, limit: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, tensors = tmp_path_factory.mktemp("st"), random_tensors(seed, shapes)
    write_safetensors(folder, tensors, max_shard_bytes=limit)
    for shard in folder.glob("*.safetensors"):
        held = load_file(shard)
        assert len(held) == 1 or sum(array.nbytes for array in held.values()) <= limit
    with open_safetensors(folder) as source:
        assert isinstance(source, ShardedSafetensors)
        assert source.names() == list(tensors)
        for name, array in tensors.items():
            assert np.array_equal(source.read(name), array.astype(np.float32))


def stored(tmp_path: Path, dtype: str, raw: np.ndarray, count: int) -> np.ndarray:
    path = tmp_path / f"{dtype}.safetensors"
    path.write_bytes(safetensors({"x": entry(0, raw.nbytes, [count], dtype)}, raw.tobytes()))
    with SafetensorsFile(path) as file:
        return file.read("x")


def test_bf16_is_the_upper_half_of_a_float(tmp_path: Path) -> None:
    codes = np.arange(1 << 16, dtype="<u2")
    assert np.array_equal(stored(tmp_path, "BF16", codes, codes.size).view(np.uint32), codes.astype(np.uint32) << 16)


def test_fp8_values(tmp_path: Path) -> None:
    codes = np.arange(256, dtype=np.uint8)
    e4m3, e5m2 = stored(tmp_path, "F8_E4M3", codes, 256), stored(tmp_path, "F8_E5M2", codes, 256)
    assert [e4m3[c] for c in (0x00, 0x01, 0x08, 0x38, 0x39, 0x7E, 0xB8)] == [0, 2**-9, 2**-6, 1, 1.125, 448, -1]
    assert np.flatnonzero(np.isnan(e4m3)).tolist() == [0x7F, 0xFF]
    assert [e5m2[c] for c in (0x00, 0x01, 0x3C, 0x7B, 0x7C, 0xC0)] == [0, 2**-16, 1, 57344, np.inf, -2]
    assert np.signbit(e4m3[0x80])


def test_a_folder_without_weights_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"model\.safetensors"):
        open_safetensors(tmp_path)


def test_the_writer_refuses_what_the_format_lacks(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="complex128"):
        write_safetensors(tmp_path / "x.safetensors", {"x": np.ones(2, np.complex128)})


def test_a_view_that_an_error_holds_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"four")
    mapped = MappedFile(tmp_path / "bytes", 1)
    view = mapped.array_at(0, 4)
    mapped.close()
    mapped.close()
    assert view.tobytes() == b"four"
    with pytest.raises(InvalidInput, match="closed"):
        mapped.array_at(0, 4)
