"""The ollama client: chat, generate, list, show; whole, streamed and from asyncio."""

from __future__ import annotations

import asyncio

from _told import arguments, tell
from ollama import AsyncClient, Client, ResponseError

url, model = arguments()
client = Client(host=url)
turns = [{"role": "user", "content": "What is the capital of France?"}]
options = {"temperature": 0, "num_predict": 24}

whole = client.chat(model=model, messages=turns, options=options)
assert "Paris" in whole.message.content
pieces = list(client.chat(model=model, messages=turns, options=options, stream=True))
assert "".join(piece.message.content for piece in pieces) == whole.message.content and pieces[-1].done
text = client.generate(model=f"{model}:latest", prompt="One, two,", raw=True, options=options)
assert text.response and text.eval_count
assert [card.model for card in client.list().models] == [model] == [card.model for card in client.ps().models]
assert "completion" in (client.show(model).capabilities or [])
assert len(client.embed(model=model, input=["a cat", "a dog"]).embeddings) == 2


async def later() -> str:
    """The same stream from asyncio."""
    stream = await AsyncClient(host=url).chat(model=model, messages=turns, options=options, stream=True)
    return "".join([piece.message.content async for piece in stream])


assert asyncio.run(later()) == whole.message.content
try:
    client.chat(model="another", messages=turns)
except ResponseError as error:
    assert error.status_code == 404
else:
    raise AssertionError("a model that is not there answered")
tell("ollama", "chat, generate, embed, list, ps, show: whole, streamed, from asyncio")
