"""The prompts of the golden runs: twenty user turns for a chat model, twenty texts for a base model to continue."""

from __future__ import annotations

__all__ = ["CHAT_PROMPTS", "PLAIN_PROMPTS"]

CHAT_PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea in winter.",
    "List five fruits that are red.",
    "Translate to French: The cat sleeps on the warm roof.",
    "def fibonacci(n):\n    # finish this Python function\n",
    "What is 17 + 25? Show the steps.",
    "Who wrote the play Hamlet, and when?",
    "Give me a recipe for pancakes with exactly four ingredients.",
    "Summarize: The river rose for three days. The bridge held, but the mill did not. The village moved uphill.",
    "Why do cats purr?",
    "Write a polite email that declines a meeting on Friday afternoon.",
    "Qu'est-ce que la photosynthèse ?",
    "日本の首都はどこですか。",
    "Name three differences between TCP and UDP.",
    "I feel tired today 😴. Any advice?",
    'Return a JSON object with the keys "name" and "age" for a fictional person.',
    "Tell me a very short story about a lighthouse keeper and a paper boat.",
    "Is 91 a prime number?",
    "What should I check before I buy a used bicycle? Answer as a numbered list.",
)

_DIARY = (
    "Day {day}. The wind came from the {wind} and the glass stood at {glass}. We counted {gulls} gulls on the rocks "
    "before breakfast, and the keeper wrote the number down as he always does. At noon a {ship} passed, "
    "heading for the harbour with {cargo} on deck.\n"
)
_WINDS = ("north", "east", "south west", "west", "north east")
_SHIPS = ("schooner", "trawler", "small ferry", "coal barge", "white yacht", "tug", "pilot boat")
_CARGOES = ("timber", "barrels of salt", "crates of apples", "nothing at all")


def _diary(days: int) -> str:
    """About 65 tokens a day: long enough, with `days` of ten or more, to leave a window of 512 tokens behind."""
    return "The log of the lighthouse\n\n" + "".join(
        _DIARY.format(
            day=day,
            wind=_WINDS[day % len(_WINDS)],
            glass=960 + 7 * day % 83,
            gulls=3 + 11 * day % 37,
            ship=_SHIPS[day % len(_SHIPS)],
            cargo=_CARGOES[day % len(_CARGOES)],
        )
        for day in range(1, days + 1)
    )


def _table(rows: int) -> str:
    """About 30 tokens a row, nearly all of them digits and separators."""
    body = (f"| {n} | {n * n} | {n * n * n} | {'even' if n % 2 == 0 else 'odd'} |\n" for n in range(1, rows + 1))
    return "| n | square | cube | parity |\n|---|---|---|---|\n" + "".join(body)


PLAIN_PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village between two mountains,",
    "import numpy as np\n\ndef softmax(x):\n",
    "The three laws of motion are:\n1.",
    "Water boils at 100 degrees Celsius because",
    "Q: How many legs does a spider have?\nA:",
    "In 1969, the first human",
    "La révolution française a commencé en",
    "Die Hauptstadt von Österreich ist",
    "東京は",
    "SELECT name, COUNT(*) FROM orders",
    "To make bread you need flour, water,",
    "😀 😃 😄 are called",
    "0, 1, 1, 2, 3, 5, 8, 13,",
    "<html>\n  <head>\n    <title>",
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondria is",
    "There was an old man of",
    _diary(14) + "Day 15.",
    _table(40) + "| 41 |",
)
