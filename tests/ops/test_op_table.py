"""The op table is the one declaration: every backend has its methods and its parameter names."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from test_backends_agree import COMPARISONS

from octavo.backends import BACKENDS, available_backends, create_backend
from octavo.backends.ops import OPS, batch_fields
from octavo.core.errors import InvalidInput, InvariantBroken

USED = {name for name, spec in OPS.items() if spec.used}


def test_every_used_op_is_compared_and_nothing_else() -> None:
    assert set(COMPARISONS) == USED


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_have_the_used_ops_with_the_declared_parameters(name: str) -> None:
    backend = create_backend(name)
    reference = create_backend("reference")
    for op in USED:
        spec = OPS[op]
        parameters = list(inspect.signature(getattr(backend, op)).parameters)
        assert set(parameters) == {t.name for t in spec.inputs} | set(spec.attrs), op
        assert parameters == list(inspect.signature(getattr(reference, op)).parameters), op
    for op in set(OPS) - USED:
        assert not hasattr(backend, op), f"{op} has an implementation: declare it used, and compare it"


def test_declared_names_follow_the_design() -> None:
    declared = """embed rms_norm layer_norm linear qk_norm rope write_kv attention latent_attention scan
        gated_activation moe add scale select_rows logits process_logits sample logprobs pool copy_pages
        move_slots compact swap_out swap_in
        all_reduce all_gather send recv"""
    assert set(OPS) == set(declared.split())


def test_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(InvalidInput, match="did you mean 'numpy'"):
        create_backend("nunpy")
    with pytest.raises(InvalidInput, match="known: reference, numpy"):
        create_backend("zzz")
    assert available_backends()[:2] == ("reference", "numpy")
    assert create_backend("auto").name == available_backends()[-1]


def test_the_reference_backend_needs_no_third_party_package() -> None:
    code = "import sys, octavo.backends as b; b.create_backend('reference'); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_batch_fields() -> None:
    fields = batch_fields([7, 8, 9], [2, 3, 0], [2, 1], [[[5, 6], [4]]], 3, [False, True])
    assert fields["cu_seqlens_q"] == [0, 2, 3]
    assert fields["seq_lens"] == [4, 1]
    assert fields["slot_mapping"] == [[17, 18, -1]]
    with pytest.raises(InvariantBroken, match="freed page"):
        batch_fields([7], [0], [1], [[[-1]]], 4)
