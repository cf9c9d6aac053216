"""Write fixtures/tiny_model.json and fixtures/tiny_two_groups.json: config, weights, tokenizer, scenario, golden.

    python3 scripts/make_tiny_fixture.py [--check]

Standard library only, and nothing of Octavo is imported: the golden tokens come from the plain forward pass below,
which keeps no cache and recomputes every position for every token. The engine has to agree with it, not it with the
engine. ``--check`` writes nothing and fails if the files on disk differ from what would be written.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from operator import mul
from pathlib import Path

UNIT = 1 / 1024  # every weight is a whole multiple of this: exact in float32 and in JSON
MIN_MARGIN = 2e-3  # golden tokens keep this distance between the best and the second logit
FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
TOKENS = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz", " ", *"0123456789", *".,!?:;'-()", *"ABCDE"]  # 56
TOKENIZER = {
    "type": "simple",
    "kind": "characters",
    "vocab": TOKENS,
    "special": SPECIAL,
    "bos": "<bos>",
    "eos": ["<eos>"],
    "unk": "<unk>",
    "add_bos": True,
}

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 56,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}

GEMMA = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 56,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "query_pre_attn_scalar": 8,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "bos_token_id": 1,
    "eos_token_id": [2],
    "torch_dtype": "float32",
}

# ---------------------------------------------------------------------------------------------------- weights


def tensor_shapes(config: dict) -> dict[str, list[int]]:
    """Checkpoint names and shapes, ``[out, in]`` for matrices."""
    hidden, inter, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden]}
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        shapes[base + "self_attn.q_proj.weight"] = [q_rows, hidden]
        shapes[base + "self_attn.k_proj.weight"] = [kv_rows, hidden]
        shapes[base + "self_attn.v_proj.weight"] = [kv_rows, hidden]
        shapes[base + "self_attn.o_proj.weight"] = [hidden, q_rows]
        shapes[base + "mlp.gate_proj.weight"] = [inter, hidden]
        shapes[base + "mlp.up_proj.weight"] = [inter, hidden]
        shapes[base + "mlp.down_proj.weight"] = [hidden, inter]
        norms = ["input_layernorm", "post_attention_layernorm"]
        if config["model_type"] == "gemma3_text":
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            shapes[base + "self_attn.q_norm.weight"] = [head]
            shapes[base + "self_attn.k_norm.weight"] = [head]
        for norm in norms:
            shapes[f"{base}{norm}.weight"] = [hidden]
    shapes["model.norm.weight"] = [hidden]
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = [config["vocab_size"], hidden]
    return shapes


def tensor_units(name: str, shape: list[int], seed: int, gemma: bool) -> list[int]:
    """The tensor as multiples of ``UNIT``: drawn from the name and the seed, so any one can be made alone."""
    rng = random.Random(f"{seed}:{name}")
    count = math.prod(shape)
    if len(shape) == 1:
        # Gemma's norms add one; large ones after the blocks keep the tied embedding from echoing its own token
        centre = (1024 if "post_" in name else 0) if gemma else 1024
        spread = 256
    else:
        centre, spread = 0, (200 if gemma else 700) if "embed" in name or "lm_head" in name else 560
    return [centre + math.floor(rng.random() * (2 * spread + 1)) - spread for _ in range(count)]


def reshape(units: list[int], shape: list[int]) -> list:
    """Whole multiples of ``UNIT`` as (nested) lists of floats."""
    values = [unit * UNIT for unit in units]
    if len(shape) == 1:
        return values
    width = shape[1]
    return [values[row * width : (row + 1) * width] for row in range(shape[0])]


# ------------------------------------------------------------------------- the independent forward pass


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(map(mul, a, b))


def project(matrix: list[list[float]], vector: list[float]) -> list[float]:
    return [dot(row, vector) for row in matrix]


def normed(vector: list[float], weight: list[float], eps: float, offset: float) -> list[float]:
    scale = 1 / math.sqrt(math.fsum(x * x for x in vector) / len(vector) + eps)
    return [x * scale * (offset + w) for x, w in zip(vector, weight, strict=True)]


def rotated(vector: list[float], position: int, theta: float) -> list[float]:
    """Rotary embedding over the two halves of one head."""
    half = len(vector) // 2
    out = list(vector)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(vector))
        a, b = vector[i], vector[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def activation(x: float, gemma: bool) -> float:
    if gemma:
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + math.exp(-x))


def layer_attention(states: list[list[float]], w: dict, base: str, config: dict, theta: float, window: int) -> list:
    """Attention of every position over all positions it may see, from the normed states [T][hidden]."""
    head, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    gemma, eps = config["model_type"] == "gemma3_text", config["rms_norm_eps"]

    def split(name: str, count: int, norm: str | None) -> list[list[list[float]]]:
        out = []
        for position, state in enumerate(states):
            flat = project(w[f"{base}self_attn.{name}.weight"], state)
            parts = [flat[h * head : (h + 1) * head] for h in range(count)]
            if norm and gemma:
                parts = [normed(part, w[f"{base}self_attn.{norm}.weight"], eps, 1.0) for part in parts]
            out.append([rotated(part, position, theta) for part in parts] if norm else parts)
        return out

    q, k, v = split("q_proj", heads, "q_norm"), split("k_proj", kv_heads, "k_norm"), split("v_proj", kv_heads, None)
    scale = config.get("query_pre_attn_scalar", head) ** -0.5
    results = []
    for position in range(len(states)):
        first = max(0, position - window + 1) if window else 0
        joined: list[float] = []
        for h in range(heads):
            kv = h * kv_heads // heads
            scores = [scale * dot(q[position][h], k[p][kv]) for p in range(first, position + 1)]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            total = math.fsum(weights)
            for d in range(head):
                column = [v[p][kv][d] for p in range(first, position + 1)]
                joined.append(dot(weights, column) / total)
        results.append(project(w[f"{base}self_attn.o_proj.weight"], joined))
    return results


def forward(tokens: list[int], w: dict, config: dict) -> list[float]:
    """Logits after the last token; every layer of every position is computed anew."""
    gemma, eps = config["model_type"] == "gemma3_text", config["rms_norm_eps"]
    offset = 1.0 if gemma else 0.0
    scale = math.sqrt(config["hidden_size"]) if gemma else 1.0
    states = [[x * scale for x in w["model.embed_tokens.weight"][token]] for token in tokens]
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}."
        local = gemma and config["layer_types"][layer] == "sliding_attention"
        theta = config["rope_local_base_freq"] if local else config["rope_theta"]
        window = config["sliding_window"] if local else 0

        def norm(rows: list, name: str, base: str = base) -> list:
            return [normed(row, w[f"{base}{name}.weight"], eps, offset) for row in rows]

        mixed = layer_attention(norm(states, "input_layernorm"), w, base, config, theta, window)
        if gemma:
            mixed = norm(mixed, "post_attention_layernorm")
        states = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(states, mixed, strict=True)]
        rows = norm(states, "pre_feedforward_layernorm" if gemma else "post_attention_layernorm")
        outs = []
        for row in rows:
            gate, up = project(w[base + "mlp.gate_proj.weight"], row), project(w[base + "mlp.up_proj.weight"], row)
            inner = [activation(g, gemma) * u for g, u in zip(gate, up, strict=True)]
            outs.append(project(w[base + "mlp.down_proj.weight"], inner))
        if gemma:
            outs = norm(outs, "post_feedforward_layernorm")
        states = [[a + b for a, b in zip(x, y, strict=True)] for x, y in zip(states, outs, strict=True)]
    last = normed(states[-1], w["model.norm.weight"], eps, offset)
    return project(w.get("lm_head.weight", w["model.embed_tokens.weight"]), last)


def greedy(prompt: list[int], max_tokens: int, w: dict, config: dict) -> tuple[list[int], str, float]:
    """Tokens, finish reason and the smallest distance between the best and the second logit."""
    eos = config["eos_token_id"]
    ends = eos if isinstance(eos, list) else [eos]
    tokens, margin = list(prompt), math.inf
    for _ in range(max_tokens):
        logits = forward(tokens, w, config)
        order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
        margin = min(margin, logits[order[0]] - logits[order[1]])
        tokens.append(order[0])
        if order[0] in ends:
            return tokens[len(prompt) :], "stop", margin
    return tokens[len(prompt) :], "length", margin


# -------------------------------------------------------------------------------------------- the documents


def encode(text: str) -> list[int]:
    return [1, *(TOKENS.index(char) for char in text)]


def request(name: str, text: str, max_tokens: int, arrival: int, **extra: object) -> dict:
    return {"id": name, "arrival_step": arrival, "prompt_token_ids": encode(text), "max_tokens": max_tokens, **extra}


def scenario() -> dict:
    """Short and long requests mixed, a shared prefix, a single token, no output at all, and one that is cancelled."""
    return {
        "page_size": 4,
        "num_pages": 48,
        "max_seq_len": 96,
        "budgets": {"max_batched_tokens": 16, "max_running_requests": 4, "max_prefill_chunk": 8},
        "seed": 0,
        "quantization": [
            {"bits": 8, "group_size": 16, "symmetric": True},
            {"bits": 4, "group_size": 16, "symmetric": False},
        ],
        "requests": [
            request("short", "hello", 6, 0),
            request("long", "the quick brown fox jumps over", 24, 0),
            request("exact-page", "abcdefg", 8, 1),
            request("single", "", 5, 2),
            request("shared-a", "system: be brief. one", 8, 2),
            request("shared-b", "system: be brief. two", 8, 4),
            request("nothing", "no output", 0, 4),
            request("cancelled", "stop me", 20, 3, cancel_after_tokens=3),
        ],
    }


def golden(plan: dict, w: dict, config: dict) -> dict:
    """Greedy tokens of every request that runs to its end; a cancelled one may show a prefix of its line."""
    out: dict[str, dict] = {}
    for item in plan["requests"]:
        tokens, reason, margin = greedy(item["prompt_token_ids"], item["max_tokens"], w, config)
        if margin < MIN_MARGIN:
            raise SystemExit(f"request {item['id']}: a near tie ({margin:.1e}); choose another seed")
        out[item["id"]] = {"token_ids": tokens, "finish_reason": reason}
    return out


def document(name: str, config: dict, seed: int, stored: bool) -> dict:
    gemma = config["model_type"] == "gemma3_text"
    shapes = tensor_shapes(config)
    units = {key: tensor_units(key, shape, seed, gemma) for key, shape in shapes.items()}
    w = {key: reshape(units[key], shape) for key, shape in shapes.items()}
    plan = scenario()
    weights: dict[str, object] = {"kind": "stored" if stored else "seeded", "seed": seed, "unit": UNIT}
    if stored:
        weights["tensors"] = {key: {"shape": shapes[key], "units": units[key]} for key in shapes}
    return {
        "schema": "octavo.fixture/1",
        "name": name,
        "licence": "Apache-2.0",
        "origin": "drawn at random by scripts/make_tiny_fixture.py; it was never trained",
        "model": config,
        "tokenizer": TOKENIZER,
        "weights": weights,
        "scenario": plan,
        "golden": {
            "method": "greedy, plain Python, no cache, every position recomputed for every token",
            "requests": golden(plan, w, config),
        },
    }


def render(doc: dict) -> str:
    """JSON with one line per leaf list, so that a diff is readable."""
    lines: list[str] = []
    for key, value in doc.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"  {json.dumps(k)}: {_leaf(v)}" for k, v in value.items())
            lines.append(f"{json.dumps(key)}: {{\n{inner}\n }}")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _leaf(value: object) -> str:
    if isinstance(value, dict) and any(isinstance(v, dict) for v in value.values()):
        return "{\n" + ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n  }"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"   {json.dumps(v)}" for v in value) + "\n  ]"
    return json.dumps(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail if the files on disk differ; write nothing")
    check = parser.parse_args().check
    documents = {
        "tiny_model.json": document("tiny-llama", LLAMA, 9, stored=True),
        "tiny_two_groups.json": document("tiny-gemma3", GEMMA, 14, stored=False),
    }
    stale = []
    for filename, doc in documents.items():
        path, text = FIXTURES / filename, render(doc)
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            stale.append(filename)
        elif not check:
            path.write_text(text, encoding="utf-8")
            print(f"{filename}: {len(text)} bytes, {json.dumps(doc['golden']['requests'])[:300]}")
    if stale:
        print("stale: " + ", ".join(stale) + "; run scripts/make_tiny_fixture.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
