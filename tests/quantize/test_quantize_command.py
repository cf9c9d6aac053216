"""`octavo quantize` and `octavo inspect` on tiny folders: files, numbers, refusals, and the table of operand types."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from small_models import LLAMA, MOE, VOCAB, write_model

from octavo.backends.operand_types import OPERANDS, packed_bytes
from octavo.cli.main import main
from octavo.weights.quant.targets import TARGETS

TINY = str(Path(__file__).resolve().parents[2] / "fixtures" / "tiny_model.json")


@pytest.fixture
def octavo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command line in this process; (exit code, output, errors)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["octavo", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as end:
            main()
            raise SystemExit(0)
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a tokenizer of one token for each character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = [chr(c) for c in range(33, 33 + VOCAB - 1)]
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(["Ġ", *characters])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    path = write_model(tmp_path / "model", LLAMA)
    core.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_quantize_writes_a_folder_that_runs(octavo: Any, folder: Path, tmp_path: Path, method: str) -> None:
    out, text = tmp_path / "out", tmp_path / "text"
    text.write_text("The first and the last. " * 8)
    flags = ("--to", "w4g32", "--method", method, "--out", out, "--text", text, "--max-tokens", 120)
    code, shown, _ = octavo("quantize", folder, *flags)
    assert code == 0
    assert all(word in shown for word in ("KL ", "tok/s as bf16 before", "perplexity ", "w4g32 by " + method))
    assert sorted(path.name for path in out.iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]
    code, shown, _ = octavo("run", "--model", out, "--backend", "numpy", "--raw", "--max-tokens", 4, "The last")
    assert code == 0 and shown.strip()
    code, _, error = octavo("quantize", folder, *flags)
    assert code == 2 and "not empty" in error


def test_quantize_says_the_numbers_as_json(octavo: Any, folder: Path, tmp_path: Path) -> None:
    _, shown, _ = octavo("quantize", folder, "--to", "w8g64", "--out", tmp_path / "out", "--json", "--max-tokens", 60)
    value = json.loads(shown)
    assert value["bytes_after"] == (tmp_path / "out" / "model.safetensors").stat().st_size < value["bytes_before"]
    assert len(value["matrices"]) == 14 and 0 < value["kl_mean"] < 0.1 and value["positions"] == 60
    assert [speed["format"] for speed in value["speeds"]] == ["bf16", "w8g64"]
    assert all(speed["decode"] > 0 and speed["prefill"] > 0 for speed in value["speeds"])


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--to", "w9"), "to"),
        (("--method", "magic"), "method"),
        (("--alpha", "2"), "alpha"),
        (("--max-tokens", "1"), "max_tokens"),
        ((), "out"),
    ],
)
def test_quantize_refuses_by_name(octavo: Any, folder: Path, tmp_path: Path, flags: tuple[str, ...], field: str) -> None:  # fmt: skip  # noqa: E501
    where = ("--out", tmp_path / "out") if flags else ()
    code, _, error = octavo("quantize", folder, *where, *flags)
    assert code == 2 and field in error.replace("-", "_") and not (tmp_path / "out").exists()


def test_inspect_lists_what_multiplies_what(octavo: Any, folder: Path) -> None:
    code, shown, _ = octavo("inspect", folder, "--format", "w4g32", "--json")
    uses = json.loads(shown)["matrices"]
    assert code == 0 and [use["use"] for use in uses] == ["embed", *["linear"] * 14, "head"]
    for use in uses[1:-1]:
        assert use["stored"] == "F32" and use["stored_bytes"] == 4 * use["shape"][0] * use["shape"][1]
        assert use["format"] == "w4g32" and use["operands"] == "uint4 as uint8 x int8 -> int32"
    assert uses[-1]["format"] == "w8g64" and uses[0]["bytes_per_token"] < 4 * 64
    assert "stored" in octavo("inspect", folder)[1]


def test_inspect_counts_the_experts_that_a_token_reads(octavo: Any, tmp_path: Path) -> None:
    _, shown, _ = octavo("inspect", write_model(tmp_path, MOE), "--format", "bf16", "--json")
    experts = [use for use in json.loads(shown)["matrices"] if use["use"] == "expert"]
    assert len(experts) == 2 * 4 * 3
    assert all(use["bytes_per_token"] == packed_bytes(use["shape"], "bf16") / 2 for use in experts)  # 2 of 4
    routers = [use for use in json.loads(shown)["matrices"] if use["use"] == "router"]
    assert {use["format"] for use in routers} == {"fp32"} and len(routers) == 2


def test_inspect_shows_the_program_and_finds_no_difference(octavo: Any) -> None:
    assert "0  embed(batch.token_ids" in octavo("inspect", TINY, "--program")[1]
    assert "agree in all" in octavo("inspect", TINY, "--diff", "reference,numpy")[1]
    code, _, error = octavo("inspect", TINY, "--diff", "native,native")
    assert code == 2 and "reference" in error


def test_inspect_names_the_first_op_that_differs(octavo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.backends.numpy_backend import NumpyBackend

    right = NumpyBackend.gated_activation
    monkeypatch.setattr(NumpyBackend, "gated_activation", lambda *a, **k: right(*a, **k) * 1.01)
    assert "(gated_activation) differs by" in octavo("inspect", TINY, "--diff", "reference,numpy")[1]


def test_operand_table_and_sizes_by_hand() -> None:
    assert set(TARGETS) <= set(OPERANDS)
    for name, target in TARGETS.items():
        o = OPERANDS[name]
        assert (o.code_bits, o.group) == (target.bits, target.group_size)
        assert o.activations == ("int8" if target.activation_bits == 8 else "bf16")
    assert packed_bytes((64, 128), "fp32") == 64 * 128 * 4
    assert packed_bytes((65, 33), "bf16") == 128 * 64 * 2  # two panels, inputs padded to 64
    assert packed_bytes((64, 100), "w8g64") == 64 * (128 + 2 * 2)
    assert packed_bytes((64, 100), "w8pc") == 64 * (128 + 4)
    assert packed_bytes((64, 64), "w4g32") == 64 * (32 + 2 * 4)
    assert packed_bytes((1, 1), "w4g128") == 64 * (64 + 4)
