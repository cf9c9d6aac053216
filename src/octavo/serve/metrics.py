"""Prometheus metrics: vLLM's names where vLLM has one (so its dashboards work), `octavo:` for the rest.

Gauges and counters of the engine are read when scraped; latencies are observed here, where tokens leave.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from octavo.core.params import SamplingParams
from octavo.serve.port import Delta, EnginePort

__all__ = ["Metrics", "RequestClock"]

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.08,
    0.16,
    0.32,
    0.64,
    1.25,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

# statistic of the engine -> (metric, what it is)
_GAUGES = {
    "num_running": ("vllm:num_requests_running", "Sequences in the batch."),
    "prefill_tokens_per_s": (
        "octavo:prefill_tokens_per_second",
        "Prompt tokens a second, as foretold.",
    ),
    "num_waiting": ("vllm:num_requests_waiting", "Sequences that wait for a place in the batch."),
    "pages_total": ("octavo:pages_total", "Pages of the KV pool."),
    "pages_free": ("octavo:pages_free", "Pages that nothing owns."),
    "pages_cached": ("octavo:pages_cached", "Pages that only the prefix cache owns."),
    "pages_referenced": ("octavo:pages_referenced", "Pages that a live sequence owns."),
    "pages_ticketed": ("octavo:pages_ticketed", "Pages held by an open ticket alone."),
    "last_step_age": ("octavo:last_step_age_seconds", "Seconds since the engine ended a step."),
    "step_seconds": ("octavo:step_seconds", "Seconds that the last step took."),
    "token_gap_p50_s": ("octavo:token_gap_p50_seconds", "Median gap between two tokens of a choice, in the engine."),
    "token_gap_p99_s": ("octavo:token_gap_p99_seconds", "The gap that 1% are above."),
    "token_gap_p999_s": ("octavo:token_gap_p999_seconds", "The gap that 0.1% are above."),
    "host_pages_total": ("octavo:host_pages_total", "Pages of the host tier in memory."),
    "host_pages_used": ("octavo:host_pages_used", "Those of them that hold something."),
    "disk_pages_total": ("octavo:disk_pages_total", "Pages of the disk tier."),
    "disk_pages_used": ("octavo:disk_pages_used", "Those of them that hold something."),
    "gap_bound_s": ("octavo:token_gap_bound_seconds", "--max-token-gap-ms."),
    "gap_margin_s": ("octavo:token_gap_margin_seconds", "Kept free of each step for what its forecast misses."),
}
_COUNTERS = {
    "preemptions": ("vllm:num_preemptions", "Sequences that lost their pages to another."),
    "preemptions_swap": ("octavo:preemptions_swap", "Those of them whose pages went to the host tier."),
    "preemptions_recompute": ("octavo:preemptions_recompute", "Those of them that compute their tokens again."),
    "tier_queries_tokens": (
        "vllm:external_prefix_cache_queries",
        "Tokens looked up in the host and disk tiers: those that the prefix cache did not have.",
    ),
    "tier_hit_tokens": ("vllm:external_prefix_cache_hits", "Tokens that came back from the host and disk tiers."),
    "host_bytes_out": ("octavo:host_bytes_out", "Bytes that left the page pool for host memory."),
    "host_bytes_in": ("octavo:host_bytes_in", "Bytes that came back from host memory."),
    "disk_bytes_out": ("octavo:disk_bytes_out", "Bytes of pages written to disk."),
    "disk_bytes_in": ("octavo:disk_bytes_in", "Bytes of pages that came back from disk."),
    "prefix_queries_tokens": ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_hit_tokens": ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "steps": ("octavo:steps", "Steps of the engine."),
    "token_gaps_above_bound": ("octavo:token_gaps_above_bound", "Gaps above --max-token-gap-ms."),
    "gap_steps_limited": ("octavo:gap_steps_limited", "Steps whose prefill was cut to keep gaps under the bound."),
    "gap_steps_hopeless": ("octavo:gap_steps_hopeless", "Steps whose decodes alone were foretold above the bound."),
    "gap_tokens_held_back": ("octavo:gap_tokens_held_back", "Prompt tokens that such steps left to later ones."),
    "gap_seconds_lost": ("octavo:gap_seconds_lost", "What the bound costs: seconds that larger chunks would save."),
    "rollbacks": ("octavo:rollbacks", "Steps that were rolled back."),
}


# statistics by reason, "name/reason" in the engine
_BY_REASON = {
    "restore_failures": ("octavo:restore_failures", "Pages that did not come back from a tier, by reason."),
    "disk_write_failures": ("octavo:disk_write_failures", "Pages that were not written to disk, by reason."),
}


class _EngineCollector(Collector):
    """Reads the engine's statistics at the moment of a scrape."""

    def __init__(self, engine: EnginePort, model: str) -> None:
        self._engine = engine
        self._model = model

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats()
        yield from self._families(stats, _GAUGES, GaugeMetricFamily)
        yield from self._families(stats, _COUNTERS, CounterMetricFamily)
        yield from self._by_reason(stats)
        total = stats.get("pages_total", 0)
        if total:
            free = stats.get("pages_free", 0) + stats.get("pages_cached", 0)
            family = GaugeMetricFamily(
                "vllm:kv_cache_usage_perc", "Share of the KV pool in use, 0 to 1.", labels=["model_name"]
            )
            family.add_metric([self._model], 1 - free / total)
            yield family

    def _by_reason(self, stats: Mapping[str, float]) -> Iterable[Metric]:
        for key, (name, text) in _BY_REASON.items():
            family = CounterMetricFamily(name, text, labels=["model_name", "reason"])
            counted = {told: count for told, count in stats.items() if told.startswith(key + "/")}
            for told, count in counted.items():
                family.add_metric([self._model, told.partition("/")[2]], float(count))
            if counted:
                yield family

    def _families(
        self,
        stats: Mapping[str, float],
        table: Mapping[str, tuple[str, str]],
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    ) -> Iterable[Metric]:
        for key, (name, text) in table.items():
            if key in stats:
                metric = family(name, text, labels=["model_name"])
                metric.add_metric([self._model], float(stats[key]))
                yield metric


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self, engine: EnginePort, model: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, model))
        self._model = model
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens taken in.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens that came from the prefix cache."
        )
        self._success = Counter(
            "vllm:request_success",
            "Choices ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._http = Counter(
            "octavo:http_requests", "HTTP answers, by route and status.", ["route", "status"], registry=self.registry
        )
        self.cancelled = self._counter("octavo:requests_cancelled", "Requests whose client left before the end.")
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Each gap between two tokens of a choice."
        )
        self.end_to_end = self._histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self.request_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.request_output = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", _TOKENS
        )
        self._refused = Counter(
            "octavo:requests_refused",
            "Requests answered with 429, by why.",
            ["model_name", "code"],
            registry=self.registry,
        )
        self.forecast_error = self._histogram(
            "octavo:first_token_forecast_error",
            "How far a forecast of the first token was off, as a share of the real time.",
            (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0),
        )
        self.params_n = self._histogram("vllm:request_params_n", "The n of a request.", (1, 2, 5, 10, 20, 64))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self.registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(name, text, ["model_name"], registry=self.registry, buckets=buckets).labels(self._model)

    def start(self, num_prompt_tokens: int, params: SamplingParams) -> RequestClock:
        """The clock of one engine request that arrives now."""
        self.request_prompt.observe(num_prompt_tokens)
        self.prompt_tokens.inc(num_prompt_tokens)
        self.params_n.observe(params.n)
        return RequestClock(self, params.n)

    def refused(self, code: str) -> None:
        """A request was turned away."""
        self._refused.labels(self._model, code).inc()

    def saw_first_token(self, forecast: float, seconds: float) -> None:
        """A first token came after so long, and was foretold."""
        self.forecast_error.observe(abs(forecast - seconds) / max(seconds, 1e-9))

    def ended(self, reason: str) -> None:
        """One choice ended."""
        self._success.labels(self._model, reason).inc()

    def answered(self, route: str, status: int) -> None:
        """One HTTP answer was begun."""
        self._http.labels(route, str(status)).inc()

    def text(self) -> bytes:
        """The scrape, in Prometheus' text format."""
        return generate_latest(self.registry)


class RequestClock:
    """Latencies and counts of one engine request, by the monotonic clock."""

    def __init__(self, metrics: Metrics, choices: int) -> None:
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._last: dict[int, float] = {}
        self._open = choices
        self._tokens = 0
        self._failed = False

    def observe(self, delta: Delta) -> None:
        """A delta leaves the engine."""
        now = time.monotonic()
        count = len(delta.token_ids)
        if count:
            self._token(delta.choice, now)
            self._tokens += count
            self._metrics.generation_tokens.inc(count)
        if delta.finish_reason is not None:
            self._open -= 1
            self._metrics.ended(delta.finish_reason)
            if delta.choice == 0:
                self._metrics.cached_tokens.inc(delta.num_cached_tokens)

    def _token(self, choice: int, now: float) -> None:
        if choice in self._last:
            self._metrics.inter_token.observe(now - self._last[choice])
        elif not self._last:
            self._metrics.first_token.observe(now - self._arrival)
        self._last[choice] = now

    def failed(self) -> None:
        """The engine raised: the end is no cancellation."""
        self._failed = True

    def end(self) -> None:
        """The request is over, by itself or because its client left."""
        if self._open > 0 and not self._failed:
            self._metrics.cancelled.inc()
            return
        self._metrics.end_to_end.observe(time.monotonic() - self._arrival)
        self._metrics.request_output.observe(self._tokens)
