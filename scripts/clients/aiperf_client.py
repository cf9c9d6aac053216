"""aiperf, a public load generator: streamed chats, four at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from _told import arguments, tell, tokenizer_folder

REQUESTS = 24
url, model = arguments()

with TemporaryDirectory() as folder:
    command = [Path(sys.executable).with_name("aiperf"), "profile", "--model", model, "--url", url, "--streaming"]
    command += ["--endpoint-type", "chat", "--tokenizer", tokenizer_folder(), "--concurrency", "4", "--ui", "none"]
    command += ["--request-count", str(REQUESTS), "--isl", "64", "--osl", "32", "--random-seed", "1"]
    subprocess.run([*command, "--artifact-dir", folder], check=True)
    told = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())

assert told["request_count"]["avg"] == REQUESTS and not told.get("error_request_count"), told
tokens = told["total_usage_completion_tokens"]["avg"]
tell("aiperf", f"{REQUESTS} streamed chats, 4 at a time, all answered, {tokens:.0f} tokens")
