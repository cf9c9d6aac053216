"""`octavo run`: one prompt to standard output, or a file of prompts to a file of answers.

The answers file is only ever appended to, one whole line at a time, so a run that was cut goes on where it ended:

    {"index": 3, "key": "9f2c...", "text": "...", "finish_reason": "stop", "usage": {...}}

A refused prompt has "error" instead of a text; "warnings" names what was not honoured. `index` is the line of the
prompts file; `key` identifies what was asked of which model, so that an answer is not taken for another's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from octavo.cli.errors import Refused
from octavo.cli.sampling import SamplingFlags
from octavo.cli.session import Session
from octavo.core.errors import InvalidInput
from octavo.engine.config import EngineConfig
from octavo.serve.errors import ApiError

__all__ = ["run_file", "run_prompt"]

_IN_FLIGHT = 64
_BEGINNING = b'{"index": '  # of every line of answers


@dataclass(frozen=True)
class _Task:
    """One line of the prompts file."""

    index: int
    key: str
    body: dict[str, Any]


def run_prompt(config: EngineConfig, sampling: SamplingFlags, prompt: str, system: str, raw: bool) -> None:
    """Stream the answer to one prompt, read from standard input for `-` or nothing. Raises ``OctavoError``."""
    text = _given(prompt)
    _say_loading(config)
    with Session(config, _quiet) as session:
        body = _body(text, sampling, system, raw)
        with closing(session.stream(body)) as deltas:
            for delta in deltas:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
    print()


def _given(prompt: str) -> str:
    if prompt not in ("", "-"):
        return prompt
    if prompt == "" and sys.stdin.isatty():
        raise Refused('no prompt: give one, as in: octavo run "Why is the sky blue?"')
    text = sys.stdin.read().strip()
    if not text:
        raise Refused("no prompt: standard input is empty; give one")
    return text


def _say_loading(config: EngineConfig) -> None:
    """To a person at a terminal: why nothing is seen yet."""
    if sys.stderr.isatty():
        print(f"loading {config.model}", file=sys.stderr, flush=True)


def _quiet(line: str) -> None:
    """The plan is for those who serve."""


def _body(value: Any, sampling: SamplingFlags, system: str, raw: bool) -> dict[str, Any]:
    """A request body out of a string or a line's object; flags fill in what the line leaves open."""
    given = {"prompt": value} if isinstance(value, str) else dict(value)
    if isinstance(given.get("prompt"), str) and not raw:
        given["messages"] = [{"role": "user", "content": given.pop("prompt")}]
    if system and "messages" in given:
        given["messages"] = [{"role": "system", "content": system}, *given["messages"]]
    return {**sampling.fields(), **given}


def run_file(
    config: EngineConfig, sampling: SamplingFlags, file: Path, out: Path | None, system: str, raw: bool
) -> None:
    """Answer each line of `file` into `out` (or standard output). Raises ``InvalidInput`` for a damaged file."""
    tasks = list(_tasks(config.model, file, sampling, system, raw))
    done = _done(out, tasks) if out is not None else set()
    todo = [task for task in tasks if task.index not in done]
    if done:
        print(f"{len(done)} of {len(tasks)} are answered already", file=sys.stderr)
    if not todo:
        return
    _say_loading(config)
    sink: IO[str] = sys.stdout if out is None else open(out, "a", encoding="utf-8")  # noqa: SIM115 (closed below)
    try:
        with Session(config, _quiet) as session, _progress(len(tasks), len(done), out is not None) as tick:
            failed = session.call(_answer_all(session, todo, sink, tick))
    except KeyboardInterrupt:
        if out is not None:
            print("stopped; the same command goes on from here", file=sys.stderr)
        raise
    finally:
        if out is not None:
            sink.close()
    if failed:
        print(f"{failed} of {len(todo)} were refused; their lines hold an error", file=sys.stderr)


def _tasks(model: str, file: Path, sampling: SamplingFlags, system: str, raw: bool) -> Iterator[_Task]:
    asked_of = json.dumps([model, system, raw, sampling.fields()])
    with open(file, "rb") as lines:
        for index, raw_line in enumerate(lines):
            line = _decoded(raw_line, index)
            if line.strip():
                value = _parsed(line, index)
                key = hashlib.sha256(f"{asked_of}\n{line.strip()}".encode()).hexdigest()[:16]
                yield _Task(index, key, _body(value, sampling, system, raw))


def _decoded(line: bytes, index: int) -> str:
    try:
        return line.decode("utf-8-sig" if index == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"file, line {index + 1}", line[:40], "is not UTF-8; save the file as UTF-8") from error


def _parsed(line: str, index: int) -> Any:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if isinstance(value, str) or (isinstance(value, dict) and ("prompt" in value or "messages" in value)):
        return value
    remedy = 'must be a JSON string, {"prompt": "..."} or {"messages": [...]}'
    raise InvalidInput(f"file, line {index + 1}", line.strip()[:40], remedy)


def _done(out: Path, tasks: list[_Task]) -> set[int]:
    """Which lines have an answer. A last line that was cut is taken away; a file of anything else is left alone."""
    if not out.is_file():  # a device or a pipe has nothing to go on from, and may have no end
        return set()
    whole = out.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    keys = {task.index: task.key for task in tasks}
    done = set()
    for line in kept.splitlines():
        index, key = _signature(line, out)
        if keys.get(index) != key:
            raise InvalidInput(
                "out", str(out), "holds answers to other prompts, another model or other flags; name another file"
            )
        done.add(index)
    cut = whole[len(kept) :]
    if cut[: len(_BEGINNING)] != _BEGINNING[: len(cut)]:
        raise _no_answers(out)
    if cut:
        os.truncate(out, len(kept))
    return done


def _signature(line: bytes, out: Path) -> tuple[int, str]:
    try:
        value = json.loads(line)
        return value["index"], value["key"]
    except (ValueError, KeyError, TypeError):
        raise _no_answers(out) from None


def _no_answers(out: Path) -> InvalidInput:
    return InvalidInput("out", str(out), "is no file of answers; name another, or remove it")


def _progress(total: int, done: int, shown: bool) -> Any:
    """A bar on standard error that yields a function to call for each answer."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    @contextmanager
    def bar() -> Iterator[Callable[[], None]]:
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
            task = progress.add_task("", total=total, completed=done)
            yield lambda: progress.advance(task)

    return bar()


async def _answer_all(session: Session, todo: list[_Task], sink: IO[str], tick: Callable[[], None]) -> int:
    """Answer all, a bounded number at once, and write each as it is done. How many were refused."""
    places = asyncio.Semaphore(_IN_FLIGHT)
    failed = 0

    async def one(task: _Task) -> None:
        nonlocal failed
        async with places:
            answer = await _answer(session, task)
        failed += "error" in answer
        sink.write(json.dumps(answer, ensure_ascii=False) + "\n")
        sink.flush()
        tick()

    await asyncio.gather(*(one(task) for task in todo))
    return failed


async def _answer(session: Session, task: _Task) -> dict[str, Any]:
    """One line of the answers file."""
    head = {"index": task.index, "key": task.key}
    try:
        job, warnings = await session.job(task.body)
        texts: dict[int, list[str]] = {index: [] for index in range(job.num_choices)}
        reasons: dict[int, str | None] = {}
        async for index, delta in session.deltas(job):
            texts[index].append(delta.text)
            reasons[index] = delta.finish_reason or reasons.get(index)
    except ApiError as error:
        return {**head, "error": error.body()["error"]}
    usage = job.usage()
    counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    choices = [{"text": "".join(text), "finish_reason": reasons.get(index)} for index, text in texts.items()]
    answer = {**head, **(choices[0] if len(choices) == 1 else {"choices": choices}), "usage": counts}
    return {**answer, "warnings": warnings} if warnings else answer
