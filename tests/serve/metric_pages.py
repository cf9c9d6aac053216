"""The pages made of the table of metrics: docs/metrics.md and deploy/grafana/octavo.json.

python tests/serve/metric_pages.py writes both.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from octavo.serve.metric_table import METRICS, Metric

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/metrics.md"
DASHBOARD = ROOT / "deploy/grafana/octavo.json"
_BEGIN, _END = "<!-- metrics -->\n", "<!-- end -->\n"
_PICKED = 'model_name=~"$model"'
_SOURCE = {"type": "prometheus", "uid": "${source}"}


def table() -> str:
    """Every metric, as a table of Markdown."""
    lines = ["| metric | kind | labels | what | if |", "|---|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        cells = (f"`{metric.name}`", metric.kind, labels, metric.text, f"`{metric.when}`" if metric.when else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def page_with(text: str, made: str) -> str:
    """The page with another table."""
    return re.sub(f"{_BEGIN}.*{_END}", lambda _: f"{_BEGIN}{made}{_END}", text, flags=re.DOTALL)


def dashboard() -> str:
    """A dashboard with a panel for each group of metrics."""
    groups: dict[str, list[Metric]] = {}
    for metric in METRICS:
        groups.setdefault(f"{metric.panel} ({metric.unit})", []).append(metric)
    panels = [_panel(number, title, group) for number, (title, group) in enumerate(groups.items())]
    made = {
        "title": "Octavo", "uid": "octavo", "schemaVersion": 39, "version": 1, "editable": True, "tags": ["octavo"],
        "refresh": "10s", "time": {"from": "now-30m", "to": "now"}, "templating": {"list": _variables()},
    }  # fmt: skip
    return f'{json.dumps(made)[:-1]}, "panels": [\n' + ",\n".join(map(json.dumps, panels)) + "\n]}\n"


def _variables() -> list[dict[str, Any]]:
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"}
    query = "label_values(vllm:num_requests_running, model_name)"
    model = {"name": "model", "type": "query", "datasource": _SOURCE, "query": query, "refresh": 2, "label": "Model"}
    return [source, {**model, "includeAll": True, "multi": True, "current": {"text": "All", "value": "$__all"}}]


def _panel(number: int, title: str, group: list[Metric]) -> dict[str, Any]:
    targets = [target for metric in group for target in _targets(metric)]
    for place, target in enumerate(targets):
        target["refId"] = f"A{place}"
    return {
        "id": number + 1, "type": "timeseries", "title": title.partition(" (")[0], "datasource": _SOURCE,
        "description": " ".join(f"{metric.name}: {metric.text}" for metric in group), "targets": targets,
        "gridPos": {"h": 8, "w": 8, "x": 8 * (number % 3), "y": 8 * (number // 3)},
        "fieldConfig": {"defaults": {"unit": group[0].unit, "min": 0}, "overrides": []},
    }  # fmt: skip


def _targets(metric: Metric) -> list[dict[str, Any]]:
    by = ", ".join(metric.labels)
    legend = " ".join([metric.name.partition(":")[2], *(f"{{{{{label}}}}}" for label in metric.labels)])
    if metric.kind == "histogram":
        keep = ", ".join(["le", *(label for label in metric.labels if label in ("part", "at"))])
        rate = f"sum by ({keep}) (rate({metric.name}_bucket{{{_PICKED}}}[$__rate_interval]))"
        shown = " ".join([metric.name.partition(":")[2], *(f"{{{{{w}}}}}" for w in keep.split(", ")[1:])])
        return [_target(f"histogram_quantile({q}, {rate})", f"{shown} p{100 * q:g}") for q in (0.5, 0.99)]
    picked = f"{metric.name}{{{_PICKED}}}"
    value = f"rate({picked}[$__rate_interval])" if metric.kind == "counter" else picked
    return [_target(f"sum by ({by}) ({value})" if by else f"sum({value})", legend)]


def _target(expr: str, legend: str) -> dict[str, Any]:
    return {"expr": expr, "legendFormat": legend, "datasource": _SOURCE}


def main() -> None:
    PAGE.write_text(page_with(PAGE.read_text(), table()))
    DASHBOARD.parent.mkdir(parents=True, exist_ok=True)
    DASHBOARD.write_text(dashboard())


if __name__ == "__main__":
    main()
