"""OpenVINO GenAI in a process of its own. Runs in a venv that has openvino-genai, and nothing of ours.

    peer_openvino.py MODEL_DIR [--threads 2] [--cache-gb 2] [--step-tokens 512] [--set KEY=VALUE ...]
    peer_openvino.py MODEL_DIR --port 8090 ...

The first form reads lines of JSON from its input, `{"prompts": [[token, ...], ...], "output": 128}`, runs all prompts
at once (with `"lead": true`, the first one until its first token, then all others beside it) and answers each line with
`{"times": [[seconds since the start, tokens that came], ...]}`. The second serves `/v1/completions`, streamed or whole:
OpenVINO GenAI ships no server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as og


def greedy(output: int) -> Any:
    """`output` tokens, whatever the model says of the end."""
    wanted = og.GenerationConfig()
    wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = output, True, False
    wanted.apply_chat_template = False
    return wanted


class Batching:
    """The continuous-batching pipeline, stepped by us."""

    def __init__(self, given: argparse.Namespace, properties: dict[str, str]) -> None:
        scheduler = og.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = given.cache_gb, 64
        scheduler.max_num_batched_tokens = given.step_tokens
        scheduler.enable_prefix_caching = scheduler.dynamic_split_fuse = True
        self.pipe = og.ContinuousBatchingPipeline(given.model, scheduler, "CPU", properties)
        self.count = 0

    def add(self, prompt: Any, output: int) -> Any:
        """A request for `output` tokens behind a tensor [1, tokens]."""
        self.count += 1
        return self.pipe.add_request(self.count, prompt, greedy(output))

    def run(self, prompts: list[list[int]], output: int, lead: bool = False) -> list[tuple[float, int]]:
        """Step by step: (seconds since the start, tokens that came)."""
        begin, times = time.perf_counter(), []
        waiting = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        live = [self.add(prompt, output) for prompt in waiting[: 1 if lead else None]]
        while self.pipe.has_non_finished_requests():
            if len(live) < len(waiting) and any(came for _, came in times):
                live += [self.add(prompt, output) for prompt in waiting[1:]]
            self.pipe.step()
            came = sum(len(part.generated_ids) for h in live if h.can_read() for part in h.read().values())
            times.append((time.perf_counter() - begin, came))
        return times


def answer_lines(bench: Batching) -> None:
    """One answer for each line of the input, until it ends."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps({"times": bench.run(**asked)}), flush=True)


class Server:
    """HTTP/1.1 by hand, so that the shell around the engine costs little. Steps run in the event loop's own thread."""

    def __init__(self, bench: Batching) -> None:
        self.bench, self.tokenizer = bench, bench.pipe.get_tokenizer()
        self.inbox: asyncio.Queue[tuple[Any, int, asyncio.Queue[Any]]] = asyncio.Queue()

    async def steps(self) -> None:
        """Run the pipeline while there is work; sockets get a turn between two steps."""
        live: list[tuple[Any, asyncio.Queue[Any]]] = []
        while True:
            if not live:
                self._admit(live, await self.inbox.get())
            for _ in range(8):
                await asyncio.sleep(0)
            while not self.inbox.empty():
                self._admit(live, self.inbox.get_nowait())
            self.bench.pipe.step()
            live = [(handle, out) for handle, out in live if self._deliver(handle, out)]

    def _admit(self, live: list[Any], asked: tuple[Any, int, asyncio.Queue[Any]]) -> None:
        ids, output, out = asked
        live.append((self.bench.add(ids, output), out))

    def _deliver(self, handle: Any, out: asyncio.Queue[Any]) -> bool:
        while handle.can_read():
            for part in handle.read().values():
                out.put_nowait(list(part.generated_ids))
        if handle.get_status() == og.GenerationStatus.RUNNING:
            return True
        out.put_nowait(None)
        return False

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Request after request of one client."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
                body = await reader.readexactly(size)
                if head.startswith(b"get "):
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
                else:
                    await self._complete(json.loads(body), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _complete(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        ids = self.tokenizer.encode(asked["prompt"], add_special_tokens=False).input_ids
        out: asyncio.Queue[Any] = asyncio.Queue()
        self.inbox.put_nowait((ids, asked["max_tokens"], out))
        stream, tokens = asked.get("stream", False), []
        if stream:
            start = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            writer.write(start)
        while (came := await out.get()) is not None:
            tokens += came
            if stream:
                self._send(writer, {"choices": [{"index": 0, "text": self.tokenizer.decode(came)}]})
        usage = {"prompt_tokens": int(ids.shape[1]), "completion_tokens": len(tokens)}
        if stream:
            self._send(writer, {"choices": [], "usage": usage})
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            return
        text = json.dumps({"choices": [{"index": 0, "text": self.tokenizer.decode(tokens)}], "usage": usage}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(text), text))

    def _send(self, writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        event = f"data: {json.dumps(value)}\n\n".encode()
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))


async def serve(bench: Batching, port: int) -> None:
    """Serve until killed."""
    server = Server(bench)
    steps = asyncio.create_task(server.steps())
    async with await asyncio.start_server(server.connection, "127.0.0.1", port):
        await steps


def main() -> None:
    """Load, then answer lines or serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-gb", type=int, default=2)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a property of the device")
    parser.add_argument("--port", type=int, default=0, help="serve there")
    given = parser.parse_args()
    properties = {"INFERENCE_NUM_THREADS": given.threads, **dict(part.split("=", 1) for part in given.set)}
    if given.port:
        asyncio.run(serve(Batching(given, properties), given.port))
        return
    answer_lines(Batching(given, properties))


if __name__ == "__main__":
    main()
