"""Every parameter of every request body, and what becomes of it: `docs/api.md` holds the table, a test walks it.

python tests/serve/parameter_matrix.py      # writes the table into docs/api.md
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.serve.apis import anthropic, embeddings, ollama, ollama_embed, responses, scoring, tokens
from octavo.serve.known_names import GENERATION, Names
from octavo.serve.protocol import ChatRequest, CompletionRequest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
BEGIN, END = "<!-- parameters -->\n", "<!-- end of parameters -->\n"
TURNS: Any = [{"role": "user", "content": "hé"}]


@dataclass(frozen=True)
class Body:
    """One kind of body: where it goes, its fields, its names, the least of it, and where its names stand in it."""

    column: str
    path: str
    kind: Any
    least: dict[str, Any]
    names: Names = GENERATION
    inside: str = ""

    def with_(self, **values: Any) -> dict[str, Any]:
        """The least body and these parameters."""
        least = {name: value for name, value in self.least.items() if name not in map(self.names.aliases.get, values)}
        return {**least, self.inside: values} if self.inside else {**least, **values}

    @property
    def prefix(self) -> str:
        """What stands before a name in what is said of it."""
        return f"{self.inside}." if self.inside else ""


_RESPONSES, _MESSAGES = "/v1/responses", "/v1/messages"
BODIES = [
    Body("completions", "/v1/completions", CompletionRequest, {"prompt": "hé"}),
    Body("chat", "/v1/chat/completions", ChatRequest, {"messages": TURNS}),
    Body("responses", _RESPONSES, responses.ResponsesRequest, {"input": "hé"}, responses.NAMES),
    Body("messages", _MESSAGES, anthropic.MessagesRequest, {"messages": TURNS, "max_tokens": 99}, anthropic.NAMES),
    Body("`api/chat`", "/api/chat", ollama.OllamaChat, {"messages": TURNS, "stream": False}, ollama.NAMES),
    Body("`api/generate`", "/api/generate", ollama.OllamaGenerate, {"prompt": "hé", "stream": False}, ollama.NAMES),
    Body(
        "Ollama's `options`",
        "/api/chat",
        ollama.OllamaOptions,
        {"messages": TURNS, "stream": False},
        ollama.OPTIONS,
        inside="options",
    ),
    Body("embeddings", "/v1/embeddings", embeddings.EmbeddingsRequest, {"input": "hé"}, embeddings.NAMES),
    Body("rerank", "/rerank", scoring.RerankRequest, {"query": "a", "documents": ["b", "ab", "a"]}, scoring.RERANK),
    Body("score", "/score", scoring.ScoreRequest, {"text_1": "a", "text_2": "ab"}, scoring.SCORE),
    Body("`api/embed`", "/api/embed", ollama_embed.EmbedRequest, {"input": "hé"}, ollama_embed.EMBED),
]
OTHERS = [
    Body("", "/tokenize", tokens.TokenizeTextRequest, {"prompt": "hé"}),
    Body("", "/tokenize", tokens.TokenizeChatRequest, {"messages": TURNS}),
    Body("", "/detokenize", tokens.DetokenizeRequest, {"tokens": [97]}),
    Body("", "/apply-template", tokens.TemplateRequest, {"messages": TURNS}),
    Body("", f"{_MESSAGES}/count_tokens", anthropic.CountTokensRequest, {"messages": TURNS}, anthropic.NAMES),
    Body("", "/api/show", ollama.ShowRequest, {}, ollama.SHOW),
    Body("", "/api/embeddings", ollama_embed.OldEmbedRequest, {"prompt": "hé"}, ollama_embed.EMBEDDINGS),
]


@dataclass
class _Row:
    cells: dict[str, str] = field(default_factory=dict)


def table() -> str:
    """The matrix, in Markdown."""
    rows: dict[str, _Row] = {}
    for body in BODIES:
        fields = body.kind.__struct_fields__
        cells = dict.fromkeys(fields, "yes")
        cells |= {name: f"`{target}`" for name, target in body.names.aliases.items() if target in fields}
        cells |= {name: "refused" for name in body.names.refused if name not in fields}
        cells |= {name: "no effect" for name in body.names.idle if name not in fields}
        for name, cell in cells.items():
            rows.setdefault(name, _Row()).cells[body.column] = cell
    columns = [body.column for body in BODIES]
    lines = [f"| parameter | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name in sorted(rows):
        lines.append(f"| `{name}` | {' | '.join(rows[name].cells.get(column, '') for column in columns)} |")
    return "\n".join(lines) + "\n"


def page_with(text: str, matrix: str) -> str:
    """The page with this matrix in its place."""
    head, rest = text.split(BEGIN)
    return head + BEGIN + matrix + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(), table()))
