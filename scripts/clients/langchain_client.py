"""LangChain's ChatOpenAI and OpenAI: invoke, stream, batch, and from asyncio."""

from __future__ import annotations

import asyncio

from _told import arguments, tell
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

url, model = arguments()
chat = ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=model, temperature=0, max_tokens=24)
turns = [SystemMessage("You are a helpful assistant."), HumanMessage("What is the capital of France?")]

whole = chat.invoke(turns)
assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] > 0
pieces = list(chat.stream(turns))
assert "".join(piece.content for piece in pieces) == whole.content
answers = chat.batch([turns, turns, [HumanMessage("Say hi.")]])
assert answers[0].content == answers[1].content == whole.content and answers[2].content
chain = ChatPromptTemplate.from_messages([("user", "What is the capital of {country}?")]) | chat | StrOutputParser()
assert "Paris" in chain.invoke({"country": "France"})
scored = chat.bind(logprobs=True, top_logprobs=2).invoke(turns)
assert scored.response_metadata["logprobs"]["content"]


async def later() -> str:
    """The same from asyncio."""
    return "".join([piece.content async for piece in chat.astream(turns)])


assert asyncio.run(later()) == whole.content
responses = ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=model, temperature=0, use_responses_api=True)
assert "Paris" in responses.invoke(turns, max_tokens=24).text
text = OpenAI(base_url=f"{url}/v1", api_key="unused", model=model, temperature=0, max_tokens=8)
assert text.invoke("One, two, three,") and list(text.stream("One, two, three,"))
embed = OpenAIEmbeddings(base_url=f"{url}/v1", api_key="unused", model=model, check_embedding_ctx_length=False)
vectors = embed.embed_documents(["a cat", "a dog"])
assert len(vectors) == 2 and len(embed.embed_query("a cat")) == len(vectors[0])
tell(
    "langchain-core langchain-openai",
    "ChatOpenAI invoke, stream, batch, chain, logprobs, asyncio, responses; OpenAI; OpenAIEmbeddings",
)
