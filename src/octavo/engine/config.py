"""How an engine is set up. Command-line flags take their default and help from these fields."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from octavo.backends.adapters import AdapterRoom
from octavo.core.config import PREEMPTIONS
from octavo.core.errors import InvalidInput
from octavo.core.kv_eviction import Eviction, StreamingLLM, Voting, parse_eviction
from octavo.core.policies import POLICIES, PolicySettings, make_policy
from octavo.core.speculative_config import DRAFT_MODEL, METHODS, asked_of, check_method
from octavo.engine.adapters import MAX_LORAS, MAX_RANK, check_name
from octavo.engine.memory import parse_size

if TYPE_CHECKING:
    from octavo.decoding.speculation import Proposer, Speculator

__all__ = ["EngineConfig"]

MAX_DEFAULT_CONTEXT = 8192
EXACT_BACKENDS = ("numpy", "reference")  # fp32 throughout
BACKENDS = ("auto", "native", *EXACT_BACKENDS)
FORMATS = (
    *("auto", "fp32", "bf16", "w8g64", "w8pc", "w4g32", "w4g64", "w4g128"),
    *("w4a16g32", "w4a16g64", "w4a16g128"),
)
AUTO_RULE = (
    "auto: a quantized checkpoint's own, else the first of bf16, w8g64, w4g32 (without bf16 where the processor only "
    "multiplies bytes) whose weights take at most half of the machine's memory; numpy and reference run fp32."
)
KV_DTYPES = ("auto", "fp32", "bf16", "int8")


def _flag(default: Any, text: str) -> Any:
    """A dataclass field that documents itself."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class EngineConfig:
    """Model, memory and budgets of one engine. Raises ``InvalidInput`` for a value out of range."""

    model: str = _flag("smollm2-135m-instruct", "Known name, hub id, folder, or .gguf file.")
    backend: str = _flag("auto", "Who runs the ops: auto, native, numpy or reference.")
    format: str = _flag("auto", f"Weight format while running: {', '.join(FORMATS)}. {AUTO_RULE}")
    kv_dtype: str = _flag("auto", "How keys and values are kept: auto, fp32, bf16 or int8.")
    page_size: int = _flag(16, "Tokens in one KV page.")
    kv_eviction: str = _flag(
        "",
        "Forget, which changes answers: streaming_llm:sinks=4,window=1024 or h2o:heavy=512,recent=512 keep that many "
        "tokens, snapkv:capacity=1024 that many of a prompt; empty: nothing.",
    )
    kv_memory: str = _flag("", "Memory for KV pages, such as 512MiB; empty: what the other limits need and leave.")
    host_kv_memory: str = _flag("", "Memory that keeps what the prefix cache evicts, such as 1GiB; empty: none.")
    disk_kv: str = _flag("", "Folder for what leaves --host-kv-memory, found again after a restart; empty: none.")
    disk_kv_memory: str = _flag("4GiB", "Most that the folder of --disk-kv holds, such as 20GiB.")
    disk_kv_wait_ms: int = _flag(200, "Most that a step waits for the disk; what is not there by then is computed.")
    preemption: str = _flag("auto", "How preempted requests come back: swap, recompute, or auto: what costs less.")
    memory_fraction: float = _flag(0.8, "Most of the available memory that the whole engine may take.")
    max_seq_len: int = _flag(0, f"Longest prompt plus output; 0: the model's limit, at most {MAX_DEFAULT_CONTEXT}.")
    max_running_requests: int = _flag(64, "Most sequences in one step.")
    max_batched_tokens: int = _flag(512, "Most tokens in one step.")
    max_prefill_chunk: int = _flag(256, "Most tokens of one prompt in one step.")
    max_token_gap_ms: int = _flag(0, "Bound on the gap between two tokens, p99.9, in ms, by smaller chunks; 0: none.")
    policy: str = _flag("fcfs", f"Order of service: {', '.join(POLICIES)}; or several, the first first: priority,fair.")
    priority_ageing_s: float = _flag(60.0, "Seconds of waiting that count as one level of priority; 0: never.")
    tenant_weights: str = _flag("", "Shares of tenants under the fair policy, 1 where not named: alice=3,bob=2.")
    speculative: str = _flag("", f"Guess tokens ahead and verify them: {', '.join(METHODS)}; empty: off. Same tokens.")
    speculative_config: str = _flag(
        "",
        'The same as a JSON object: {"method": "draft_model", "model": "NAME", "num_speculative_tokens": 4}.',
    )
    num_speculative_tokens: int = _flag(8, "Most guesses of a sequence in one step; what pays is measured.")
    prompt_lookup_min: int = _flag(2, "Tokens that must have come before for ngram to guess what follows.")
    prompt_lookup_max: int = _flag(6, "Tokens that ngram compares at most.")
    prefix_cache: bool = _flag(True, "Keep the keys and values of finished prefixes for later requests.")
    lora: str = _flag("", "LoRA adapters, name=folder, several with commas between; clients ask for them by name.")
    max_loras: int = _flag(0, "Most LoRA adapters at a time; 0: those of --lora. There is room for all of them always.")
    max_lora_rank: int = _flag(16, "Largest rank of an adapter that there is room for.")
    threads: int = _flag(0, "Threads; 0: all usable cores on native, half of them for the products of numpy.")
    seed: int = _flag(0, "Where the seeds of requests without one come from; 0: different in every run.")
    offline: bool = _flag(False, "Never touch the network.")
    cache_dir: str = _flag("", "Folder of downloaded models; empty: the user's cache.")
    record: str = _flag("", "Write all that happens into this file, for octavo replay, explain and timeline.")
    overlap: bool = _flag(False, "Plan the next step while one runs: faster where the kernels leave a core to it.")
    audit: bool = _flag(False, "Check every page after every step (slow; for finding bugs).")

    def __post_init__(self) -> None:
        if self.backend != "null":  # for measurements; no choice of a user's
            _one_of("backend", self.backend, BACKENDS)
        _one_of("format", self.format, FORMATS)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        if self.backend in EXACT_BACKENDS:
            _one_of(f"format with backend={self.backend}", self.format, ("auto", "fp32"))
            _one_of(f"kv_dtype with backend={self.backend}", self.kv_dtype, ("auto", "fp32"))
        self._check_eviction()
        make_policy(self.policy)
        self.speculator()
        _ = self.lookup, self.draft_model
        self.policy_settings()
        for name in (
            *("page_size", "max_running_requests", "max_batched_tokens", "max_prefill_chunk", "disk_kv_wait_ms"),
        ):
            _at_least(name, getattr(self, name), 1)
        for name in ("max_seq_len", "threads", "seed", "max_token_gap_ms"):
            _at_least(name, getattr(self, name), 0)
        _at_least("max_loras", self.max_loras, 0)
        _at_least("max_lora_rank", self.max_lora_rank, 1)
        for name, most in (("max_loras", MAX_LORAS), ("max_lora_rank", MAX_RANK)):
            if getattr(self, name) > most:
                raise InvalidInput(name, getattr(self, name), f"give at most {most}")
        named = len(self.lora_folders())
        if 0 < self.max_loras < named:
            raise InvalidInput("max_loras", self.max_loras, f"--lora names {named}; give as many")
        if not 0 < self.memory_fraction <= 1:
            raise InvalidInput("memory_fraction", self.memory_fraction, "give a number above 0 and at most 1")
        _one_of("preemption", self.preemption, PREEMPTIONS)
        for name in ("kv_memory", "host_kv_memory", "disk_kv_memory"):
            if getattr(self, name) != "":
                parse_size(getattr(self, name), name)
        if self.host_kv_memory != "" and not self.prefix_cache:
            raise InvalidInput("host_kv_memory", self.host_kv_memory, "leave it empty, or keep the prefix cache on")
        if self.disk_kv != "" and self.host_kv_memory == "":
            raise InvalidInput("disk_kv", self.disk_kv, "give host_kv_memory as well: what leaves it goes to disk")
        if self.disk_kv != "":
            parse_size(self.disk_kv_memory, "disk_kv_memory")

    def _check_eviction(self) -> None:
        if self.eviction is None:
            return
        for name in ("host_kv_memory", "disk_kv"):
            if getattr(self, name) != "":
                raise InvalidInput(name, getattr(self, name), "leave it empty: kv_eviction has no prefix cache to keep")
        asked = asked_of(self.speculative_config)
        method = asked.get("method", self.speculative) or "draft_model" * ("model" in asked)
        if method not in ("", "ngram", "suffix"):
            raise InvalidInput("speculative", method, "give ngram or suffix beside kv_eviction")
        if asked.get("tree"):
            raise InvalidInput("speculative_config.tree", True, "leave it out: trees do not go with kv_eviction")
        if not isinstance(self.eviction, StreamingLLM):
            self._check_voting(self.eviction)

    def _check_voting(self, policy: Voting) -> None:
        if policy.block % self.page_size:
            remedy = f"give a page size that divides its block, {policy.block}: pages go as a whole"
            raise InvalidInput("page_size", self.page_size, remedy)
        if policy.looks > self.max_batched_tokens:
            name = "block" if policy.every else "window"
            raise InvalidInput(f"kv_eviction: {name}", policy.looks, "give at most max_batched_tokens")
        if self.backend == "null":
            raise InvalidInput("kv_eviction", self.kv_eviction, "give a backend that looks at something")

    @property
    def eviction(self) -> Eviction | None:
        """What is forgotten. Raises ``InvalidInput``."""
        return parse_eviction(self.kv_eviction)

    @property
    def kv_bytes(self) -> int | None:
        """``kv_memory`` in bytes, or None."""
        return None if self.kv_memory == "" else parse_size(self.kv_memory, "kv_memory")

    @property
    def host_kv_bytes(self) -> int:
        """``host_kv_memory`` in bytes."""
        return 0 if self.host_kv_memory == "" else parse_size(self.host_kv_memory, "host_kv_memory")

    @property
    def draft_model(self) -> EngineConfig | None:
        """How the draft model is loaded, if there is one: as the model is, and nothing beside it. Raises
        ``InvalidInput``.
        """
        asked = asked_of(self.speculative_config)
        if "model" not in asked:
            return None
        kind = asked.get("quantization", self.format)
        return replace(
            self, model=asked["model"], format=kind, speculative_config="", speculative="", lora="", max_loras=0
        )

    def speculator(self, draft_model: Proposer | None = None) -> Speculator | None:
        """A new one, if tokens are guessed; ``draft_model`` guesses where one is asked for, and without it nobody does.
        Raises ``InvalidInput``.
        """
        asked = asked_of(self.speculative_config)
        if self.speculative == DRAFT_MODEL and "model" not in asked:
            remedy = 'name the model: --speculative-config \'{"method": "draft_model", "model": NAME}\''
            raise InvalidInput("speculative", self.speculative, remedy)
        if self.speculative and asked.get("method", self.speculative) != self.speculative:
            raise InvalidInput("speculative_config", self.speculative_config, f"is at odds with {self.speculative}")
        method, tree = asked.get("method", self.speculative), asked.get("tree", False)
        names = "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"
        most, shortest, longest = (asked.get(name, getattr(self, name)) for name in names)
        check_method(method, most, shortest, longest, tree)
        if not method:
            return None
        from octavo.decoding.speculation import make_speculator  # 30 ms for every process of a server

        return make_speculator(method, most, shortest, longest, tree=tree, draft_model=draft_model)

    @property
    def lookup(self) -> tuple[int, int] | None:
        """Tokens that prompt lookup compares, if the residual verifier draws. Raises ``InvalidInput``."""
        asked = asked_of(self.speculative_config)
        if asked.get("verifier") != "residual":
            return None
        method = asked.get("method", self.speculative)
        if method != "ngram":
            remedy = "goes with ngram: its guesses come from a request's own tokens, so no other changes them"
            raise InvalidInput("speculative_config.verifier", f"residual with {method or 'no method'}", remedy)
        return (
            asked.get("prompt_lookup_min", self.prompt_lookup_min),
            asked.get("prompt_lookup_max", self.prompt_lookup_max),
        )

    def draft_bytes(self, max_seq_len: int) -> int:
        """Most bytes of what tokens are guessed from."""
        speculator = self.speculator()
        return 0 if speculator is None else speculator.proposer.most_bytes(self.max_running_requests, max_seq_len)

    @property
    def adapter_room(self) -> AdapterRoom:
        """Room for adapters."""
        return AdapterRoom(self.max_loras or len(self.lora_folders()), self.max_lora_rank)

    def lora_folders(self) -> dict[str, str]:
        """``lora`` as name -> folder. Raises ``InvalidInput`` for what is no list of name=folder."""
        found: dict[str, str] = {}
        for item in filter(None, (part.strip() for part in self.lora.split(","))):
            name, _, folder = item.partition("=")
            if not folder or name in found:
                raise InvalidInput(
                    "lora", item, "give each name once, with its folder: fr=adapters/fr,legal=/srv/legal"
                )
            check_name(name)
            found[name] = folder
        return found

    def policy_settings(self) -> PolicySettings:
        """Weights and ageing of the policies. Raises ``InvalidInput`` for what is no list of tenant=weight."""
        weights: dict[str, int] = {}
        for item in filter(None, (part.strip() for part in self.tenant_weights.split(","))):
            tenant, _, weight = item.rpartition("=")
            if not (tenant and weight.isdecimal() and len(weight) < 10) or tenant in weights:
                raise InvalidInput("tenant_weights", item, "give each tenant once, with a whole number: alice=3,bob=2")
            weights[tenant] = int(weight)
        return PolicySettings(ageing_s=self.priority_ageing_s, weights=tuple(weights.items()))


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidInput(name, value, "use one of " + ", ".join(allowed))


def _at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidInput(name, value, f"give a whole number of at least {least}")
