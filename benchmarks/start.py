"""Time from `octavo serve` to the first token (a cached model), and the installed size of what it needs.

    python benchmarks/start.py [MODEL] [--layout compact] [--runs 5] [--no-size]

The clock runs from before the process is made until the first piece of a streamed answer has come, asked for as soon
as the server says that it serves. The size is that of the distributions that `octavo` requires without extras, and of
itself.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import octavo

BAR_SECONDS, BAR_MB = 1.5, 200
_SERVES = re.compile(r"at (http://\S+)")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--layout", default="auto")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-size", action="store_true")
    asked = parser.parse_args()
    found = [first_token(asked.model, asked.layout) for _ in range(asked.runs)]
    ready, token = (median(column) for column in zip(*found, strict=True))
    print(f"{asked.model}, layout {asked.layout}: serves after {ready:.2f} s, first token after {token:.2f} s", end=" ")
    print(f"(median of {asked.runs}; bar {BAR_SECONDS} s)")
    if not asked.no_size:
        sizes = installed_sizes("octavo")
        largest = ", ".join(f"{name} {size / 1e6:.1f}" for name, size in sorted(sizes.items(), key=lambda x: -x[1])[:8])
        print(f"installed: {sum(sizes.values()) / 1e6:.1f} MB in {len(sizes)} packages (bar {BAR_MB} MB): {largest}")


def first_token(model: str, layout: str) -> tuple[float, float]:
    """Seconds until it says that it serves, and until the first token has come."""
    begin = time.monotonic()
    path = [*(["-S"] if sys.flags.no_site else []), "-m", "octavo"]
    command = [sys.executable, *path, "serve", model, "--port", "0", "--layout", layout, "--offline"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = next(match[1] for line in process.stdout or () if (match := _SERVES.search(line)))
        ready = time.monotonic()
        _ask(url)
        return ready - begin, time.monotonic() - begin
    finally:
        process.terminate()
        process.wait(30)


def _ask(url: str) -> None:
    where = urlsplit(url)
    client = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "stream": True}
    client.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = client.getresponse()
    while b'"content":"' not in (line := answer.readline()).replace(b'"content":""', b""):
        if not line:
            raise RuntimeError("the answer ended without a token")
    client.close()


def installed_sizes(name: str) -> dict[str, int]:
    """Bytes of the files of a distribution and of all that it requires here, by name."""
    sizes: dict[str, int] = {}
    wanted = [name]
    while wanted:
        one = wanted.pop()
        if one in sizes:
            continue
        try:
            found = metadata.distribution(one)
        except metadata.PackageNotFoundError:  # for another platform
            continue
        places = [Path(str(found.locate_file(file))) for file in found.files or ()]
        if one == name:  # an editable install has its files elsewhere
            places += [place for place in Path(octavo.__file__).parent.rglob("*") if "__pycache__" not in place.parts]
        sizes[one] = sum(place.stat().st_size for place in {p.resolve() for p in places} if place.is_file())
        wanted += [_name(line) for line in found.requires or () if "extra ==" not in line]
    return sizes


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0].lower().replace("_", "-")


if __name__ == "__main__":
    main()
