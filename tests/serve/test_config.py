"""A server's configuration: what cannot be is refused by name, before anything starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidInput
from octavo.engine.config import EngineConfig
from octavo.engine.memory import parse_size
from octavo.serve.config import ServeConfig

NUMBERS = [
    (kind, field.name)
    for kind in (ServeConfig, EngineConfig)
    for field in dataclasses.fields(kind)
    if field.type in ("int", "float")
]


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=[name for _, name in NUMBERS])
def test_every_number_has_bounds(kind: Any, name: str) -> None:
    wrong = [-1] if isinstance(getattr(kind(), name), int) else [-1.0, float("nan"), float("inf")]
    for value in wrong:
        with pytest.raises(InvalidInput) as caught:
            kind(**{name: value})
        assert caught.value.field in (name, name.removeprefix("priority_")) and caught.value.remedy


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"host": ""}, "host"), ({"host": " "}, "host"), ({"allowed_hosts": "*"}, "allowed_hosts"),
        ({"allowed_hosts": "a, https://b"}, "allowed_hosts"), ({"allowed_hosts": "box:8000"}, "allowed_hosts"),
        ({"allowed_hosts": "[::1]"}, "allowed_hosts"), ({"max_stop_strings": 17}, "max_stop_strings"),
        ({"max_top_logprobs": 21}, "max_top_logprobs"), ({"max_choices": 65}, "max_choices"),
        ({"max_request_memory": "9" * 400}, "max_request_memory"), ({"max_pending": 1 << 80}, "max_pending"),
    ],
)  # fmt: skip
def test_what_would_never_work_is_refused_at_the_start(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        ServeConfig(**values)
    assert caught.value.field == field
    assert ServeConfig(allowed_hosts="Box.lan, ::2,10.0.0.7,").host_names == ("box.lan", "::2", "10.0.0.7")


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tenant_weights": "a=" + "9" * 5000}, "tenant_weights"), ({"kv_memory": "9" * 400}, "kv_memory"),
        ({"disk_kv": "x", "host_kv_memory": "1MB", "disk_kv_memory": ""}, "disk_kv_memory"),
    ],
)  # fmt: skip
def test_an_engine_that_would_never_work_is_refused_at_the_start(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        EngineConfig(**values)
    assert caught.value.field == field


@given(
    st.text(alphabet="0123456789.kmgtib \u0661\u00b2e+-", max_size=12)
    | st.text(alphabet="9", min_size=300, max_size=400)
)
def test_a_size_is_a_size_or_refused(text: str) -> None:
    try:
        size = parse_size(text)
    except InvalidInput as error:
        assert len(str(error)) < 400
    else:
        assert 1 <= size < 1 << 63
