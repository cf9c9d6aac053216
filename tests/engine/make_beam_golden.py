"""Writes data/beam_smollm2.json: what beam search of ``transformers`` finds for 50 prompts, in fp32.

Needs torch, transformers 5 and gguf, which nothing else here does:
    python tests/engine/make_beam_golden.py FOLDER      # that holds SmolLM2-135M-Instruct.Q4_1.gguf

It is written after each prompt, and one that is there is gone on with.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

QUESTIONS = (
    *("What is the capital of France?", "Name a colour.", "Is water wet?", "What is 2 + 2?", "Say hello."),
    *("Who wrote Hamlet?", "Name a fruit.", "Is the sun a star?", "What do cows drink?", "Name a planet."),
)
OPENINGS = (
    *("The capital of Italy is", "Once upon a time there was", "1, 2, 3, 4,", "To boil an egg you", "The sea was"),
    *("def add(a, b):\n    return", "Dear Sir or Madam,", "Roses are red,", "My favourite book is", "In the year 1492"),
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"num_beams": 4, "length_penalty": 1.0, "early_stopping": False},
    {"num_beams": 3, "length_penalty": 0.0, "early_stopping": "never"},
    {"num_beams": 2, "length_penalty": 2.0, "early_stopping": True},
    {"num_beams": 5, "length_penalty": -1.0, "early_stopping": False, "min_new_tokens": 3},
    {"num_beams": 3, "length_penalty": 1.5, "early_stopping": "never"},
)
MAX_NEW_TOKENS = 9
NUM_CASES = 50
END = 2
PATH = Path(__file__).parent / "data" / "beam_smollm2.json"


def main(folder: str) -> None:
    """Search for all prompts that are not there yet."""
    import torch
    import transformers

    torch.set_num_threads(1)
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    cases = json.loads(PATH.read_text())["cases"] if PATH.exists() else []
    for index in range(len(cases), NUM_CASES):
        setting = SETTINGS[index % 5]
        text = (QUESTIONS if index % 2 else OPENINGS)[index // 5 % 10]
        asked = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" if index % 2 else text
        prompt = tokenizer(asked, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            found = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=MAX_NEW_TOKENS,
                num_return_sequences=setting["num_beams"],
                return_dict_in_generate=True,
                output_scores=True,
                eos_token_id=END,
                pad_token_id=END,
                **setting,
            )
        said = [_until_end(row[len(prompt) :]) for row in found.sequences.tolist()]
        scores = [round(value, 6) for value in found.sequences_scores.tolist()]
        cases.append({"prompt": prompt, **setting, "tokens": said, "scores": scores})
        _write({"transformers": transformers.__version__, "max_new_tokens": MAX_NEW_TOKENS, "cases": cases})


def _write(data: dict[str, Any]) -> None:
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text("{\n" + ",\n".join(f"{json.dumps(k)}: {_lines(v)}" for k, v in data.items()) + "\n}\n")


def _until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


def _lines(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(one) for one in value) + "\n]"


if __name__ == "__main__":
    main(sys.argv[1])
