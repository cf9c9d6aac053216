"""Files from the Hugging Face hub, through `huggingface_hub` (imported when used)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from octavo.core.errors import InvalidInput
from octavo.weights.fetching import REACH_S, FetchJob, SourceFailed
from octavo.weights.reach import unreachable_reason
from octavo.weights.sources import HubSource

__all__ = ["HUB_ID", "fetch_hub_file", "fetch_hub_folder", "parse_hub_id"]

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]{1,128}))?")

# Weights as safetensors, and the text files that describe them: never a pickle, never code.
_WANTED = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*.json",
           "special_tokens_map.json", "added_tokens.json", "chat_template*", "LICENSE*"]  # fmt: skip


def fetch_hub_file(source: HubSource, job: FetchJob) -> Path:
    """One file at its revision into `job.work`; a part fetched earlier is continued."""
    hub = _reached_hub()
    try:
        found = hub.hf_hub_download(source.repo, source.filename, revision=source.revision, local_dir=job.work)
    except Exception as error:  # the client's own tree, its HTTP library's, and the disk's
        raise SourceFailed(_reason(error)) from error
    return Path(found)


def fetch_hub_folder(repo: str, revision: str | None, offline: bool) -> Path:
    """A model repository's safetensors and JSON files, in the hub client's own cache.

    `SourceFailed` with the reason when it is not there, not reached, or (offline) not cached.
    """
    hub = _imported() if offline else _reached_hub()
    try:
        found = hub.snapshot_download(repo, revision=revision, allow_patterns=_WANTED, local_files_only=offline)
    except Exception as error:
        raise SourceFailed("not in the cache" if offline else _reason(error)) from error
    folder = Path(found)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise SourceFailed(f"{repo} holds no config.json with safetensors")
    return folder


def _imported() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise SourceFailed("the package huggingface_hub is not installed") from error
    return huggingface_hub


def _reached_hub() -> Any:
    hub = _imported()
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON"):
        raise SourceFailed("HF_HUB_OFFLINE is set")
    from huggingface_hub import constants

    reason = unreachable_reason(constants.ENDPOINT, REACH_S)
    if reason:
        raise SourceFailed(reason)
    return hub


def _reason(error: Exception) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0][:200]}" if first else type(error).__name__


def parse_hub_id(text: str) -> tuple[str, str | None]:
    """`org/name[@revision]` to its two parts."""
    match = HUB_ID.fullmatch(text)
    if match is None or ".." in text or "--" in match["repo"]:
        raise InvalidInput("model", text, "a hub id reads org/name or org/name@revision")
    return match["repo"], match["revision"]
