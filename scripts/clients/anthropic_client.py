"""The anthropic client: messages, whole and streamed, and count_tokens."""

from __future__ import annotations

from _told import arguments, tell
from anthropic import Anthropic, BadRequestError

url, model = arguments()
client = Anthropic(base_url=url, api_key="unused")
turns = [{"role": "user", "content": "What is the capital of France?"}]
greedy = {"temperature": 0}  # this client has no name for it

whole = client.messages.create(model=model, max_tokens=24, messages=turns, extra_body=greedy)
assert "Paris" in whole.content[0].text
with client.messages.stream(model=model, max_tokens=24, messages=turns, extra_body=greedy) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == whole.content[0].text == final.content[0].text and final.stop_reason == whole.stop_reason

counted = client.messages.count_tokens(model=model, messages=turns).input_tokens
used = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
assert counted == used, (counted, used)
stopped = client.messages.create(
    model=model, max_tokens=24, messages=turns, extra_body=greedy, stop_sequences=["France"], system="Answer briefly."
)
assert stopped.stop_reason in ("stop_sequence", "end_turn", "max_tokens")
try:
    client.messages.create(model=model, max_tokens=4, messages=turns, extra_body={"temperature": -1})
except BadRequestError as error:
    assert "temperature" in error.message
else:
    raise AssertionError("a temperature of -1 was taken")
tell("anthropic", "messages whole and streamed, count_tokens, errors")
