"""What `--format auto` stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import LLAMA, texts, write_model
from stored_checkpoints import awq_tensors, compressed_config, gptq_tensors, packed_tensors, random_matrix, write_folder

from octavo.backends.native_formats import AUTO_TABLE
from octavo.backends.native_lib import library
from octavo.engine import memory
from octavo.engine.config import EngineConfig
from octavo.engine.formats import choose_format, packed_size, resolve_auto
from octavo.engine.loader import _FileSource
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model
from octavo.weights.names import open_weights
from octavo.weights.quant.job import Plan, QuantizeJob
from octavo.weights.quant.targets import TARGETS, find_target

SHAPES = {"model.embed_tokens.weight": (4096, 512), "a.weight": (2048, 512), "b.weight": (512, 2048), "norm": (512,)}


@pytest.mark.parametrize(
    ("of", "share", "kind"),
    [
        *[("bf16", 2.01, "bf16"), ("bf16", 1.99, "w8g64"), ("w8g64", 2.01, "w8g64"), ("w8g64", 1.99, "w4g32")],
        ("w4g32", 0.1, "w4g32"),
    ],
)
def test_the_first_that_fits_half_of_the_memory(of: str, share: float, kind: str) -> None:
    memory = int(packed_size(SHAPES, of) * share)
    assert choose_format("", SHAPES, "amx", memory)[0] == kind
    assert choose_format("w4g128", SHAPES, "amx", memory)[0] == "w4g128"


def test_memory_that_is_not_known_is_enough() -> None:
    assert choose_format("", SHAPES, "amx", None)[0] == "bf16"


def test_every_kernel_table_has_a_row() -> None:
    assert set(library().octavo_isas().decode().split()) <= set(AUTO_TABLE)
    found = {isa: choose_format("", SHAPES, isa, None)[0] for isa in AUTO_TABLE}
    assert [isa for isa, kind in found.items() if kind == "w8g64"] == ["avx2_vnni", "neon_dotprod"]
    assert set(found.values()) == {"bf16", "w8g64"}


def test_the_answer_does_not_depend_on_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_of_machine", lambda root, field: {"MemTotal:": 1 << 40}.get(field, 1))
    monkeypatch.setenv("OCTAVO_NATIVE_ISA", "avx512")
    model = build_model(ModelConfig.from_dict(LLAMA))
    kind, line = resolve_auto("", model)
    assert kind == "bf16" and line.startswith("format auto: bf16 (avx512, ")


def test_what_a_model_weighs() -> None:
    # the output matrix and embedding keep 8 bits beside linear layers of 4
    assert packed_size(SHAPES, "w4g32") == 4096 * 512 * 66 // 64 + 2 * 2048 * 512 * 5 // 8 + 2048


def gptq(bits: int, size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": "gptq", **more}


def packed(bits: int, size: int) -> dict[str, Any]:
    return compressed_config("pack-quantized", num_bits=bits, symmetric=True, strategy="group", group_size=size)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
M = random_matrix


@pytest.mark.parametrize(
    ("tensors", "config", "kind"),
    [
        (gptq_tensors(M(1, 4, 8, 256, 128), shift=1, with_index=True), gptq(4, 128), "w4a16g128"),
        (gptq_tensors(M(1, 4, 8, 192, 64), shift=1, with_index=False), gptq(4, 64), "w4a16g64"),
        (gptq_tensors(M(1, 4, 8, 256, 256), shift=1, with_index=False), gptq(4, -1), "w4a16g128"),
        (gptq_tensors(M(1, 4, 8, 256, 128, shuffled=True), shift=1, with_index=True), gptq(4, 128), ""),
        (gptq_tensors(M(1, 4, 8, 64, 16), shift=1, with_index=False), gptq(4, 16), ""),
        (awq_tensors(M(1, 4, 8, 64, 32)), AWQ, "w4a16g32"),
        (packed_tensors(M(1, 8, 8, 128, 64), symmetric=True), packed(8, 64), "w8g64"),
        (
            {"weight": np.ones((8, 64), np.int8), "weight_scale": np.ones((8, 1), np.float32)},
            compressed_config("int-quantized", num_bits=8, symmetric=True, strategy="channel"),
            "w8pc",
        ),
    ],
)
def test_the_own_format_of_a_checkpoint(tmp_path: Path, tensors: Any, config: Any, kind: str) -> None:
    with open_weights(write_folder(tmp_path, tensors, config)) as source:
        assert source.own_format() == kind


@pytest.mark.parametrize("kind", TARGETS)
def test_what_octavo_wrote_runs_as_it_was_made_for(tmp_path: Path, kind: str) -> None:
    with open_weights(write_model(tmp_path / "source", LLAMA)) as source:
        assert source.own_format() == ""
        QuantizeJob(source, Plan(find_target(kind), "rtn"), tmp_path / "made").run(texts(1, 1, 32))
    source, said = _FileSource("made", tmp_path / "made"), []
    config = EngineConfig(model="made", backend="native")
    assert source.with_format(config, said.append).format == kind
    assert said == [f"format auto: {kind} (as the checkpoint is stored)"]
    named = EngineConfig(model="made", backend="native", format="w8pc")
    assert source.with_format(named, said.append) is named and len(said) == 1
    source.close()
