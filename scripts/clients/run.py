"""Clients that people use, each run as it is against a real server: `make clients`.

Each script of this folder runs in an environment of its own, made once from the package registry, and prints one line.
The lines go into docs/clients.md with `--write`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "serve"))

from live_server import live_server  # noqa: E402

PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- clients -->\n", "<!-- end of clients -->\n"
SECONDS = 300
CLIENTS = {  # script -> what it needs
    "openai": ["openai"],
    "anthropic": ["anthropic"],
    "ollama": ["ollama"],
    "langchain": ["langchain-openai"],
    "llamaindex": ["llama-index-llms-openai-like", "llama-index-embeddings-openai-like"],
    "lm_eval": ["lm-eval[api]"],
    "aiperf": ["aiperf"],
}


def main() -> int:
    """Run the clients that are named, or all; the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", default=list(CLIENTS))
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--url", help="of a server that runs; default: one is started")
    parser.add_argument("--envs", type=Path, default=ROOT / "build" / "clients", help="where environments are made")
    parser.add_argument("--write", action="store_true", help="write the lines into docs/clients.md")
    options = parser.parse_args()
    pythons = {name: environment(options.envs / name, CLIENTS[name]) for name in options.clients}
    lines, failed = [], []
    with TemporaryDirectory() as folder, server(options.url, options.model, folder) as url:
        write_tokenizer(options.model, Path(folder))
        for name in options.clients:
            line = run(pythons[name], name, [url, options.model, folder])
            print(line or f"{name}: FAILED", flush=True)
            (lines if line else failed).append(line or name)
    if options.write and not failed:
        write(lines)
    return len(failed)


@contextmanager
def server(url: str | None, model: str, folder: str) -> Iterator[str]:
    """The server's URL."""
    if url is not None:
        yield url
        return
    with live_server(
        model, "--max-seq-len", "1024", "--kv-memory", "512MiB", "--batch-dir", f"{folder}/files"
    ) as started:
        yield started.url


def environment(folder: Path, packages: list[str]) -> Path:
    """The interpreter of an environment with these packages, which is made if there is none."""
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != packages:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        stamp.write_text(json.dumps(packages))
    return python


def write_tokenizer(model: str, folder: Path) -> None:
    """The model's tokenizer as clients of the hub read it."""
    from octavo.engine.vocabulary import load_tokenizer
    from octavo.weights.store import ModelStore

    tokenizer = load_tokenizer(str(ModelStore().resolve(model).path))
    (folder / "tokenizer.json").write_text(tokenizer._core.to_str())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def run(python: Path, name: str, arguments: list[str]) -> str:
    """The line that a script ends with; nothing if it failed, and then what it said goes to stderr."""
    quiet = {"PYTHONPATH": "", "TOKENIZERS_PARALLELISM": "false", "NO_PROXY": "*"}
    command = [python, str(HERE / f"{name}_client.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env={**os.environ, **quiet})
    if done.returncode == 0:
        return done.stdout.splitlines()[-1]
    sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
    return ""


def write(lines: list[str]) -> None:
    """The lines as the table of docs/clients.md."""
    rows = "".join("| {} | {} |\n".format(*line.split(": ", 1)) for line in lines)
    told = f"{date.today()}:\n\n| client | what was run |\n|---|---|\n{rows}"
    head, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(head + BEGIN + told + END + rest.split(END)[1])


if __name__ == "__main__":
    sys.exit(main())
