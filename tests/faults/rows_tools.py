"""Row 21: conversations, tools and calls that are not what they should be."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

import httpx

from faults.load import EOS, counts
from faults.rows import row
from faults.rows_grammars import stalls
from faults.world import World
from octavo.backends.null_backend import null_tokens

CHAT = "/v1/chat/completions"
SMOLLM2 = {"model": "smollm2-135m-instruct", "vocab": 49152, "max_seq_len": 8192, "silence_timeout": 30.0}
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
START = 1  # <|im_start|>
Turn = dict[str, Any]
USER: Turn = {"role": "user", "content": "hi"}


def _calls(arguments: Any, name: Any = "f") -> list[Turn]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


def _text(*parts: Any) -> list[Turn]:
    return [{"role": "user", "content": list(parts)}]


PART = {"type": "text", "text": "a"}
REFUSED: Sequence[Any] = (
    [], None, "hi", [None], ["hi"], [[]], [{}], [{"role": "user"}], [{"content": "hi"}],
    [{"role": "user", "content": None}], [{"role": "assistant", "content": None}], [{"role": "tool", "content": None}],
    [{"role": "root", "content": "hi"}], [{"role": None, "content": "hi"}], [{"role": 5, "content": "hi"}],
    [{"role": "User", "content": "hi"}], [{"role": "user\n", "content": "hi"}], [{"role": "user", "content": 5}],
    [{"role": "user", "content": {"text": "hi"}}], _text("a"), _text(None), _text({"type": "text"}),
    _text({"type": "text", "text": None}), _text({"type": "image_url", "image_url": {"url": "http://x/y"}}),
    _text(PART, {"type": "input_audio", "input_audio": {}}), _text({**PART, "type": ["text"]}),
    *(_calls(text) for text in ("{", "[1]", "null", "1", '"a"', "{'a': 1}", '{"a": 1', '{"a": 1} x', '{"a": NaN}',
                                '{"a": 1e999}', '{"a": -Infinity}', '{"a":' * 50_000, [], False, 0, 5)),
    _calls("{}", None), _calls("{}", 5), _calls("{}", ["f"]),
    [USER, {"role": "assistant", "tool_calls": [None]}], [USER, {"role": "assistant", "tool_calls": {"f": 1}}],
    [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}] * 129}],
    [USER] * 10_000, [USER] * 3_000, [{"role": "user", "content": "a" * 70_000}],
)  # fmt: skip
EITHER: Sequence[Any] = (  # refused, or right
    *(_calls(text) for text in ('{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": 1, "a": 2}', '{"a": "\\u0000"}', "", "{} ",
                                '{"a": ' + "9" * 5_000 + "}", "{" + '"a":{' * 60 + "}" * 61, {"a": 1}, None)),
    *(_calls("{}", name) for name in ("", 'a"b', "a\nb", "\u00e9", "a" * 300, "</tool_call>", "<|im_end|>")),
    [{"role": "tool", "content": "1", "tool_call_id": "none"}], [{"role": "assistant", "content": "hi"}],
)  # fmt: skip
PLAIN: Sequence[Sequence[Turn]] = (  # answered; the second is what the template is to be given
    [USER], [{"role": "system", "content": "Be brief."}, USER], [{"role": "system", "content": "Be brief."}],
    _text(), _text(PART, PART), _text({"type": "text", "text": ""}, PART), [{"role": "user", "content": ""}],
    [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\nx"}],
    _text({"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}), [USER] * 2, [USER] * 700,
    [{"role": "developer", "content": "Be brief."}, USER], [USER, {"role": "assistant", "content": ""}, USER],
)  # fmt: skip
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", 'y\n"\u00e9']}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def tool(name: Any, parameters: Any = PARAMETERS, **more: Any) -> Turn:
    """A tool as a body has it."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


NO_TOOLS: Sequence[Any] = (
    *([tool(name)] for name in ("", 'a"b', "a'b", "a\nb", "a b", "\u00e9", "\U0001f600", "a\u0000b", "a" * 65, "auto",
                                "none", "required", "</tool_call>", "<|im_end|>", None, 5, ["f"], {"f": 1})),
    [tool("f", 5)], [tool("f", {"type": "array"})], [tool("f", [])], [tool("f"), tool("f")], [None], ["f"], [{}],
    [tool(f"f{i}") for i in range(129)], [{"type": "web_search"}], {"f": 1}, "f",
    [tool("f", description="x" * (1 << 20))], [tool("f", {"properties": {f"p{i}": {} for i in range(60_000)}})],
    [tool("f", {"description": "\u00e9" * (1 << 19)})], [tool("f", {"enum": ["y" * (1 << 20)]})],
)  # fmt: skip
NAMES = ("f", "a.b-c_1", "_", "a" * 64, "Auto", "0", "-", "tool_call", "name")


def chatml(turns: Sequence[Turn]) -> str:
    """What SmolLM2's template makes of turns without tools."""
    told = [(turn["role"].replace("developer", "system"), _content(turn["content"])) for turn in turns]
    if told[0][0] != "system":
        told.insert(0, ("system", SYSTEM))
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in told) + "<|im_start|>assistant\n"


def _content(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class Asker:
    """Asks, and holds every answer to its limits."""

    def __init__(self, world: World) -> None:
        self.world, self.slowest, self.found = world, 0.0, [0, 0]

    def ask(self, messages: Any, **more: Any) -> Any:
        """The answer's JSON, None for a refusal: in our shape, without an echo."""
        body = {"messages": messages, "max_tokens": 8, "temperature": 0.0, "return_token_ids": True, **more}
        begun = time.monotonic()
        answer = self.world.http.post(CHAT, json=body)
        self.slowest = max(self.slowest, time.monotonic() - begun)
        said = f"{answer.status_code} to {str(messages)[:200]} {str(more)[:200]}: {answer.text[:300]}"
        assert answer.status_code in (200, 400, 422), said
        self.found[answer.status_code == 200] += 1
        if answer.status_code != 200:
            assert "message" in answer.json()["error"] and len(answer.text) < 600, said
        return answer.json() if answer.status_code == 200 else None

    def right(self, messages: Sequence[Turn], **more: Any) -> None:
        """An answer to the prompt that it should be, with the tokens that follow that prompt."""
        found = self.ask(messages, ignore_eos=True, **more)
        assert found is not None, messages
        self.foretold(found)
        assert self.prompt(found) == chatml(messages), messages
        starts = 1 + len(messages) + (messages[0]["role"] not in ("system", "developer"))
        assert found["prompt_token_ids"].count(START) == starts, messages

    def foretold(self, found: Any) -> None:
        """Of an answer: the tokens are those of the null model after this prompt."""
        if found is None:
            return
        tokens = list(islice(null_tokens(found["prompt_token_ids"], self.world.vocab, EOS), 8))
        assert found["choices"][0]["token_ids"] == tokens, found

    def prompt(self, found: Any) -> str:
        """The prompt's text, with control tokens."""
        told = self.world.http.post("/detokenize", json={"tokens": found["prompt_token_ids"]})
        return str(told.json()["prompt"])


def _begin(world: World) -> Any:
    """The load, once both helpers run and belong to what is open."""
    if "grammars" not in world.processes():
        body = {"messages": [USER], "max_tokens": 2, "regex": "a"}
        assert world.http.post(CHAT, json=body).status_code == 200
        world.baseline = world.files()
    load = world.begin(6)
    time.sleep(2.0)
    return load


def _forced(asker: Asker, name: str, strict: bool) -> None:
    """A call that has to be made: its arguments fit, streamed as whole."""
    choice: Any = "required" if strict else {"type": "function", "function": {"name": name}}
    tools = [{**tool(name), "function": {**tool(name)["function"], "strict": strict}}]
    more = {"tools": tools, "tool_choice": choice, "max_tokens": 200, "seed": 7, "temperature": 1.0}
    whole = asker.ask([USER], parallel_tool_calls=False, **more)
    assert whole is not None and name in asker.prompt(whole)
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == name
    arguments = json.loads(call["function"]["arguments"])
    assert set(arguments) == {"a", "b"} and arguments["a"] in range(100), arguments
    assert arguments["b"] in PARAMETERS["properties"]["b"]["enum"], arguments  # type: ignore[index]
    assert _streamed(asker.world, more) == (name, call["function"]["arguments"])


def _streamed(world: World, more: dict[str, Any]) -> tuple[str, str]:
    """Name and arguments of the call, as a stream's chunks build them."""
    body = {"messages": [USER], "stream": True, "parallel_tool_calls": False, **more}
    name, arguments = "", ""
    with httpx.stream("POST", f"{world.url}{CHAT}", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    for call in choice["delta"].get("tool_calls", ()):
                        name += call["function"].get("name", "")
                        arguments += call["function"].get("arguments", "")
    return name, arguments


@row(
    "21", "null content, parts, unknown roles, 10^4 messages, tools of 1 MB, odd names, arguments that are no JSON",
    "400, or the right prompt and answer, within 2 s; forced calls fit", "--offline",
    step_ms=5, header_timeout=10.0, **SMOLLM2,
)  # fmt: skip
def odd_conversations(world: World) -> str:
    load, asker, begun = _begin(world), Asker(world), time.monotonic()
    asked: list[Any] = [lambda m=m: _refused(asker.ask(m), m) for m in REFUSED]
    asked += [lambda t=t: _refused(asker.ask([USER], tools=t), t) for t in NO_TOOLS]
    asked += [lambda m=m: asker.foretold(asker.ask(m, ignore_eos=True)) for m in EITHER]
    asked += [lambda m=m: asker.right(m) for m in PLAIN]
    asked += [lambda n=n, s=s: _forced(asker, n, s) for n in NAMES for s in (False, True)]
    asked += [lambda: asker.right([USER], tools=[tool("f")], tool_choice="none")]
    world.dice.shuffle(asked)
    for each in asked:
        each()
    ended = time.monotonic()
    assert asker.slowest < 2.0 * world.slow, f"{asker.slowest:.2f} s"
    told = world.end()
    world.audit()
    refused, right = asker.found
    said = f"{refused} refused, {right} right, {asker.slowest:.2f} s at most"
    return f"{said}; {stalls(load, world, begun, ended)}; {counts(told)}"


def _refused(found: Any, asked: Any) -> None:
    assert found is None, f"answered: {str(asked)[:200]}"
