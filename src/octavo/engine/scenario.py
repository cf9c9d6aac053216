"""Runs a fixture's scenario: requests arrive at their step, some are cancelled, and every token is accounted for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.backends.quantization import QuantConfig, quantize, report
from octavo.core.events import EventKind, TokenEvent
from octavo.core.params import SamplingParams
from octavo.engine.fixture import Fixture
from octavo.engine.inference import InferenceEngine

__all__ = ["Outcome", "manifest", "quantization_report", "run_scenario"]


@dataclass
class Outcome:
    """What one request of a scenario came to."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    events: list[TokenEvent] = field(default_factory=list)


def run_scenario(engine: InferenceEngine, requests: Sequence[Mapping[str, Any]]) -> dict[str, Outcome]:
    """Submit every request at its ``arrival_step``, cancel where the scenario says so, and run to the end."""
    outcomes: dict[str, Outcome] = {}
    pending = sorted(requests, key=lambda r: r.get("arrival_step", 0))
    limits = {r["id"]: r["cancel_after_tokens"] for r in requests if "cancel_after_tokens" in r}
    step = 0
    while pending or engine.core.has_work:
        while pending and pending[0].get("arrival_step", 0) <= step:
            item = pending.pop(0)
            _submit(engine, item)
            outcomes[item["id"]] = Outcome()
        for event in engine.step():
            _take(outcomes[event.request_id], event)
        for name in [name for name, limit in limits.items() if name in outcomes]:
            if len(outcomes[name].token_ids) >= limits[name]:
                engine.cancel(name)
                del limits[name]
        step += 1
    return outcomes


def _submit(engine: InferenceEngine, item: Mapping[str, Any]) -> None:
    params = {"temperature": 0.0, "max_tokens": item["max_tokens"], **item.get("params", {})}
    engine.submit(
        item["prompt_token_ids"],
        item["max_tokens"],
        request_id=item["id"],
        params=SamplingParams.from_dict(params),
        priority=item.get("priority", 0),
        tenant=item.get("tenant", ""),
    )


def _take(outcome: Outcome, event: TokenEvent) -> None:
    outcome.events.append(event)
    if event.kind == EventKind.TOKEN and event.token_id is not None:
        outcome.token_ids.append(event.token_id)
    elif event.kind == EventKind.REQUEST_END:
        outcome.finish_reason = str(getattr(event.finish_reason, "value", event.finish_reason))


def quantization_report(fixture: Fixture, config: QuantConfig) -> dict[str, Any]:
    """Error and bytes of the fixture's matrices in one integer format; the whole, and the worst tensor by name."""
    reports = {
        name: report(values, quantize(values, config))
        for name, values in fixture.weights.items()
        if isinstance(values[0], list)
    }
    worst = max(reports, key=lambda name: (reports[name]["max_error"], name))
    before, after = (sum(r[key] for r in reports.values()) for key in ("bytes_before", "bytes_after"))
    return {
        **config.as_dict(),
        "tensors": len(reports),
        "max_error": reports[worst]["max_error"],
        "mean_error": sum(r["mean_error"] * r["bytes_before"] for r in reports.values()) / before,
        "worst_tensor": worst,
        "bytes_before": before,
        "bytes_after": after,
        "ratio": after / before,
    }


def manifest(fixture: Fixture) -> dict[str, Any]:
    """What a fixture holds, as plain JSON values: model, weights, tokenizer, budgets, formats, requests."""
    plan = fixture.scenario
    keys = (
        "model_type",
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
    )
    return {
        "name": fixture.name,
        "model": {key: fixture.config.get(key) for key in keys},
        "tensors": len(fixture.weights),
        "tokenizer": {"vocab_size": fixture.tokenizer.vocab_size},
        "pages": {"page_size": plan["page_size"], "num_pages": plan["num_pages"]},
        "budgets": dict(plan["budgets"]),
        "max_seq_len": plan["max_seq_len"],
        "quantization": [quantization_report(fixture, QuantConfig(**item)) for item in plan.get("quantization", [])],
        "requests": [
            {
                "id": item["id"],
                "prompt_tokens": len(item["prompt_token_ids"]),
                "max_tokens": item["max_tokens"],
                "arrival_step": item.get("arrival_step", 0),
                "golden_tokens": len(fixture.golden[item["id"]]["token_ids"]) if item["id"] in fixture.golden else None,
            }
            for item in plan["requests"]
        ],
    }
