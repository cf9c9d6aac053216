"""lm-eval's local-completions: logprobs of eighty endings, by token ids; the server's own tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from _told import arguments, tell

ITEMS = 20
url, model = arguments()
tasks = Path(__file__).with_name("tasks")
options = f"model={model},base_url={url}/v1/completions,num_concurrent=4,tokenizer_backend=remote"

with TemporaryDirectory() as folder:
    command = [
        Path(sys.executable).with_name("lm_eval"),
        "run",
        "--model",
        "local-completions",
        "--model_args",
        options,
    ]
    command += ["--tasks", "plain_facts", "--include_path", tasks, "--limit", str(ITEMS), "--output_path", folder]
    subprocess.run(command, check=True, cwd=tasks.parents[2])
    (file,) = Path(folder).rglob("results_*.json")
    told = json.loads(file.read_text())

count, accuracy = told["n-samples"]["plain_facts"]["effective"], told["results"]["plain_facts"]["acc,none"]
assert count == ITEMS and accuracy >= 0.75, (count, accuracy)
tell("lm-eval", f"local-completions with logprobs, {count} items of four endings, accuracy {accuracy:.2f}")
