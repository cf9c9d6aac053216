"""`octavo chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from octavo.cli.sampling import SamplingFlags
from octavo.cli.session import Session
from octavo.core.errors import OctavoError
from octavo.engine.config import EngineConfig

__all__ = ["run_chat"]

_HELP = """/clear          forget the conversation
/system TEXT    tell the model TEXT first, and begin anew
/help           this list
/exit           leave (or Ctrl-D)"""


@dataclass
class _Talk:
    """What was said so far."""

    system: str
    turns: list[dict[str, Any]] = field(default_factory=list)

    def messages(self) -> list[dict[str, Any]]:
        """As the API takes them."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.turns


def run_chat(config: EngineConfig, sampling: SamplingFlags, system: str) -> None:
    """Talk until the person leaves. Raises ``OctavoError`` if the model cannot be loaded."""
    console = Console(highlight=False)
    with suppress(ImportError):
        import readline  # noqa: F401  (input() gets line editing and history)
    with Session(config, lambda line: console.print(line, style="dim", markup=False)) as session:
        console.print(
            f"{session.model_name}, {session.max_seq_len} tokens of context. /help lists commands.", style="dim"
        )
        talk = _Talk(system)
        while (line := _ask()) is not None:
            if line.startswith("/"):
                if not _command(line, talk, console):
                    return
            elif line:
                _answer(session, sampling, talk, line, console)


def _ask() -> str | None:
    """A line from the person; None when there are no more."""
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        return ""


def _command(line: str, talk: _Talk, console: Console) -> bool:
    """Obey a command; false to leave."""
    name, _, rest = line.partition(" ")
    if name in ("/exit", "/quit", "/bye"):
        return False
    if name == "/clear":
        talk.turns.clear()
    elif name == "/system":
        talk.system = rest.strip()
        talk.turns.clear()
    elif name in ("/help", "/?"):
        console.print(_HELP, markup=False)
    else:
        console.print(f"{name} is no command. /help lists them.", style="yellow", markup=False)
    return True


def _answer(session: Session, sampling: SamplingFlags, talk: _Talk, line: str, console: Console) -> None:
    """Stream one answer. An error leaves the conversation as it was before the question."""
    talk.turns.append({"role": "user", "content": line})
    said: list[str] = []
    started, tokens = time.monotonic(), 0
    try:
        with closing(session.stream({"messages": talk.messages(), **sampling.fields()})) as deltas:
            for delta in deltas:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
                said.append(delta.text)
                tokens += len(delta.token_ids)
    except KeyboardInterrupt:
        console.print(" [stopped]", style="yellow", markup=False, end="")
    except OctavoError as error:
        talk.turns.pop()
        console.print(f"{error} (/clear forgets what was said)", style="red", markup=False)
        return
    talk.turns.append({"role": "assistant", "content": "".join(said)})
    rate = tokens / max(time.monotonic() - started, 1e-9)
    console.print(f"\n({tokens} tokens, {rate:.1f} a second)", style="dim", markup=False)
