"""Every metric of `/metrics`: its name, its kind, its labels, and where its value comes from.

docs/metrics.md and deploy/grafana/octavo.json are made from this table, and a test holds them against it and against
what is scraped. Names are vLLM's where vLLM has one. All metrics have the label `model_name` as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.engine.histogram import SECONDS, SEQUENCES, TOKENS

__all__ = ["BY_NAME", "METRICS", "Metric"]


@dataclass(frozen=True)
class Metric:
    """One metric. ``stat`` names the engine's statistic; one that ends in ``/`` has the label's value behind it."""

    name: str
    kind: str  # gauge, counter or histogram
    panel: str  # what it is shown with
    text: str
    labels: tuple[str, ...] = ()
    stat: str = ""  # empty: counted in the front end
    buckets: tuple[float, ...] = ()
    when: str = ""  # what it takes for it to be there

    @property
    def unit(self) -> str:
        """Of its axis, in Grafana's words."""
        words = self.name.removesuffix("_total").split("_")
        return "s" if "seconds" in words else "bytes" if "bytes" in words else "short"


_WHO = ("tenant", "priority")
_GAP, _TIERS, _DISK = "--max-token-gap-ms", "--host-kv", "--disk-kv"
_BATCHES = "--batch-dir"
_DRAFTS = "--speculative"
_COMPACT = "--layout compact"


def _gauge(name: str, panel: str, stat: str, text: str, labels: tuple[str, ...] = (), when: str = "") -> Metric:
    return Metric(name, "gauge", panel, text, labels, stat, when=when)


def _counter(name: str, panel: str, stat: str, text: str, labels: tuple[str, ...] = (), when: str = "") -> Metric:
    return Metric(f"{name}_total", "counter", panel, text, labels, stat, when=when)


def _histogram(
    name: str,
    panel: str,
    text: str,
    labels: tuple[str, ...] = _WHO,
    buckets: tuple[float, ...] = SECONDS,
    stat: str = "",
) -> Metric:
    return Metric(name, "histogram", panel, text, labels, stat, buckets)


METRICS = (
    # what clients see
    _histogram("vllm:time_to_first_token_seconds", "First token", "From a request's head to its first token here."),
    _histogram(
        "octavo:first_token_part_seconds",
        "First token, part by part",
        "What the time to the first token went into: read (body and checks), tokenize, queue, prefill, sample (what "
        "follows the model's call in the step; the native backend draws inside that call), deliver (to the front end), "
        "network (until it was written; streams only).",
        ("part", *_WHO),
    ),
    _histogram(
        "vllm:inter_token_latency_seconds", "Token gaps", "Gaps between two tokens of a choice, in the front end."
    ),
    _histogram(
        "octavo:engine_inter_token_latency_seconds",
        "Token gaps",
        "Gaps between two tokens of a choice, at the commits of their steps.",
        (),
        stat="token_gap",
    ),
    _histogram(
        "octavo:socket_inter_token_latency_seconds",
        "Token gaps",
        "Gaps between two writes of tokens to a stream of one choice.",
    ),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "Time per output token",
        "Mean gap of a request's tokens, in the front end.",
    ),
    _histogram(
        "octavo:time_per_output_token_seconds",
        "Time per output token",
        "Mean gap of the tokens of a request of one choice; at: engine (commits) or socket (writes).",
        ("at", *_WHO),
    ),
    _histogram("vllm:e2e_request_latency_seconds", "Whole requests", "From a request's head to its last token."),
    _histogram(
        "vllm:request_queue_time_seconds", "Whole requests", "From its arrival in the engine to its first step."
    ),
    _histogram("vllm:request_prefill_time_seconds", "Whole requests", "From its first step to its first token."),
    _histogram("vllm:request_decode_time_seconds", "Whole requests", "From its first token to its end, in the engine."),
    _histogram("vllm:request_inference_time_seconds", "Whole requests", "Prefill and decode."),
    _histogram("vllm:request_prompt_tokens", "Sizes of requests", "Prompt tokens of a request.", _WHO, TOKENS),
    _histogram("vllm:request_generation_tokens", "Sizes of requests", "Tokens generated for it.", _WHO, TOKENS),
    _histogram("vllm:request_params_n", "Parameters", "Its n.", _WHO, (1, 2, 5, 10, 20, 64)),
    _histogram("vllm:request_params_max_tokens", "Parameters", "Its max_tokens, where it names one.", _WHO, TOKENS),
    _counter("vllm:prompt_tokens", "Tokens", "", "Prompt tokens taken in.", _WHO),
    _counter("vllm:prompt_tokens_cached", "Tokens", "", "Those of them that came from the prefix cache.", _WHO),
    _counter("vllm:generation_tokens", "Tokens", "", "Tokens generated.", _WHO),
    _counter("vllm:request_success", "Ends", "", "Choices ended, by reason.", ("finished_reason", *_WHO)),
    _counter(
        "octavo:request_failures",
        "Failures",
        "",
        "Requests without their answer: invalid_input, denied, overload, quota, deadline, cancelled, draining, "
        "grammar (it could not be followed to the end), engine_restart (there is no engine now), engine_error, "
        "internal.",
        ("class", "tenant"),
    ),
    _counter("octavo:requests_refused", "Failures", "", "Requests answered with 429, by why.", ("code",)),
    _counter("octavo:log_lines_dropped", "Failures", "log_lines_dropped", "Log lines that could not be written."),
    _counter("octavo:http_requests", "HTTP answers", "", "HTTP answers, by route and status.", ("route", "status")),
    _gauge(
        "octavo:active_requests", "Batch", "", "Requests that the engine has been asked for and that have not ended."
    ),
    _gauge("octavo:batches_open", "Batches", "", "Batches that are not over.", when=_BATCHES),
    _counter("octavo:batches", "Batches", "", "Batches that are over, by how.", ("status",), when=_BATCHES),
    _counter("octavo:batch_lines", "Batches", "", "Requests of batches that are done.", ("outcome",), when=_BATCHES),
    _histogram(
        "octavo:first_token_forecast_error",
        "Forecast of the first token",
        "How far a forecast of the first token was off, as a share of the real time.",
        (),
        (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0),
    ),
    # the engine's steps
    _gauge("vllm:num_requests_running", "Batch", "num_running", "Sequences in the batch."),
    _gauge("vllm:num_requests_waiting", "Batch", "num_waiting", "Sequences that wait for a place in the batch."),
    _histogram(
        "vllm:iteration_tokens_total", "Work of a step", "Tokens scheduled in a step.", (), TOKENS, "step_tokens"
    ),
    _histogram(
        "octavo:iteration_sequences",
        "Work of a step",
        "Sequences scheduled in a step.",
        (),
        SEQUENCES,
        "step_sequences",
    ),
    _counter("octavo:steps", "Steps", "steps", "Steps of the engine."),
    _counter("octavo:rollbacks", "Steps", "rollbacks", "Steps that were rolled back."),
    _counter("octavo:scheduled_tokens", "Tokens", "scheduled_tokens", "Tokens computed, prompts and outputs."),
    _counter("octavo:draft_steps", "Drafts", "draft_steps", "Steps that verified guesses.", when=_DRAFTS),
    _gauge("octavo:drafts_off", "Drafts", "drafts_off", "1: guessing failed, and has ended.", when=_DRAFTS),
    _counter("vllm:spec_decode_num_draft_tokens", "Drafts", "draft_tokens", "Tokens guessed ahead.", when=_DRAFTS),
    _counter(
        "vllm:spec_decode_num_accepted_tokens", "Drafts", "accepted_draft_tokens", "Of them, those drawn.", when=_DRAFTS
    ),
    _counter(
        "octavo:draft_seconds",
        "Where drafts spend their time",
        "draft_seconds/",
        "Seconds: propose; read (of it, what a draft model had not read); verify (beyond plain steps); "
        "saved (plain steps not needed).",
        ("part",),
        when=_DRAFTS,
    ),
    _counter("octavo:grammar_cache_queries", "Grammars", "grammar_queries", "Requests that follow a grammar."),
    _counter("octavo:grammar_cache_misses", "Grammars", "grammar_misses", "Grammars compiled: they were not kept."),
    _counter(
        "octavo:grammar_compile_seconds", "Time for grammars", "grammar_compile_seconds", "Seconds of compiling them."
    ),
    _counter(
        "octavo:grammar_forced_tokens",
        "Tokens",
        "grammar_forced_tokens",
        "Tokens that a grammar forced, put before a step with the one before them.",
    ),
    _gauge("octavo:step_seconds", "Time of a step", "step_seconds", "Seconds that the last step took."),
    _gauge("octavo:last_step_age_seconds", "Time of a step", "last_step_age", "Seconds since the engine ended a step."),
    _counter(
        "octavo:phase_seconds",
        "Where steps spend their time",
        "phase_seconds/",
        "Seconds of all steps: plan, prepare, model, commit, measure, deliver.",
        ("phase",),
    ),
    _counter(
        "octavo:core_seconds",
        "Core-seconds by tenant",
        "core_seconds/",
        "Core-seconds of steps, shared among their requests by tokens.",
        ("tenant",),
    ),
    _gauge(
        "octavo:prefill_tokens_per_second", "Prefill", "prefill_tokens_per_s", "Prompt tokens a second, as foretold."
    ),
    _counter(
        "octavo:requests_resumed",
        "Restarts",
        "requests_resumed",
        "Requests begun in one engine and gone on with in another.",
        when=_COMPACT,
    ),
    _counter(
        "octavo:engine_restarts",
        "Restarts",
        "engine_restarts",
        "Engines that took the place of one that died.",
        when=_COMPACT,
    ),
    _gauge("octavo:token_gap_p50_seconds", "Bound on gaps", "token_gap_p50_s", "Median gap of all, in the engine."),
    _gauge("octavo:token_gap_p99_seconds", "Bound on gaps", "token_gap_p99_s", "The gap that 1% are above."),
    _gauge("octavo:token_gap_p999_seconds", "Bound on gaps", "token_gap_p999_s", "The gap that 0.1% are above."),
    _gauge("octavo:token_gap_bound_seconds", "Bound on gaps", "gap_bound_s", "--max-token-gap-ms.", when=_GAP),
    _gauge(
        "octavo:token_gap_margin_seconds",
        "Bound on gaps",
        "gap_margin_s",
        "Kept free of each step for what its forecast misses.",
        when=_GAP,
    ),
    _counter(
        "octavo:token_gaps_above_bound",
        "What the bound costs",
        "token_gaps_above_bound",
        "Gaps above --max-token-gap-ms.",
    ),
    _counter(
        "octavo:gap_steps_limited",
        "What the bound costs",
        "gap_steps_limited",
        "Steps whose prefill was cut to keep gaps under the bound.",
        when=_GAP,
    ),
    _counter(
        "octavo:gap_steps_hopeless",
        "What the bound costs",
        "gap_steps_hopeless",
        "Steps whose decodes alone were foretold above the bound.",
        when=_GAP,
    ),
    _counter(
        "octavo:gap_tokens_held_back",
        "What the bound costs",
        "gap_tokens_held_back",
        "Prompt tokens that such steps left to later ones.",
        when=_GAP,
    ),
    _counter(
        "octavo:gap_seconds_lost",
        "What the bound costs",
        "gap_seconds_lost",
        "Seconds that larger chunks would save.",
        when=_GAP,
    ),
    # memory
    _gauge("vllm:kv_cache_usage_perc", "KV use", "kv_usage", "Share of the KV pool in use, 0 to 1."),
    _gauge(
        "octavo:kv_fragmentation",
        "KV use",
        "kv_fragmentation",
        "Share of it that is the unused rest of last pages, 0 to 1.",
    ),
    _gauge("octavo:pages_total", "Pages", "pages_total", "Pages of the KV pool."),
    _gauge("octavo:pages_free", "Pages", "pages_free", "Pages that nothing owns."),
    _gauge("octavo:pages_cached", "Pages", "pages_cached", "Pages that only the prefix cache owns."),
    _gauge("octavo:pages_referenced", "Pages", "pages_referenced", "Pages that a live sequence owns."),
    _gauge("octavo:pages_ticketed", "Pages", "pages_ticketed", "Pages held by an open ticket alone."),
    _gauge(
        "octavo:live_objects",
        "Live objects",
        "live_objects/",
        "Objects that a process has made since it served and that cyclic garbage collection would look at: flat, or "
        "something leaks. The engine counts when it collects.",
        ("process",),
    ),
    _gauge(
        "octavo:sequence_bytes",
        "Memory of a sequence",
        "sequence_bytes/",
        "Bytes of a running sequence on average: kv (a shared page counts once, so its sharers divide it), the part of "
        "it that is fragmentation, and temporary (activations and workspace, divided by the batch).",
        ("part",),
    ),
    _counter("vllm:num_preemptions", "Preemptions", "preemptions", "Sequences that lost their pages to another."),
    _counter(
        "octavo:preemptions_swap", "Preemptions", "preemptions_swap", "Those of them whose pages went to the host tier."
    ),
    _counter(
        "octavo:preemptions_recompute",
        "Preemptions",
        "preemptions_recompute",
        "Those of them that compute their tokens again.",
    ),
    _counter(
        "vllm:prefix_cache_queries",
        "Prefix cache",
        "prefix_queries_tokens",
        "Prompt tokens looked up in the prefix cache.",
    ),
    _counter("vllm:prefix_cache_hits", "Prefix cache", "prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
    _counter(
        "vllm:external_prefix_cache_queries",
        "Prefix cache",
        "tier_queries_tokens",
        "Tokens looked up in the host and disk tiers: those that the prefix cache did not have.",
        when=_TIERS,
    ),
    _counter(
        "vllm:external_prefix_cache_hits",
        "Prefix cache",
        "tier_hit_tokens",
        "Tokens that came back from the host and disk tiers.",
        when=_TIERS,
    ),
    _gauge(
        "octavo:host_pages_total",
        "Pages of tiers",
        "host_pages_total",
        "Pages of the host tier in memory.",
        when=_TIERS,
    ),
    _gauge(
        "octavo:host_pages_used", "Pages of tiers", "host_pages_used", "Those of them that hold something.", when=_TIERS
    ),
    _gauge("octavo:disk_pages_total", "Pages of tiers", "disk_pages_total", "Pages of the disk tier.", when=_DISK),
    _gauge(
        "octavo:disk_pages_used", "Pages of tiers", "disk_pages_used", "Those of them that hold something.", when=_DISK
    ),
    _counter(
        "octavo:host_bytes_out",
        "Traffic of tiers",
        "host_bytes_out",
        "Bytes that left the page pool for host memory.",
        when=_TIERS,
    ),
    _counter(
        "octavo:host_bytes_in",
        "Traffic of tiers",
        "host_bytes_in",
        "Bytes that came back from host memory.",
        when=_TIERS,
    ),
    _counter(
        "octavo:disk_bytes_out", "Traffic of tiers", "disk_bytes_out", "Bytes of pages written to disk.", when=_DISK
    ),
    _counter(
        "octavo:disk_bytes_in",
        "Traffic of tiers",
        "disk_bytes_in",
        "Bytes of pages that came back from disk.",
        when=_DISK,
    ),
    _counter(
        "octavo:restore_failures",
        "Failures of tiers",
        "restore_failures/",
        "Pages that did not come back from a tier, by reason.",
        ("reason",),
        _TIERS,
    ),
    _counter(
        "octavo:disk_write_failures",
        "Failures of tiers",
        "disk_write_failures/",
        "Pages that were not written to disk, by reason.",
        ("reason",),
        _DISK,
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}
