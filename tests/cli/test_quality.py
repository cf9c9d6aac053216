"""The bars of `make quality`, and what is read from the peer's tools."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import quality
import quality_peer
from quality import Loss, gates
from quality_peer import PeerLoss, Tools


def loss(kl: float) -> Loss:
    return Loss(kl, 0.0001, 20.0, 0.9)


@pytest.mark.parametrize(
    ("w8g64", "int8", "w4g32", "fp32", "met"),
    [
        (0.0059, 0.0078, 0.19, 0.0019, [True, True, True, True]),
        (0.0061, 0.0082, 0.21, 0.0021, [False, False, False, False]),
    ],
)
def test_the_bars(w8g64: float, int8: float, w4g32: float, fp32: float, met: list[bool]) -> None:
    ours = {("w8g64", "bf16"): w8g64, ("w8g64", "int8"): int8, ("w4g32", "bf16"): w4g32, ("fp32", "int8"): fp32}
    peers = {"Q8_0": PeerLoss(0.004, 0.0, 20.0), "Q4_0": PeerLoss(0.2, 0.0, 20.0)}
    losses = {which: loss(kl) for which, kl in ours.items()}
    assert [gate.met for gate in gates(losses, peers)] == met
    assert len(gates(losses, {})) == 2


def test_a_loss_is_the_mean_over_positions() -> None:
    found = quality._loss(np.array([0.1, 0.3]), np.log([0.25, 0.25]), np.array([True, False]))
    assert found.kl == pytest.approx(0.2) and found.perplexity == pytest.approx(4) and found.same_top == 0.5


def test_what_the_peer_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "Mean PPL(Q)                   :  37.418952 ±   0.9\nMean    KLD:   0.004462 ±   0.000040\nMaximum KLD: 1\n"
    monkeypatch.setattr(Tools, "_run", lambda self, tool, arguments: said)
    tools = Tools(tmp_path, tmp_path, 2, lambda line: None)
    assert tools.loss(tmp_path / "Q8_0.gguf", tmp_path / "text", 4) == PeerLoss(0.004462, 0.00004, 37.418952)
    (tmp_path / "base.kld").write_bytes(struct.pack("<8siii8i", b"_logits_", 4, 9, 2, *range(8)))
    assert quality_peer._chunks(tmp_path / "base.kld") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    monkeypatch.setattr(Tools, "_run", lambda self, tool, arguments: "Mean KLD: none")
    with pytest.raises(SystemExit, match="did not say"):
        tools.loss(tmp_path / "Q8_0.gguf", tmp_path / "text", 4)
