"""Goldens of real checkpoints: greedy tokens and logits by `transformers`, from the dequantized weights in float32.

The weights are dequantized twice, by the GGUF loader of `transformers` and by the `gguf` package with the layout
changes spelled out here, and must agree bit for bit. Every generated sequence is run again in one pass without a
cache, and the two runs must choose the same tokens: the difference of their logits is stored as the noise of
float32 itself, beside which a gap between the two best tokens has to be judged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from gguf import GGUFReader, dequantize
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 64
LOGIT_STEPS = (0, 1, 7, 31, 63)  # output indices whose logits are stored; 0 is the prompt's last position
NUM_SAMPLED_IDS = 64
NUM_TOP = 20
NOISE_LIMIT = 2e-3  # cached against uncached: largest difference of any logit, at any step
STORED_NOISE_LIMIT = 2e-4  # the same at the steps whose logits are stored

_SUFFIXES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP_LEVEL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def hf_name(name: str, gemma: bool) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in _TOP_LEVEL:
        return _TOP_LEVEL[name]
    _, layer, suffix, kind = name.split(".")
    own = {
        "ffn_norm": "pre_feedforward_layernorm" if gemma else "post_attention_layernorm",
        "post_attention_norm": "post_attention_layernorm",
    }
    return f"model.layers.{layer}.{own.get(suffix) or _SUFFIXES[suffix]}.{kind}"


def gguf_tensors(path: Path, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Name and float32 values in the checkpoint's layout: rotary pairs of llama apart, norms of gemma less one."""
    gemma = config.model_type.startswith("gemma")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for tensor in GGUFReader(path).tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(tuple(reversed(tensor.shape.tolist())))
        suffix = tensor.name.split(".")[-2]
        if not gemma and suffix in heads:  # file: [head, pair, 2, in]; checkpoint: [head, 2, pair, in]
            pairs = values.shape[0] // heads[suffix] // 2
            values = values.reshape(heads[suffix], pairs, 2, -1).swapaxes(1, 2).reshape(values.shape)
        if gemma and suffix.endswith("norm"):
            values = values - np.float32(1)
        yield hf_name(tensor.name, gemma), np.ascontiguousarray(values, dtype=np.float32)


def load(path: Path) -> tuple[Any, Any]:
    """Model in float32 and tokenizer; `ValueError` when the two ways to dequantize differ in any bit."""
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    state = model.state_dict()
    seen = set()
    for name, values in gguf_tensors(path, model.config):
        seen.add(name)
        if not np.array_equal(state[name].numpy(), values):
            raise ValueError(f"{name}: the two dequantizations differ")
    missing = set(state) - seen - {"lm_head.weight"}
    if missing:
        raise ValueError(f"not in the file: {sorted(missing)}")
    return model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@torch.no_grad()
def greedy(model: Any, prompt_ids: list[int]) -> tuple[list[int], np.ndarray]:
    """The `NUM_TOKENS` most likely tokens, end-of-sequence included and passed over; logits `[NUM_TOKENS, V]`."""
    cache, ids, rows, tokens = None, torch.tensor([prompt_ids]), [], []
    for _ in range(NUM_TOKENS):
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        rows.append(out.logits[0, -1].numpy().copy())
        tokens.append(int(rows[-1].argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens, np.stack(rows)


@torch.no_grad()
def uncached(model: Any, prompt_ids: list[int], tokens: list[int]) -> np.ndarray:
    """Logits `[NUM_TOKENS, V]` of the same positions from one pass over prompt and output."""
    ids = torch.tensor([prompt_ids + tokens[:-1]])
    return model(input_ids=ids, use_cache=False, logits_to_keep=NUM_TOKENS).logits[0].numpy()


def golden(model: Any, prompt_ids: list[int], sampled: np.ndarray) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """One prompt's tokens (for the JSON file) and numbers (for the npz file)."""
    tokens, logits = greedy(model, prompt_ids)
    again = uncached(model, prompt_ids, tokens)
    noise = np.abs(again - logits).max(-1)
    too_noisy = noise.max() > NOISE_LIMIT or noise[list(LOGIT_STEPS)].max() > STORED_NOISE_LIMIT
    if again.argmax(-1).tolist() != tokens or too_noisy:
        raise ValueError(f"cached and uncached runs differ by up to {noise.max()}, prompt {prompt_ids[:8]}")
    order = np.argsort(-logits, axis=-1, kind="stable")
    pair = np.take_along_axis(logits, order[:, :2], axis=-1)
    kept = logits[list(LOGIT_STEPS)]
    top = order[list(LOGIT_STEPS), :NUM_TOP]
    plain = {"prompt_token_ids": prompt_ids, "output_token_ids": tokens}
    return plain, {
        "noise": noise,
        "gap": pair[:, 0] - pair[:, 1],
        "second_ids": order[:, 1].astype(np.int32),
        "logits": kept[:, sampled],
        "top_ids": top.astype(np.int32),
        "top_logits": np.take_along_axis(kept, top, axis=-1),
        "logsumexp": np.logaddexp.reduce(kept.astype(np.float64), axis=-1).astype(np.float32),
    }


def encode(tokenizer: Any, text: str, chat: bool) -> tuple[str, list[int]]:
    """The text as the model sees it and its ids: the file's own chat template, or one BOS and the text."""
    if chat:
        turns = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return text, tokenizer(text, add_special_tokens=False).input_ids
    return text, [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids]


def write_real(path: Path, prompts: tuple[str, ...], chat: bool, target: Path) -> None:
    """`target`.json and `target`.npz: what the model at `path` answers to `prompts`."""
    model, tokenizer = load(path)
    vocab = model.config.vocab_size
    sampled = np.sort(np.random.RandomState(0).choice(vocab, NUM_SAMPLED_IDS, replace=False)).astype(np.int32)
    plains, arrays = [], []
    for prompt in prompts:
        text, ids = encode(tokenizer, prompt, chat)
        plain, numbers = golden(model, ids, sampled)
        plains.append({"user": prompt, "text": text} | plain if chat else {"text": text} | plain)
        arrays.append(numbers)
        print(
            f"{path.name}: {len(ids)} tokens, least gap {numbers['gap'].min():.2e}, noise {numbers['noise'].max():.1e}"
        )
    stacked = {key: np.stack([numbers[key] for numbers in arrays]) for key in arrays[0]}
    np.savez_compressed(target.with_suffix(".npz"), sampled_ids=sampled, **stacked)
    head = {
        "file": path.name,
        "made_with": {"transformers": transformers.__version__, "torch": torch.__version__},
        "note": "greedy, float32, eager attention; end-of-sequence does not end an output",
        "eos_token_id": model.config.eos_token_id,
        "logit_steps": LOGIT_STEPS,
    }
    target.with_suffix(".json").write_text(dump(head, plains), encoding="utf-8")


def dump(head: dict[str, Any], prompts: list[dict[str, Any]]) -> str:
    """JSON with one line for each prompt, so that a change shows in a diff."""
    lines = ",\n".join("  " + json.dumps(plain, ensure_ascii=False) for plain in prompts)
    return json.dumps(head, indent=1)[:-2] + ',\n "prompts": [\n' + lines + "\n ]\n}\n"
