"""The openai client: chat, completions, responses, embeddings, batches, models; whole, streamed and from asyncio."""

from __future__ import annotations

import asyncio
import json
import time

from _told import arguments, tell
from openai import AsyncOpenAI, NotFoundError, OpenAI

url, model = arguments()
client = OpenAI(base_url=f"{url}/v1", api_key="unused")
turns = [{"role": "user", "content": "What is the capital of France?"}]

chat = client.chat.completions.create(model=model, messages=turns, max_tokens=24, temperature=0)
assert "Paris" in (chat.choices[0].message.content or "")
pieces = client.chat.completions.create(
    model=model, messages=turns, max_tokens=24, temperature=0, stream=True, stream_options={"include_usage": True}
)
chunks = list(pieces)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert streamed == chat.choices[0].message.content and chunks[-1].usage

scored = client.completions.create(model=model, prompt="One, two,", max_tokens=4, temperature=0, logprobs=2)
assert scored.choices[0].logprobs and len(scored.choices[0].logprobs.token_logprobs or []) == 4

first = client.responses.create(model=model, input="My name is Ada.", max_output_tokens=16, temperature=0)
second = client.responses.create(
    model=model, input="What is my name?", previous_response_id=first.id, max_output_tokens=16, temperature=0
)
assert second.output_text and client.responses.retrieve(second.id).output_text == second.output_text
with client.responses.stream(model=model, input="Say hi.", max_output_tokens=8, temperature=0) as events:
    kinds = [event.type for event in events]
assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")
client.responses.delete(first.id)
try:
    client.responses.retrieve(first.id)
except NotFoundError:
    pass
else:
    raise AssertionError("a deleted response is still there")


async def several() -> list[str | None]:
    """Eight at once."""
    asked = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused")
    calls = [asked.chat.completions.create(model=model, messages=turns, max_tokens=24, temperature=0) for _ in range(8)]
    return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]


assert asyncio.run(several()) == [streamed] * 8
vectors = [item.embedding for item in client.embeddings.create(model=model, input=["a cat", "a dog"]).data]
assert len(vectors) == 2 and len(vectors[0]) == len(vectors[1]) > 8

lines = [
    {
        "custom_id": str(index),
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": turns, "max_tokens": 24, "temperature": 0},
    }
    for index in range(4)
]
source = client.files.create(file=("asked.jsonl", "\n".join(map(json.dumps, lines)).encode()), purpose="batch")
batch = client.batches.create(input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
assert batch.status == "completed", batch
answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
said = {answer["response"]["body"]["choices"][0]["message"]["content"] for answer in answers}
assert sorted(answer["custom_id"] for answer in answers) == list("0123") and said == {streamed}

assert [card.id for card in client.models.list()] == [model]
tell(
    "openai",
    "chat, completions with logprobs, responses, embeddings, files and batches, models: whole, streamed, 8 at once",
)
