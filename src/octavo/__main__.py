"""`python -m octavo` is `octavo`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line. Ctrl-C ends it with code 130, also while it is still being imported."""
    try:
        from octavo.cli.main import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
