"""Rows 7, 8, 9, 24: clients that leave, stall, are gone without a word, or ask again and again."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from faults.load import LETTERS, Load, ask, body_of, counts, foretold, head_of
from faults.rows import row
from faults.world import World, until

POINTS = ("before the head", "in the body", "queued", "in prefill", "in the stream", "after its end")
WAYS = ("close", "reset", "half")


def connect(world: World, room: int = 0) -> socket.socket:
    """A client; `room`: bytes that it takes before it reads."""
    client = socket.socket()
    if room:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
    client.settimeout(30)
    client.connect(world.address[:2])
    return client


def leave(client: socket.socket, way: str) -> None:
    """Close, reset, or only say that no more is sent."""
    if way == "half":
        client.shutdown(socket.SHUT_WR)
        return
    if way == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def status_of(world: World, name: str) -> str:
    """What the server says of a request."""
    return str(world.http.get(f"/v1/requests/{name}").json()["status"])


def read_tokens(client: socket.socket, told: bytes = b"") -> Sequence[int]:
    """The tokens of a stream, to the end of the connection."""
    while piece := client.recv(1 << 16):
        told += piece
    events = [json.loads(line[6:]) for line in told.split(b"\n") if line.startswith(b"data: {")]
    assert not any("error" in event for event in events), events[-1]
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"] or []]


def _up_to(world: World, client: socket.socket, point: str, body: dict[str, Any]) -> bytes:
    """Bring a request to a point of its life; what was read of its answer."""
    data = json.dumps(body).encode()
    whole = head_of("/v1/completions", data) + data
    cut = {
        "before the head": world.dice.randrange(1, 60),
        "in the body": len(whole) - world.dice.randrange(1, len(data)),
    }
    client.sendall(whole[: cut.get(point, len(whole))])
    told = b""
    if point in ("queued", "in prefill"):
        until(lambda: status_of(world, body["request_id"]) == "running", 5 * world.slow, "it is inside")
    while point in ("in the stream", "after its end") and told.count(b"data: {") < 5:
        told += client.recv(1 << 16)
    while point == "after its end" and b"[DONE]" not in told:
        told += client.recv(1 << 16)
    return told


@row(
    "7", "a client leaves before its head, in its body, queued, in prefill, in its stream, after it",
    "by close or RST: cancelled within 100 ms; by half-close: a whole request gets its answer",
    max_running_requests=6, max_prefill_chunk=8,
)  # fmt: skip
def client_leaves(world: World) -> str:
    world.begin()
    slowest = 0.0
    for point in POINTS:
        for way in WAYS:
            slowest = max(slowest, _leaves(world, point, way))
    told = world.end()
    world.audit()
    return f"cancelled after {1000 * slowest:.0f} ms at most; {counts(told)}"


def _leaves(world: World, point: str, way: str) -> float:
    """Seconds until it was cancelled."""
    name = f"leaves-{world.dice.getrandbits(48):x}"
    more = {"prompt": [1] + [world.dice.choice(LETTERS) for _ in range(90)]} if point == "in prefill" else {}
    body = body_of(world.dice, request_id=name, **more)
    body["max_tokens"] = 35
    client = connect(world)
    said = _up_to(world, client, point, body)
    leave(client, way)
    left = time.monotonic()
    inside = point not in ("before the head", "in the body")
    if way == "half" and inside:
        assert read_tokens(client, said) == foretold(body), (point, way)
        assert status_of(world, name) == "finished"
    if way == "half":
        client.close()
    expected = "unknown" if not inside else "finished" if way == "half" or point == "after its end" else "cancelled"
    asked = left

    def is_so() -> bool:
        nonlocal asked
        asked = time.monotonic()
        return status_of(world, name) == expected

    limit = 0.1 if expected == "cancelled" else 5
    until(is_so, limit * world.slow, f"{name}, which left {point} by {way}, is {expected}")
    return asked - left if expected == "cancelled" else 0.0


def _gaps(load: Load, since: float, to: float) -> Sequence[float]:
    """Seconds between two events of a stream, sorted, of those in a span of time."""
    found = []
    for told in list(load.told):
        times = [at for at in told.arrivals if since < at < to]
        found += [later - earlier for earlier, later in pairwise(times)]
    return sorted(found)


def _p99(gaps: Sequence[float]) -> float:
    return 1000 * gaps[int(0.99 * (len(gaps) - 1))]


@row(
    "8",
    "a reader that never reads, and one of a byte a second",
    "cut at the stall timeout, nobody else waits",
    timers=True,
)
def slow_readers(world: World) -> str:
    load = world.begin()
    quick = _two_streams(world, "quick", room=0)
    begun = time.monotonic()
    for client in quick.values():
        read_tokens(client)
    read = _p99(_gaps(load, begun, time.monotonic()))
    limit, begun = world.time["stall_timeout"], time.monotonic()
    slow = _two_streams(world, "slow", room=4096)

    def cut() -> bool:
        list(slow.values())[1].recv(1)
        time.sleep(world.scale)
        return all(status_of(world, name) == "cancelled" for name in slow)

    until(cut, limit + 30 * world.slow, "both are cut")
    took = time.monotonic() - begun
    assert took > limit, "they were not given their time"
    told = world.end()
    unread = _p99(_gaps(load, begun, begun + took))
    for client in (*quick.values(), *slow.values()):
        client.close()
    world.audit()
    return f"cut after {took:.1f} s; p99 of the others' gaps {unread:.0f} ms, {read:.0f} when both read; {counts(told)}"


def _two_streams(world: World, kind: str, room: int) -> dict[str, socket.socket]:
    """Two clients that have asked for more than fits between them and the server, by the names of their requests."""
    names = [f"{kind}-{index}-{world.dice.getrandbits(48):x}" for index in range(2)]
    clients = {name: connect(world, room) for name in names}
    for name, client in clients.items():
        body = {"prompt": [[1, letter] for letter in (LETTERS[0], LETTERS[1])], "n": 32, "max_tokens": 120}
        data = json.dumps(
            {**body, "ignore_eos": True, "stream": True, "return_token_ids": True, "request_id": name}
        ).encode()
        client.sendall(head_of("/v1/completions", data) + data)
    return clients


def _trickle(world: World, whole: bytes, start: int, limit: float) -> tuple[float, bytes]:
    """Send all up to a place, then a byte a second; when the server had enough, and what it said."""
    client, begun = connect(world), time.monotonic()
    client.sendall(whole[:start])
    client.settimeout(world.scale)
    place = start
    while True:
        try:
            said = client.recv(1 << 16)
            break
        except TimeoutError:
            client.sendall(whole[place : place + 1] or b" ")
            place += 1
        assert time.monotonic() < begun + limit + 10 * world.slow, "it is still listening"
    client.close()
    return time.monotonic() - begun, said


@row("9a", "a head, and a body, of a byte a second", "408 at the limit", timers=True)
def slow_senders(world: World) -> str:
    world.begin()
    data = json.dumps(body_of(world.dice)).encode() + b" " * 400
    whole = head_of("/v1/completions", data) + data
    found = []
    for start, limit in ((1, world.time["header_timeout"]), (len(whole) - len(data), world.time["body_timeout"])):
        took, said = _trickle(world, whole, start, limit)
        assert said.startswith(b"HTTP/1.1 408 ") and limit - 0.1 < took < limit + 3 * world.slow, (took, said)
        found.append(f"{took:.2f} s")
    told = world.end()
    world.audit()
    return f"{' and '.join(found)}; {counts(told)}"


def deaf(client: socket.socket) -> None:
    """Have all that comes to a socket be dropped: a filter that lets no packet through."""
    import ctypes

    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    client.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HxxxxxxP", 1, ctypes.addressof(program)))  # SO_ATTACH_FILTER


@row(
    "9b", "packets are dropped in one direction, in a stream and before an answer", "cancelled within the peer timeout",
    timers=True, scaled_step_ms=2000,
)  # fmt: skip
def half_open(world: World) -> str:
    load = Load(world.address, 2, world.dice.randrange(1 << 30))
    world.load = load
    limit, clients, names = world.time["peer_timeout"], [], []
    for point, stream in (("in the stream", True), ("queued", False)):
        body = body_of(world.dice, request_id=f"deaf-{world.dice.getrandbits(48):x}", max_tokens=100, stream=stream)
        clients.append(connect(world))
        _up_to(world, clients[-1], point, {**body, "prompt": body["prompt"][:25]})
        deaf(clients[-1])
        names.append(body["request_id"])
    begun, taken = time.monotonic(), {}

    def noticed() -> bool:
        for name in names:
            if name not in taken and status_of(world, name) != "running":
                taken[name] = time.monotonic() - begun
        return len(taken) == len(names)

    until(noticed, limit + 5 * world.slow, "both are noticed")
    assert {status_of(world, name) for name in names} == {"cancelled"}
    told = world.end()
    for client in clients:
        client.close()
    world.audit()
    return f"cancelled after {' and '.join(f'{taken[name]:.1f} s' for name in names)}; {counts(told)}"


@row(
    "24", "a storm of retries: each request three times at once, with one id", "one runs, the others get 409",
    header_timeout=10.0,
)  # fmt: skip
def retry_storm(world: World) -> str:
    world.begin(4)
    before = world.metric("octavo:scheduled_tokens_total")

    async def go() -> list[Any]:
        bodies = [body_of(world.dice, request_id=f"storm-{world.dice.getrandbits(48):x}") for _ in range(30)]
        return await asyncio.gather(*(ask(world.address, body) for body in bodies for _ in range(3)))

    told = asyncio.run(go())
    for index in range(0, len(told), 3):
        how = sorted(each.how for each in told[index : index + 3])
        assert how == ["refused", "refused", "right"], [each.detail for each in told[index : index + 3]]
    assert all(each.detail.startswith("409") for each in told if each.how == "refused")
    assert world.metric("octavo:scheduled_tokens_total") > before
    mine = world.end()
    world.audit()
    return f"{counts(told)}; beside it {counts(mine)}"
