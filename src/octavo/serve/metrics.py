"""The metrics of one server: what `metric_table` names, counted here or read from the engine when scraped.

Used from the event loop only, so nothing is locked and a token costs a search in a list.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from octavo.core.params import SamplingParams
from octavo.engine.histogram import Histogram
from octavo.engine.tenants import TenantLabels
from octavo.serve.errors import ApiError
from octavo.serve.logs import lines_dropped
from octavo.serve.metric_table import BY_NAME, METRICS, Metric
from octavo.serve.port import Delta, EnginePort
from octavo.serve.sums import Values
from octavo.serve.trail import Trail

_OURS = ("requests_resumed", "log_lines_dropped")  # statistics of each front end, not of the engine
__all__ = ["Metrics", "RequestClock", "failure_class"]

_BY_CODE = {
    "cancelled": "cancelled",
    "deadline": "deadline",
    "draining": "draining",
    "engine_down": "engine_restart",
    "engine_error": "engine_error",
    "grammar_failed": "grammar",
}
_BY_STATUS = {401: "denied", 403: "denied", 429: "overload", 504: "deadline"}


def failure_class(error: ApiError) -> str:
    """What kind of failure an error is."""
    code = error.code or ""
    if code.startswith("quota_"):
        return "quota"
    plain = "internal" if error.status >= 500 else "invalid_input"
    return _BY_CODE.get(code) or _BY_STATUS.get(error.status, plain)


def _priority(priority: int) -> str:
    """Few enough for a label; lower comes first."""
    return "high" if priority < 0 else "low" if priority > 0 else "normal"


class Metrics(Collector):
    """All metrics of one server."""

    def __init__(self, engine: EnginePort, model: str) -> None:
        self._engine, self._model = engine, model
        self._tenants = TenantLabels()
        self._values: dict[str, dict[tuple[str, ...], float]] = {m.name: {} for m in METRICS if not m.buckets}
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {m.name: {} for m in METRICS if m.buckets}
        self._values["octavo:active_requests"][()] = 0
        self._others = Values()  # what other front ends count, as of the scrape
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    # -- what happens

    def start(self, num_prompt_tokens: int, params: SamplingParams, trail: Trail) -> RequestClock:
        """The clock of one engine request that is asked for now."""
        return RequestClock(self, num_prompt_tokens, params, trail)

    def who(self, trail: Trail) -> tuple[str, str]:
        """The labels of whose request it is."""
        return self._tenants.seat(trail.tenant), "bulk" if trail.bulk else _priority(trail.priority)

    def refused(self, code: str) -> None:
        """A request was turned away."""
        self.count("octavo:requests_refused_total", code)

    def failed(self, error: ApiError, tenant: str = "") -> bool:
        """A request ended with an error. False if it was known already."""
        if error.is_counted:
            return False
        error.is_counted = True
        self.count("octavo:request_failures_total", failure_class(error), self._tenants.find(tenant))
        return True

    def saw_first_token(self, forecast: float, seconds: float) -> None:
        """A first token came after so long, and was foretold."""
        self.histogram("octavo:first_token_forecast_error").add(abs(forecast - seconds) / max(seconds, 1e-9))

    def answered(self, route: str, status: int) -> None:
        """One HTTP answer was begun."""
        self.count("octavo:http_requests_total", route, str(status))

    def wrote(self, trail: Trail) -> None:
        """A piece of a stream was written."""
        if trail.output_tokens == trail.tokens_written:
            return
        now = time.monotonic()
        if trail.first_written is None or trail.last_written is None:
            trail.first_written = now
        elif trail.num_choices == 1:
            if trail.socket_gaps is None:
                trail.socket_gaps = self.histogram("octavo:socket_inter_token_latency_seconds", *self.who(trail))
            trail.socket_gaps.add(now - trail.last_written)
        trail.last_written, trail.tokens_written = now, trail.output_tokens

    def ended(self, trail: Trail) -> None:
        """A request is over, however it ended."""
        who = self.who(trail)
        if trail.outcome == "cancelled":
            self.count("octavo:request_failures_total", "cancelled", who[0])
        for part, seconds in trail.parts().items():
            self.histogram("octavo:first_token_part_seconds", part, *who).add(seconds)
        gaps = {"socket": trail.gap(trail.first_written, trail.last_written)}
        gaps["engine"] = trail.gap(0.0, trail.decode) if trail.decode else None
        for at, gap in gaps.items():
            if gap is not None:
                self.histogram("octavo:time_per_output_token_seconds", at, *who).add(gap)

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter or a gauge."""
        values = self._values[name]
        values[labels] = values.get(labels, 0) + by

    def histogram(self, name: str, *labels: str) -> Histogram:
        """The histogram of these labels."""
        known = self._histograms[name]
        found = known.get(labels)
        if found is None:
            found = known[labels] = Histogram(BY_NAME[name].buckets)
        return found

    # -- the scrape

    def values(self) -> Values:
        """What is counted here, for whoever adds it to what other front ends count."""
        sums = Values({}, {})
        for name, values in self._values.items():
            kind = sums.gauges if BY_NAME[name].kind == "gauge" else sums.counters
            kind[name] = [(labels, [value]) for labels, value in values.items()]
        for name, histograms in self._histograms.items():
            sums.counters[name] = [(labels, [*each.counts, each.total]) for labels, each in histograms.items()]
        stats = self._engine.stats()
        sums.counters |= {stat: [((), [stats[stat]])] for stat in _OURS if stat in stats}
        return sums

    def text(self, others: Values | None = None) -> bytes:
        """In Prometheus' text format, with what other front ends count."""
        self._others = Values() if others is None else others
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Family]:
        """All families, those without a sample too."""
        own = {"live_objects/front": len(gc.get_objects()), "log_lines_dropped": lines_dropped()}
        stats = {**self._engine.stats(), **own}
        for stat in _OURS:
            stats[stat] = stats.get(stat, 0) + sum(sum(numbers) for _, numbers in self._others.counters.get(stat, ()))
        total = stats.get("pages_total", 0)
        if total:
            stats["kv_usage"] = 1 - (stats.get("pages_free", 0) + stats.get("pages_cached", 0)) / total
        for metric in METRICS:
            yield self._histogram_family(metric, stats) if metric.buckets else self._family(metric, stats)

    def _family(self, metric: Metric, stats: Mapping[str, float]) -> Family:
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(metric.name, metric.text, labels=["model_name", *metric.labels])
        for labels, value in _told(metric, stats) if metric.stat else self._counted(metric).items():
            family.add_metric([self._model, *labels], float(value))
        return family

    def _counted(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """A counter or a gauge of all front ends, by labels."""
        found = dict(self._values[metric.name])
        for kind in (self._others.counters, self._others.gauges):
            for labels, (value,) in kind.get(metric.name, ()):
                found[labels] = found.get(labels, 0) + value
        return found

    def _histograms_of(self, metric: Metric) -> dict[tuple[str, ...], Histogram]:
        """A histogram of all front ends, by labels."""
        own, theirs = self._histograms[metric.name], self._others.counters.get(metric.name, ())
        found = dict(own)
        for labels, (*counts, total) in theirs:
            both, mine = Histogram(metric.buckets), own.get(labels)
            both.counts = [int(count) + (0 if mine is None else mine.counts[i]) for i, count in enumerate(counts)]
            both.total = total + (0.0 if mine is None else mine.total)
            found[labels] = both
        return found

    def _histogram_family(self, metric: Metric, stats: Mapping[str, float]) -> Family:
        family = HistogramMetricFamily(metric.name, metric.text, labels=["model_name", *metric.labels])
        known = self._histograms_of(metric)
        if metric.stat and f"{metric.stat}/sum" in stats:
            known = {(): _histogram_of(metric, stats)}
        for labels, histogram in known.items():
            edges = [*map(str, map(float, histogram.edges)), "+Inf"]
            counts = list(zip(edges, map(float, accumulate(histogram.counts)), strict=True))
            family.add_metric([self._model, *labels], counts, histogram.total)
        return family


def _told(metric: Metric, stats: Mapping[str, float]) -> Iterator[tuple[tuple[str, ...], float]]:
    """The engine's values of a metric, by labels."""
    if not metric.stat.endswith("/"):
        if metric.stat in stats:
            yield (), stats[metric.stat]
        return
    for name, value in stats.items():
        if name.startswith(metric.stat):
            yield (name[len(metric.stat) :],), value


def _histogram_of(metric: Metric, stats: Mapping[str, float]) -> Histogram:
    """The engine's histogram of a metric."""
    found = Histogram(metric.buckets)
    edges = (*metric.buckets, float("inf"))
    found.counts = [int(stats.get(f"{metric.stat}/le/{edge}", 0)) for edge in edges]
    found.total = stats[f"{metric.stat}/sum"]
    return found


class RequestClock:
    """Latencies and counts of one engine request, by the monotonic clock."""

    def __init__(self, metrics: Metrics, num_prompt_tokens: int, params: SamplingParams, trail: Trail) -> None:
        self._metrics, self._trail, self._who = metrics, trail, metrics.who(trail)
        self._last: dict[int, float] = {}
        self._first: float | None = None
        self._open = params.num_branches
        self._tokens = 0
        self._gaps = metrics.histogram("vllm:inter_token_latency_seconds", *self._who)
        self._failed = self._accounted = False
        if trail.submitted is None:
            trail.submitted = time.monotonic()
        trail.prompt_tokens += num_prompt_tokens
        metrics.count("octavo:active_requests")
        metrics.count("vllm:prompt_tokens_total", *self._who, by=num_prompt_tokens)
        self._add("vllm:request_prompt_tokens", num_prompt_tokens)
        self._add("vllm:request_params_n", params.n)
        if params.max_tokens is not None:
            self._add("vllm:request_params_max_tokens", params.max_tokens)

    def _add(self, name: str, value: float) -> None:
        self._metrics.histogram(name, *self._who).add(value)

    def observe(self, delta: Delta) -> None:
        """A delta leaves the engine."""
        count = len(delta.token_ids)
        if count:
            self._token(delta.choice, count, time.monotonic())
        if delta.first and not self._accounted:
            self._saw_engine(delta.first)
        if delta.spent:
            self._saw_end(*delta.spent)
        if delta.finish_reason is not None:
            self._open -= 1
            self._trail.outcome = delta.finish_reason
            self._metrics.count("vllm:request_success_total", delta.finish_reason, *self._who)
            if delta.choice == 0:
                self._trail.cached_tokens += delta.num_cached_tokens
                self._metrics.count("vllm:prompt_tokens_cached_total", *self._who, by=delta.num_cached_tokens)

    def _token(self, choice: int, count: int, now: float) -> None:
        trail, last = self._trail, self._last.get(choice)
        if last is not None:
            self._gaps.add(now - last)
        elif self._first is None:
            self._first = now
            self._add("vllm:time_to_first_token_seconds", now - trail.arrived)
            trail.first_token = trail.first_token or now
        self._last[choice] = trail.last_token = now
        self._tokens += count
        trail.output_tokens += count

    def _saw_engine(self, first: Iterable[float]) -> None:
        """The engine's account of the first token."""
        queue, prefill, sample = first
        self._accounted = True
        self._trail.engine = self._trail.engine or (queue, prefill, sample)
        self._add("vllm:request_queue_time_seconds", queue)
        self._add("vllm:request_prefill_time_seconds", prefill + sample)

    def _saw_end(self, decode: float, core_seconds: float, *drafts: float) -> None:
        """The engine's account of the whole."""
        self._trail.decode = max(self._trail.decode, decode)
        self._trail.core_seconds += core_seconds
        self._add("vllm:request_decode_time_seconds", decode)
        self._add("vllm:request_inference_time_seconds", decode + sum(self._trail.engine[1:]))

    def failed(self) -> None:
        """The engine raised: the end is no cancellation."""
        self._failed = True

    def end(self) -> None:
        """The request is over, by itself or because its client left."""
        metrics = self._metrics
        metrics.count("octavo:active_requests", by=-1)
        metrics.count("vllm:generation_tokens_total", *self._who, by=self._tokens)
        if self._open > 0 and not self._failed:
            return
        now = time.monotonic()
        self._add("vllm:e2e_request_latency_seconds", now - self._trail.arrived)
        self._add("vllm:request_generation_tokens", self._tokens)
        gaps = self._tokens - len(self._last)
        if gaps > 0 and self._first is not None:
            last = max(self._last.values())
            self._add("vllm:request_time_per_output_token_seconds", (last - self._first) * len(self._last) / gaps)
