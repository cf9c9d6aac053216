"""What the scripts of this folder share: where the server is, and the line that tells how it went."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

__all__ = ["arguments", "tell", "tokenizer_folder"]


def arguments() -> tuple[str, str]:
    """The server's URL and its model, from the command line."""
    return sys.argv[1], sys.argv[2]


def tokenizer_folder() -> Path:
    """A folder with the model's ``tokenizer.json``, from the command line."""
    return Path(sys.argv[3])


def tell(packages: str, what: str) -> None:
    """One line for `run.py`: packages with their versions, and what worked."""
    named = ", ".join(f"{package} {version(package)}" for package in packages.split())
    print(f"{named}: {what}")
