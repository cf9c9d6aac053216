"""How the server listens and what it refuses. Command-line flags take their default and help from these fields."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, field, fields
from typing import Any

from octavo.core.admission import Limits
from octavo.core.errors import InvalidInput
from octavo.core.params import MAX_CHOICES, MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from octavo.decoding.reasoning import format_named
from octavo.decoding.tools import dialect_named
from octavo.engine.memory import parse_size
from octavo.engine.threads import cpu_quota, usable_cores

__all__ = ["ServeConfig"]

LAYOUTS = ("auto", "single", "compact", "full")
LAYOUT_RULE = "auto: compact (engine, front end and supervisor), but single with one CPU or without Unix sockets."
LOG_FORMATS = ("text", "json")
_MOST = (1 << 63) - 1
_RANGES = {
    **dict.fromkeys(("max_json_depth", "max_prompts", "max_prompt_chars", "max_pending"), (1, _MOST)),
    **dict.fromkeys(("max_connections", "max_inputs"), (1, _MOST)),
    **dict.fromkeys(("apis", "tokenizers"), (1, 64)),
    **dict.fromkeys(("max_waiting", "max_queued_tokens", "max_tenant_waiting", "max_tenant_tokens"), (0, _MOST)),
    **dict.fromkeys(("max_stored_responses", "max_stored_bytes"), (0, _MOST)),
    **dict.fromkeys(("max_batch_bytes", "max_batch_store", "max_batch_lines", "max_batch_files"), (1, _MOST)),
    "max_body_bytes": (1, 32 << 20),  # so that it fits into one message between processes
    "batch_concurrency": (1, 256),
    "max_choices": (1, MAX_CHOICES),
    "max_stop_strings": (0, MAX_STOP_STRINGS),
    "max_stop_chars": (1, MAX_STOP_CHARACTERS),
    "max_top_logprobs": (0, MAX_LOGPROBS),
    "max_logit_bias": (0, MAX_LOGIT_BIAS),
}
_HOST_NAME = re.compile(r"[A-Za-z0-9._\-]{1,255}")
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")


def _flag(default: Any, text: str) -> Any:
    """A dataclass field that documents itself."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ServeConfig:
    """Address and limits of one server. Raises ``InvalidInput`` for a value out of range."""

    host: str = _flag("127.0.0.1", "Address to listen on; 0.0.0.0 opens the server to the network.")
    port: int = _flag(8000, "Port to listen on; 0 picks a free one.")
    layout: str = _flag("auto", f"Processes: {', '.join(LAYOUTS)}. {LAYOUT_RULE}")
    apis: int = _flag(1, "Front ends that share the port, with --layout full.")
    tokenizers: int = _flag(1, "Processes for templates and tokenizing, with --layout full.")
    link: str = _flag("ipc", "How the processes meet: ipc, or tcp://ADDRESS of this machine (encrypted, with keys).")
    allowed_hosts: str = _flag("", "Names, separated by commas, that clients may call a server on loopback by.")
    key_file: str = _flag("", "File of API keys (SECURITY.md); default: none are needed.")
    share_prefixes: bool = _flag(False, "Let requests of different keys share cached prefixes.")
    admin_socket: str = _flag("", "Unix socket for the operator's routes (docs/api.md); default: there are none.")
    served_model_name: str = _flag("", "Name that clients use for the model; default: the name it was loaded by.")
    tool_call_parser: str = _flag("auto", "How the model writes tool calls; auto: as its chat template says.")
    reasoning_parser: str = _flag("auto", "How the model marks reasoning; auto: as its chat template says; or none.")
    max_body_bytes: int = _flag(4 << 20, "Largest request body; counted while reading.")
    max_json_depth: int = _flag(64, "Deepest nesting of a request body.")
    max_prompts: int = _flag(128, "Most sequences of one request: prompts times n.")
    max_inputs: int = _flag(2048, "Most texts of one request that become vectors.")
    max_choices: int = _flag(64, "Largest n.")
    max_stop_strings: int = _flag(16, "Most stop strings of one request.")
    max_stop_chars: int = _flag(256, "Longest stop string, in characters.")
    max_top_logprobs: int = _flag(20, "Most alternatives that logprobs may ask for.")
    max_logit_bias: int = _flag(1024, "Most entries of logit_bias.")
    max_prompt_chars: int = _flag(2_000_000, "Longest prompt before tokenizing, in characters.")
    max_pending: int = _flag(512, "Sequences that may run or wait at once; more are refused with 429.")
    max_waiting: int = _flag(0, "Sequences that may wait for their first token; 0: as many as --max-pending allows.")
    max_queued_tokens: int = _flag(1 << 20, "Prompt tokens, of each choice, that may wait at once; 0: any number.")
    max_tenant_waiting: int = _flag(0, "Sequences of one API key that may wait at once; 0: any number.")
    max_tenant_tokens: int = _flag(0, "Prompt tokens of one API key that may wait at once; 0: any number.")
    max_first_token_s: float = _flag(0.0, "Refuse what would wait longer for its first token, in seconds; 0: never.")
    max_request_memory: str = _flag("512MiB", "Memory that tokens and logprobs of requests inside may come to take.")
    max_stored_responses: int = _flag(1024, "Most responses that are kept to be asked for again; 0: none.")
    batch_dir: str = _flag("", "Folder for files and batches (docs/batches.md); default: there are none.")
    batch_concurrency: int = _flag(8, "Requests of batches that run at once.")
    max_batch_bytes: int = _flag(200 << 20, "Largest file of a batch.")
    max_batch_lines: int = _flag(50_000, "Most requests of one batch.")
    max_batch_files: int = _flag(500, "Most files, and most unfinished batches, of one API key.")
    max_batch_store: int = _flag(4 << 30, "Most bytes of all uploaded files in --batch-dir.")
    max_stored_bytes: int = _flag(64 << 20, "Most bytes of kept responses and what they were made from.")
    body_timeout: float = _flag(30.0, "Seconds that a client may take to send its body.")
    request_timeout: float = _flag(600.0, "Seconds that one request may take in all.")
    ready_timeout: float = _flag(30.0, "Seconds without a step, while there is work, after which it is not ready.")
    silence_timeout: float = _flag(30.0, "Seconds without a sign of life, after which a process is started anew.")
    step_timeout: float = _flag(120.0, "Seconds in one step, above the longest, after which an engine is started anew.")
    header_timeout: float = _flag(10.0, "Seconds that a client may take to send the head of a request.")
    idle_timeout: float = _flag(75.0, "Seconds that a connection may be open without a request.")
    peer_timeout: float = _flag(120.0, "Seconds after which a client that answers no probe of the system's is gone.")
    stall_timeout: float = _flag(30.0, "Seconds that a client may leave an answer unread before it is cut.")
    max_connections: int = _flag(1024, "Most open connections.")
    shutdown_timeout: float = _flag(30.0, "Seconds given to open requests at shutdown before they are cut.")
    log_level: str = _flag("warning", "What the server logs: critical, error, warning, info, debug or trace.")
    log_format: str = _flag("text", "Log lines as text, or as json with one for each request at its end.")
    otlp_endpoint: str = _flag(
        "", "URL that OpenTelemetry spans are sent to (docs/metrics.md); default: none are made."
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidInput("port", self.port, "give a port from 0 to 65535")
        if self.log_level not in LOG_LEVELS:
            raise InvalidInput("log_level", self.log_level, "use one of " + ", ".join(LOG_LEVELS))
        if self.log_format not in LOG_FORMATS:
            raise InvalidInput("log_format", self.log_format, "use one of " + ", ".join(LOG_FORMATS))
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise InvalidInput("otlp_endpoint", self.otlp_endpoint, "give a URL, as http://localhost:4318/v1/traces")
        if self.layout not in LAYOUTS:
            raise InvalidInput("layout", self.layout, "use one of " + ", ".join(LAYOUTS))
        self._check_roles()
        if self.tool_call_parser != "auto":
            dialect_named(self.tool_call_parser)
        if self.reasoning_parser not in ("auto", "none"):
            format_named(self.reasoning_parser)
        if not self.host.strip():
            raise InvalidInput("host", self.host, "give an address; 127.0.0.1 is this machine alone, 0.0.0.0 all")
        wrong = next((name for name in self.host_names if not _is_host(name)), None)
        if wrong is not None:
            raise InvalidInput("allowed_hosts", wrong, "give names alone, without scheme or port: box.lan,10.0.0.7")
        for name, (least, most) in _RANGES.items():
            if not least <= getattr(self, name) <= most:
                upper = "" if most == _MOST else f" and at most {most}"
                raise InvalidInput(name, getattr(self, name), f"give a number of at least {least}{upper}")
        if not 0 <= self.max_first_token_s < float("inf"):
            raise InvalidInput("max_first_token_s", self.max_first_token_s, "give a finite number of seconds, or 0")
        parse_size(self.max_request_memory, "max_request_memory")
        for name in (each.name for each in fields(self) if each.name.endswith("_timeout")):
            if not 0 < getattr(self, name) < float("inf"):
                raise InvalidInput(name, getattr(self, name), "give a finite number of seconds above 0")

    def _check_roles(self) -> None:
        scheme, _, address = self.link.partition("://")
        if self.link != "ipc" and not (scheme == "tcp" and _is_address(address)):
            raise InvalidInput("link", self.link, "use ipc, or tcp:// and an address of this machine: tcp://127.0.0.1")
        for name in ("apis", "tokenizers"):
            if getattr(self, name) != 1 and self.layout != "full":
                raise InvalidInput(name, getattr(self, name), "are processes of --layout full; ask for that")
        for name in ("admin_socket", "batch_dir"):
            if self.apis > 1 and getattr(self, name):
                raise InvalidInput(name, getattr(self, name), "is for one front end; use --apis 1")

    @property
    def link_address(self) -> str:
        """The address at which the processes meet, for TCP; empty: Unix sockets."""
        return self.link.partition("://")[2]

    @property
    def host_names(self) -> tuple[str, ...]:
        """The names of ``allowed_hosts``."""
        return tuple(name.strip().lower() for name in self.allowed_hosts.split(",") if name.strip())

    @property
    def resolved_layout(self) -> str:
        """``layout``, or what `auto` stands for on this machine."""
        if self.layout != "auto":
            return self.layout
        cores = min(usable_cores(), cpu_quota() or 2.0)
        return "compact" if cores >= 2 and os.name == "posix" else "single"

    def limits(self) -> Limits:
        """What may be inside at once."""
        return Limits(
            sequences=self.max_pending,
            waiting=self.max_waiting,
            queued_tokens=self.max_queued_tokens,
            tenant_waiting=self.max_tenant_waiting,
            tenant_tokens=self.max_tenant_tokens,
            held_bytes=parse_size(self.max_request_memory, "max_request_memory"),
            first_token_s=self.max_first_token_s,
        )


def _is_address(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def _is_host(name: str) -> bool:
    """Whether a Host header could name it, without its port."""
    return bool(_HOST_NAME.fullmatch(name)) or _is_address(name)
