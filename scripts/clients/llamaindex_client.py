"""LlamaIndex's OpenAILike: complete, chat, stream, and from asyncio."""

from __future__ import annotations

import asyncio

from _told import arguments, tell
from llama_index.core.base.llms.types import ChatMessage
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

url, model = arguments()
given = {"model": model, "api_base": f"{url}/v1", "api_key": "unused", "temperature": 0, "max_tokens": 24}
chat, text = OpenAILike(**given, is_chat_model=True), OpenAILike(**given, is_chat_model=False)
turns = [ChatMessage(role="user", content="What is the capital of France?")]

whole = chat.chat(turns)
assert "Paris" in whole.message.content
*_, last = chat.stream_chat(turns)
assert last.message.content == whole.message.content
assert chat.complete("What is the capital of France?").text == whole.message.content
completed = text.complete("One, two, three,")
*_, final = text.stream_complete("One, two, three,")
assert completed.text and final.text == completed.text
assert asyncio.run(chat.achat(turns)).message.content == whole.message.content
embed = OpenAILikeEmbedding(model_name=model, api_base=f"{url}/v1", api_key="unused")
assert len(embed.get_text_embedding("a cat")) == len(embed.get_text_embedding_batch(["a cat", "a dog"])[1]) > 8
tell(
    "llama-index-core llama-index-llms-openai-like",
    "OpenAILike complete, chat, both streamed, asyncio; OpenAILikeEmbedding",
)
