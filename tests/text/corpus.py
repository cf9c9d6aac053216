"""The strings that tokenizer goldens are about: 2,048 different ones, made from a seed, so that only ids are stored."""

# ruff: noqa: E501
from __future__ import annotations

import hashlib
import random

COUNT = 2048
_SEED = 20_000
_SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<repo_name>",
    "<file_sep>",
    "<jupyter_start>",
    "<bos>",
    "<eos>",
    "<pad>",
    "<unk>",
    "<mask>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[multimodal]",
    "<unused7>",
    "<table>",
    "</td>",
    "<h1>",
    "<start_of_image>",
    "<0x41>",
    "<0x0A>",
    "<s>",
    "</s>",
    "[INST]",
]
_NEARLY_SPECIAL = [
    "<|im_end|",
    "|im_start|>",
    "< |im_end|>",
    "<|IM_END|>",
    "<bos",
    "<end_of_turn",
    "<<eos>>",
    "▁",
    "▁▁",
    "Ġ",
    "<|",
]
# first and last code point of blocks: Latin, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Tamil, Thai, Georgian, Hangul
# jamo, Ethiopic, Khmer, punctuation, arrows, box drawing, kana, CJK, Hangul, wide forms, Linear B, math, emoji
_BLOCKS = [
    (0x21, 0x7E), (0xA1, 0x17F), (0x370, 0x377), (0x391, 0x3A1), (0x400, 0x4FF), (0x5D0, 0x5EA), (0x620, 0x64A),
    (0x904, 0x939), (0xB85, 0xB8A), (0xE01, 0xE3A), (0x10D0, 0x10FA), (0x1100, 0x1112), (0x1200, 0x1248),
    (0x1780, 0x17B3), (0x2010, 0x2027), (0x2190, 0x21FF), (0x2500, 0x257F), (0x3041, 0x3096), (0x30A1, 0x30FA),
    (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFF01, 0xFF5E), (0x10000, 0x1000B), (0x1D400, 0x1D454), (0x1F300, 0x1F64F),
    (0x20000, 0x2A6DF),
]  # fmt: skip
_COMBINING = [(0x300, 0x36F), (0x591, 0x5AF), (0x64B, 0x652), (0x93E, 0x94D), (0xE31, 0xE31), (0x20D0, 0x20DC)]
_DIGITS = "0123456789" * 3 + "٠١٢३४५๓๔１２²³½Ⅷ"
_SPACES = [
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    " \n",
    "\n ",
    "\t\t",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u200b",
    " " * 33,
]
_EMOJI = ["👩‍👩‍👧‍👦", "🧑🏽‍🚀", "🏳️‍🌈", "🇫🇷", "🇩🇪🇯🇵", "👍🏿", "❤️‍🔥", "☠️", "1️⃣", "🫠", "😀", "👨‍💻", "‍", "\ufe0f"]
_WORDS = [
    "the",
    "of",
    "and",
    "a",
    "model's",
    "don't",
    "I'LL",
    "we've",
    "THEY'RE",
    "it'd",
    "naïve",
    "café",
    "Straße",
    "İstanbul",
    "ﬁne",
    "Ωμέγα",
    "привет",
    "Мир",
    "שלום",
    "مرحبا",
    "नमस्ते",
    "வணக்கம்",
    "สวัสดี",
    "გამარჯობა",
    "안녕하세요",
    "こんにちは",
    "カタカナ",
    "漢字",
    "世界",
    "你好",
    "Größe",
    "façade",
    "œuvre",
    "tokenization",
    "antidisestablishmentarianism",
    "HTTPServer",
    "snake_case",
    "camelCase",
    "kebab-case",
    "__init__",
    "x86_64",
    "v1.2.3",
    "3.14159",
    "1e-9",
    "0xDEADBEEF",
    "user@example.com",
    "https://a.b/c?d=e&f#g",
]
_CODE = [
    "def f(x: int) -> int:\n    return x**2\n", "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n", "SELECT * FROM t WHERE a='b';",
    "<div class=\"x\">&nbsp;</div>", "{\"a\": [1, 2.5, null, true], \"b\": {\"c\": \"\\u00e9\"}}", "#!/bin/sh\nset -eu\n", "λx. x → y", "if (a&&b||!c) {}",
    "\\frac{\\alpha}{\\beta^{2}}", "| a | b |\n|---|---|\n| 1 | 2 |", "```python\nprint('hi')\n```", "a = b ? c : d;  // why", "x <<= 3; y >>>= 1",
]  # fmt: skip


def golden_strings() -> list[str]:
    """The strings, always the same ones in the same order."""
    rng = random.Random(_SEED)
    fixed = [
        "",
        " ",
        "  ",
        "\n",
        "\t",
        "\x00",
        "a\x00b",
        "\ufeff",
        "\x7f\x01\x1b[0m",
        "a" * 700,
        "Donau" * 90,
        "é",
        "e\u0301",
        " a",
        "a ",
        *_SPECIAL,
    ]
    found = dict.fromkeys(fixed)
    while len(found) < COUNT:
        found[_string(rng)] = None
    return list(found)


def digest(strings: list[str]) -> str:
    """Tells whether two machines made the same strings."""
    return hashlib.sha256("\x1e".join(strings).encode()).hexdigest()


def _string(rng: random.Random) -> str:
    makers = [_scripts, _digits, _spaced, _words, _words, _emoji, _code, _special, _combining, _long, _controls, _mixed]
    return makers[rng.randrange(len(makers))](rng)


def _pick(rng: random.Random, items: str | list[str]) -> str:
    return items[rng.randrange(len(items))]


def _from_blocks(rng: random.Random, blocks: list[tuple[int, int]]) -> str:
    first, last = blocks[rng.randrange(len(blocks))]
    return chr(first + rng.randrange(last - first + 1))


def _scripts(rng: random.Random) -> str:
    block = [_BLOCKS[rng.randrange(len(_BLOCKS))]]
    return "".join(_from_blocks(rng, block) if rng.randrange(6) else " " for _ in range(rng.randrange(1, 24)))


def _digits(rng: random.Random) -> str:
    run = "".join(_pick(rng, _DIGITS) for _ in range(rng.randrange(1, 20)))
    return f"{_pick(rng, ['', ' ', 'a', '-', '  '])}{run}{_pick(rng, ['', ' ', '.5', ',000', '%', 'km', '  7'])}"


def _spaced(rng: random.Random) -> str:
    parts = [_pick(rng, _SPACES) if rng.randrange(2) else _pick(rng, _WORDS) for _ in range(rng.randrange(1, 9))]
    return "".join(parts)


def _words(rng: random.Random) -> str:
    return " ".join(_pick(rng, _WORDS) for _ in range(rng.randrange(1, 14))) + _pick(rng, ["", ".", "!?", "...", " "])


def _emoji(rng: random.Random) -> str:
    return "".join(_pick(rng, _EMOJI) if rng.randrange(3) else _pick(rng, _WORDS) for _ in range(rng.randrange(1, 7)))


def _code(rng: random.Random) -> str:
    indent = _pick(rng, ["", "    ", "\t", "  "])
    return "".join(indent + _pick(rng, _CODE) for _ in range(rng.randrange(1, 3)))


def _special(rng: random.Random) -> str:
    pools = [_SPECIAL, _NEARLY_SPECIAL, _WORDS, _SPACES]
    return "".join(_pick(rng, pools[rng.randrange(len(pools))]) for _ in range(rng.randrange(1, 7)))


def _combining(rng: random.Random) -> str:
    pieces = []
    for _ in range(rng.randrange(1, 8)):
        pieces.append(_from_blocks(rng, _BLOCKS[:8]))
        pieces += [_from_blocks(rng, _COMBINING) for _ in range(rng.randrange(4))]
    return "".join(pieces)


def _long(rng: random.Random) -> str:
    return (
        _pick(rng, _WORDS) * rng.randrange(2, 12)
        if rng.randrange(2)
        else _pick(rng, "abcXYZ.-=*_#") * rng.randrange(2, 70)
    )


def _controls(rng: random.Random) -> str:
    return "".join(
        chr(rng.randrange(0x20)) if rng.randrange(2) else _pick(rng, _WORDS) for _ in range(rng.randrange(1, 6))
    )


def _mixed(rng: random.Random) -> str:
    makers = [_scripts, _digits, _spaced, _words, _emoji, _special, _combining]
    return _pick(rng, _SPACES).join(makers[rng.randrange(len(makers))](rng) for _ in range(rng.randrange(2, 4)))
