"""Rows 1, 3, 5, 6: processes that are killed, stand still, or are told to end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress

from faults.load import Told, ask, body_of, counts
from faults.rows import row
from faults.world import World, until


@row(
    "1",
    "kill -9 of the engine",
    "every stream goes on with its tokens, none twice; not ready within 2 s; another within 10 s",
)
def engine_dies(world: World) -> str:
    world.begin()
    dead, struck = world.kill("engine"), time.monotonic()
    until(lambda: world.status() != 200, 2 * world.slow, "it is not ready")
    until(lambda: world.status() == 200, 10 * world.slow, "it is ready again")
    ready = time.monotonic() - struck
    assert world.processes()["engine"] != dead
    told = world.end("refused")
    world.audit()
    return f"ready again after {ready:.2f} s; {counts(told)}"


@row(
    "2",
    "kill -9 of the detokenizer, or of the tokenizer (--layout full)",
    "every stream goes on, no token twice, no text half decoded",
    layout="full",
)
def text_process_dies(world: World) -> str:
    seats = set(world.processes()) - {"supervisor", "templates"}
    world.begin()
    seat = world.dice.choice(sorted(seats - {"engine", "api-0"}))
    dead, struck = world.kill(seat), time.monotonic()
    until(lambda: world.processes().get(seat, dead) != dead, 10 * world.slow, "another one has begun")
    until(lambda: world.load is not None and world.load.right_since(struck), 10 * world.slow, "the load goes on")
    asked = {"prompt": "the quick brown fox", "max_tokens": 3}
    until(lambda: world.http.post("/v1/completions", json=asked).status_code == 200, 10 * world.slow, "a text is taken")
    told = world.end("refused")
    world.audit(*seats)
    return f"{seat}; {counts(told)}"


@row("3a", "kill -9 of the only front end", "the engine frees its pages, another front end takes the port")
def front_end_dies(world: World) -> str:
    world.begin()
    engine, struck = world.processes()["engine"], time.monotonic()
    world.kill("api-0")
    world.fresh()
    back = time.monotonic() - struck
    until(lambda: world.load is not None and world.load.right_since(struck), 10 * world.slow, "the load goes on")
    told = world.end("broken")
    until(world.is_idle, 5 * world.slow, "the pages of the dead are free")
    assert world.processes()["engine"] == engine
    world.audit()
    return f"answers again after {back:.2f} s; {counts(told)}"


@row("3b", "kill -9 of the supervisor", "all others exit within 10 s, no socket is left", alone=True)
def supervisor_dies(world: World) -> str:
    world.begin()
    world.kill("supervisor")
    struck = time.monotonic()
    until(lambda: not world.processes(), 10 * world.slow, "all have ended")
    gone = time.monotonic() - struck
    until(lambda: not list(world.run_folder.iterdir()), 1 * world.slow, "no socket is left")
    world.end("broken", "refused", "error")
    world.close(code=None)
    return f"all gone after {gone:.2f} s"


def _stand_still(world: World, seat: str, seconds: float) -> int:
    pid = world.kill(seat, signal.SIGSTOP)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return pid


@row("5a", "SIGSTOP for 5 s, engine, front end or supervisor", "nothing is lost, nobody is started again", timers=True)
def short_stop(world: World) -> str:
    world.begin()
    seat = world.dice.choice(("engine", "api-0", "supervisor"))
    before = world.processes()
    _stand_still(world, seat, 5 * world.scale)
    told = world.end()
    assert world.processes() == before
    world.audit()
    return f"{seat}; {counts(told)}"


@row("5b", "SIGSTOP for 120 s, engine", "declared dead at the silence timeout, every stream goes on", timers=True)
def long_stop_of_the_engine(world: World) -> str:
    world.begin()
    pid, struck = world.kill("engine", signal.SIGSTOP), time.monotonic()
    silence = world.time["silence_timeout"]
    until(lambda: world.processes().get("engine", pid) != pid, silence + 5 * world.slow, "another engine has begun")
    after = time.monotonic() - struck
    assert after > silence - 0.3 - min(1.0, silence / 15)
    world.fresh()
    time.sleep(max(0.0, 120 * world.scale - (time.monotonic() - struck)))
    told = world.end("refused")
    world.audit()
    return f"another began after {after:.1f} s; {counts(told)}"


@row("5c", "SIGSTOP for 120 s, front end", "declared dead at the silence timeout, another serves", timers=True)
def long_stop_of_the_front_end(world: World) -> str:
    world.begin()
    engine, struck = world.processes()["engine"], time.monotonic()
    pid, silence = world.kill("api-0", signal.SIGSTOP), world.time["silence_timeout"]
    until(lambda: world.processes().get("api-0", pid) != pid, silence + 5 * world.slow, "another front end has begun")
    after = time.monotonic() - struck
    world.fresh()
    assert world.processes()["engine"] == engine
    told = world.end("broken")
    world.audit()
    return f"another began after {after:.1f} s; {counts(told)}"


@row("5d", "SIGSTOP for 120 s, supervisor", "nothing is lost, nobody is started again", timers=True)
def long_stop_of_the_supervisor(world: World) -> str:
    world.begin()
    before = world.processes()
    _stand_still(world, "supervisor", 120 * world.scale)
    time.sleep(1.0)
    told = world.end()
    assert world.processes() == before
    world.audit()
    return counts(told)


@row("5f", "SIGSTOP for 120 s, all of it", "nothing is lost, nobody is started again", timers=True)
def long_stop_of_all(world: World) -> str:
    world.begin()
    before = world.processes()
    everybody = world.dice.sample(sorted(before.values()), len(before))
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in everybody:
            os.kill(pid, number)
        time.sleep(120 * world.scale if number == signal.SIGSTOP else 1.0)
    told = world.end()
    assert world.processes() == before
    world.audit()
    return counts(told)


@row("5e", "a step that hangs, for good", "declared dead at the step timeout, every stream goes on", timers=True)
def step_hangs(world: World) -> str:
    world.begin()
    pid, struck = world.processes()["engine"], time.monotonic()
    world.inject("engine", "hang", 3600)
    limit = world.time["step_timeout"] + world.time["silence_timeout"]
    until(lambda: world.processes().get("engine", pid) != pid, limit + 10 * world.slow, "another engine has begun")
    after = time.monotonic() - struck
    assert after > limit - 1 - world.time["silence_timeout"] / 15
    world.fresh()
    told = world.end("refused")
    world.audit()
    return f"another began after {after:.1f} s; {counts(told)}"


def _drains(world: World, number: int) -> tuple[float, str]:
    """Under load: what comes is refused, what is open ends well, and all is over with code 0."""
    load = world.begin()
    world.process.send_signal(number)
    struck = time.monotonic()
    until(lambda: world.status() != 200, 0.1 * world.slow, "it is not ready")
    off = 1000 * (time.monotonic() - struck)
    late = asyncio.run(ask(world.address, body_of(world.dice)))
    assert late.how in ("refused", "broken"), late
    if late.how == "refused":
        assert late.detail.startswith("503") and "draining" in late.detail, late
    world.process.wait(world.time["shutdown_timeout"] + 10 * world.slow)
    took = time.monotonic() - struck
    world.load = None
    told = load.stop()
    inside = [each for each in told if each.sent < struck - 0.05]
    assert all(each.how == "right" for each in inside), counts(inside)
    return took, f"not ready after {off:.0f} ms, {late.how}"


@row(
    "6a",
    "SIGTERM, SIGINT or SIGHUP under load",
    "not ready within 100 ms, 503 for who comes, all that is open ends well, exit 0",
    alone=True,
)
def told_to_end(world: World) -> str:
    number = world.dice.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    took, seen = _drains(world, number)
    world.close()
    return f"{number.name}: over after {took:.2f} s; {seen}"


LONG = {"max_tokens": 80}


@row(
    "6b", "SIGTERM with a stream that outlasts the limit", "an error event at the limit, exit 0",
    alone=True, timers=True, step_ms=1000,
)  # fmt: skip
def outlasts_the_limit(world: World) -> str:
    world.load = None
    limit = world.time["shutdown_timeout"]

    async def go() -> tuple[Told, float]:
        asking = asyncio.ensure_future(ask(world.address, body_of(world.dice, **LONG)))
        await asyncio.sleep(1.5 + world.dice.random())
        world.process.send_signal(signal.SIGTERM)
        struck = time.monotonic()
        told = await asking
        return told, told.ended - struck

    told, took = asyncio.run(go())
    assert told.how == "error" and limit - 0.1 < took < limit + 2 * world.slow, (told, took)
    world.close()
    return f"cut after {took:.2f} s"


@row("6c", "a second signal while it drains", "all ends within 2 s, exit 0", alone=True, step_ms=200)
def second_signal(world: World) -> str:
    load = world.begin()
    first, second = (world.dice.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)) for _ in range(2))
    world.process.send_signal(first)
    until(lambda: world.status() != 200, 2 * world.slow, "it is not ready")
    assert world.process.poll() is None
    world.process.send_signal(second)
    struck = time.monotonic()
    until(lambda: world.process.poll() is not None, 2 * world.slow, "it has ended")
    took = time.monotonic() - struck
    world.load = None
    load.stop()
    world.close()
    return f"{first.name}, {second.name}: over after {took:.2f} s"
