"""A mailbox: its reader and whoever is shown deltas first have, together, each of them once and in order."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.mailbox import Mailbox
from octavo.engine.output import OutputDelta


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 2)), max_size=30))
def test_nothing_is_lost_doubled_or_overtaken(steps: list[tuple[bool, bool, int]]) -> None:
    """Each step puts a delta that express would take or not, after the loop or the reader had some turns or none."""
    seen: list[int] = []
    express: list[int] = []

    async def go() -> None:
        def take(delta: OutputDelta) -> bool:
            wanted, _, _ = steps[delta.token_ids[0]]
            if wanted:
                seen.extend(delta.token_ids)
                express.extend(delta.token_ids)
            return wanted

        mailbox = Mailbox(asyncio.get_running_loop(), take)
        gate = asyncio.Event()

        async def read() -> None:
            while True:
                for delta in await mailbox.get():
                    await gate.wait()  # a reader that takes its time
                    seen.extend(delta.token_ids)
                    if delta.last:
                        return

        reader = asyncio.ensure_future(read())
        for number, (_, opens, turns) in enumerate(steps):
            gate.set() if opens else gate.clear()
            for _ in range(2 * turns):
                await asyncio.sleep(0)
            mailbox.put(OutputDelta("r", 0, token_ids=(number,)))
        gate.set()
        await asyncio.sleep(0)
        steps.append((False, True, 0))
        mailbox.put(OutputDelta("r", 0, token_ids=(len(steps) - 1,), last=True))
        await asyncio.wait_for(reader, 5)

    asyncio.run(go())
    assert seen == list(range(len(steps)))


def test_a_reader_that_waits_is_not_woken_for_what_express_takes() -> None:
    async def go() -> None:
        mailbox = Mailbox(asyncio.get_running_loop(), lambda delta: True)
        mailbox.put(OutputDelta("r", 0, token_ids=(0,)))  # nobody waits yet
        assert [delta.token_ids for delta in await mailbox.get()] == [(0,)]
        reader = asyncio.ensure_future(mailbox.get())
        await asyncio.sleep(0)
        mailbox.put(OutputDelta("r", 0, token_ids=(1,)))
        await asyncio.sleep(0)
        assert not reader.done()
        reader.cancel()

    asyncio.run(go())
