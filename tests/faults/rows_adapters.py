"""Row 22: adapters that are missing, broken or too large, and a thousand that come and go while others are used.

The model is the tiny one on the reference backend: every answer is held against that of an engine in this process.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

from faults.load import FLAGS, LETTERS, TINY, Case, Load, ask, counts
from faults.rows import row
from faults.rows_clients import _gaps, _p99
from faults.rows_grammars import MOST_GROWTH, _memory
from faults.world import Bare, World
from octavo.core.params import SamplingParams
from octavo.engine.fixture import load_fixture
from octavo.engine.llm import LLM
from octavo.models.config import ModelConfig
from octavo.models.registry import build_model
from octavo.weights.lora import CONFIG_NAME, WEIGHTS_NAME
from octavo.weights.safetensors import write_safetensors

PLACES, RANK, CYCLES, KINDS = 6, 8, 1_000, 5
HANDS = 3  # that load and unload at a time, each under a name of its own
SERVED = ("one", "two")
ENGINE = {"backend": "reference", "page_size": 4, "max_loras": PLACES, "max_lora_rank": RANK}
Shapes = Mapping[str, tuple[int, ...]]


def shapes() -> Shapes:
    """The projections of the tiny model."""
    return build_model(ModelConfig.from_dict(load_fixture(TINY).config)).projections()


def write(folder: Path, seed: int, rank: int = 4, **config: Any) -> Path:
    """An adapter as PEFT writes it, with normal values."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, (n, k) in shapes().items():
        for half, shape in (("A", (rank, k)), ("B", (n, rank))):
            values = (rng.normal(size=shape) * 0.3).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values
    folder.mkdir(exist_ok=True)
    write_safetensors(folder / WEIGHTS_NAME, tensors)
    (folder / CONFIG_NAME).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8, **config}))
    return folder


@dataclass
class Adapters:
    """A server with adapters, and of each content what it answers to each prompt."""

    world: World
    folder: Path
    prompts: Sequence[Sequence[int]]
    right: Mapping[str, Sequence[Sequence[int]]]  # by content: a name that is served, or a number
    admin: httpx.Client

    def order(self, route: str, **values: Any) -> httpx.Response:
        """Ask the operator's socket."""
        return self.admin.post(f"http://admin/v1/{route}_lora_adapter", json=values)

    def case(self, name: str, content: str, at: int) -> Case:
        """A request to an adapter, and the tokens that its content answers."""
        return body_of(self.prompts[at], name), self.right[content][at]


def body_of(prompt: Sequence[int], name: str = "") -> dict[str, Any]:
    """A request to an adapter, or to the model itself."""
    body = {"prompt": list(prompt), "max_tokens": 8, "temperature": 0.0, **FLAGS}
    return {**body, "model": name} if name else body


def _prompts(dice: Any) -> Sequence[Sequence[int]]:
    """Half of them begin alike, so that a prefix of another content would be found."""
    return [[1, *[LETTERS[0]] * 12 * (at % 2), *(dice.choice(LETTERS) for _ in range(6))] for at in range(6)]


def _answers(folder: Path, contents: Sequence[str], prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """What an engine in this process answers to each prompt, alone, with each content."""
    llm = LLM(str(TINY), say=lambda line: None, kv_memory="1MiB", **{**ENGINE, "max_loras": len(contents)})
    params, found = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), {}
    for content in ("", *contents):
        if content:
            llm.load_lora(content, str(folder / content))
        lora = content or None
        found[content] = [llm.generate([prompt], params, lora=lora)[0].outputs[0].token_ids for prompt in prompts]
    assert len({str(answers) for answers in found.values()}) == len(found), "contents that cannot be told apart"
    return found


@contextmanager
def served(bare: Bare) -> Iterator[Adapters]:
    """A server with two adapters that stay; in its folder the contents of others."""
    with TemporaryDirectory() as name:
        folder, contents = Path(name), [*SERVED, *map(str, range(KINDS))]
        for content in contents:
            write(folder / content, bare.dice.randrange(1 << 30))
        prompts = _prompts(bare.dice)
        right = _answers(folder, contents, prompts)
        cases = [
            (body_of(prompt, name), right[name][at]) for name in ("", *SERVED) for at, prompt in enumerate(prompts)
        ]
        socket = folder / "admin"
        stay = ",".join(f"{name}={folder / name}" for name in SERVED)
        given = {**ENGINE, "lora": stay, "admin_socket": socket, "cases": cases, "header_timeout": 10.0}
        world = World(bare.scale, bare.dice.randrange(1 << 30), **given)
        bare.output = world.output
        try:
            world.settle()
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=30) as admin:
                yield Adapters(world, folder, prompts, right, admin)
            world.audit()
        except BaseException:
            world.close(None)
            raise
        world.close()


def _break(folder: Path, dice: Any) -> Sequence[tuple[str, Path]]:
    """Folders that are no adapters of this model, with what is wrong with each."""
    found = []

    def add(what: str, change: Callable[[Path], object], **config: Any) -> None:
        made = write(folder / f"broken-{len(found)}", 7, **config)
        change(made)
        found.append((what, made))

    def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
        return lambda made: (made / name).write_bytes(change((made / name).read_bytes()))

    size = (write(folder / "size", 7) / WEIGHTS_NAME).stat().st_size
    add("missing", shutil.rmtree)
    add("no settings", lambda made: (made / CONFIG_NAME).unlink())
    add("no values", lambda made: (made / WEIGHTS_NAME).unlink())
    add("settings no JSON", edit(CONFIG_NAME, lambda data: data[: dice.randrange(len(data))]))
    add("settings no object", edit(CONFIG_NAME, lambda data: b"[1]"))
    add("settings of 2 MiB", edit(CONFIG_NAME, lambda data: data[:-1] + b" " * (2 << 20) + b"}"))
    add("values cut", edit(WEIGHTS_NAME, lambda data: data[: dice.randrange(size)]))
    add("values empty", edit(WEIGHTS_NAME, lambda data: b""))
    add("header of 2^63 bytes", edit(WEIGHTS_NAME, lambda data: b"\xff" * 7 + b"\x7f" + data[8:]))
    add("values not finite", edit(WEIGHTS_NAME, lambda data: data[:-4] + b"\x00\x00\xc0\x7f"))
    add("rank too high", lambda made: None, rank=RANK + 1)
    add("another rank", lambda made: None, r=5)
    add("rank of 10^9", lambda made: None, r=10**9)
    add("DoRA", lambda made: None, use_dora=True)
    add("another kind", lambda made: None, peft_type="IA3")
    add("bias", lambda made: None, bias="all")
    add("a folder for a file", lambda made: ((made / WEIGHTS_NAME).unlink(), (made / WEIGHTS_NAME).mkdir()))
    return found


@row("22a", "adapters that are missing, corrupt, of another kind, rank too high, one too many; names that are none",
     "400 by name within 1 s, what is served stays as it was", bare=True)  # fmt: skip
def broken_adapters(bare: Bare) -> str:
    with served(bare) as its:
        world, slowest, refused = its.world, 0.0, 0
        load = world.begin(4)
        before = its.admin.get("http://admin/state").json()["adapters"]
        good = str(its.folder / "0")
        orders = [("load", {"lora_name": "it", "lora_path": str(path)}) for _, path in _break(its.folder, bare.dice)]
        orders += [
            ("load", {"lora_name": name, "lora_path": good}) for name in ("", "a b", "\u00e9", "x" * 129, "tiny-llama")
        ]
        orders += [("load", {"lora_name": "it", "lora_path": path}) for path in ("", "\0", "/" * 5000, "/dev/zero")]
        orders += [("load", {"lora_name": "one", "lora_path": good}), ("unload", {"lora_name": "it"})]
        bare.dice.shuffle(orders)
        for route, values in orders:
            begun = time.monotonic()
            answer = its.order(route, **values)
            slowest = max(slowest, time.monotonic() - begun)
            assert answer.status_code == 400 and "message" in answer.json()["error"], (values, answer.text)
            refused += 1
        assert its.admin.get("http://admin/state").json()["adapters"] == before
        refused += _fill_up(its)
        assert slowest < 1.0 * world.slow, f"{slowest:.2f} s"
        told = world.end()
        assert len(load.told) > 0
    return f"{refused} refused, {slowest:.2f} s at most; {counts(told)}"


def _fill_up(its: Adapters) -> int:
    """All places can be had, one more cannot, and each answers as its content; refusals."""
    free = PLACES - len(SERVED)
    for number in range(free):
        assert its.order("load", lora_name=f"f{number}", lora_path=str(its.folder / str(number))).status_code == 200
    more = its.order("load", lora_name="more", lora_path=str(its.folder / str(free)))
    assert more.status_code == 400 and "places" in more.text, more.text
    for number in range(free):
        _check(its, f"f{number}", str(number), number % len(its.prompts))
        assert its.order("unload", lora_name=f"f{number}").status_code == 200
    return 1


def _check(its: Adapters, name: str, content: str, at: int) -> None:
    body, right = its.case(name, content, at)
    told = asyncio.run(ask(its.world.address, body, right=right))
    assert told.how == "right", (name, content, told)


class Hand:
    """Loads and unloads under one name, whose folder holds another content each time."""

    def __init__(self, its: Adapters, name: str, dice: Any) -> None:
        self.its, self.name, self.dice = its, name, dice
        self.place = its.folder / f"of-{name}"
        self.asked = 0

    async def turn(self, client: httpx.AsyncClient, number: int) -> None:
        """New content in the old place: load, ask now and then, unload while that answer comes."""
        content = str(self.dice.randrange(KINDS))
        shutil.copytree(self.its.folder / content, self.place, dirs_exist_ok=True)
        await self.order(client, "load", lora_name=self.name, lora_path=str(self.place))
        asks = [self.ask(content) for _ in range(2 * (number % 5 == 0))]
        waiting = [asyncio.ensure_future(each) for each in asks]
        if waiting:
            await asyncio.sleep(self.dice.uniform(0.0, 0.1))
        await self.order(client, "unload", lora_name=self.name)
        await asyncio.gather(*waiting)

    async def ask(self, content: str) -> None:
        """The answer is that of the content, or nobody knows the name any more."""
        body, right = self.its.case(self.name, content, self.dice.randrange(len(self.its.prompts)))
        told = await ask(self.its.world.address, body, right=right)
        gone = told.how in ("refused", "error") and re.search("^404|was unloaded", told.detail)
        assert told.how == "right" or gone, (self.name, content, told.how, told.detail)
        self.asked += told.how == "right"

    async def order(self, client: httpx.AsyncClient, route: str, **values: Any) -> None:
        answer = await client.post(f"http://admin/v1/{route}_lora_adapter", json=values)
        assert answer.status_code == 200, (route, values, answer.text)


async def _turns(its: Adapters, hands: Sequence[Hand], numbers: range) -> None:
    async with httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=str(its.folder / "admin")), timeout=60
    ) as client:

        async def all_of(index: int, hand: Hand) -> None:
            for number in numbers[index :: len(hands)]:
                await hand.turn(client, number)

        await asyncio.gather(*(all_of(index, hand) for index, hand in enumerate(hands)))


@row(
    "22b",
    f"{CYCLES:,} loads and unloads under {HANDS} names, of folders with other content each time, while they are used",
    "no wrong adapter, no stale prefix, no place taken at the end, memory is flat",
    bare=True,
)
def adapters_come_and_go(bare: Bare) -> str:
    with served(bare) as its:
        world = its.world
        load = world.begin(3)
        time.sleep(2.0)
        hands = [Hand(its, f"it-{index}", bare.dice) for index in range(HANDS)]
        begun = time.monotonic()
        asyncio.run(_turns(its, hands, range(CYCLES // 5)))
        early = _memory(world)
        asyncio.run(_turns(its, hands, range(CYCLES // 5, CYCLES)))
        ended, late = time.monotonic(), _memory(world)
        grown = {seat: late[seat] - early[seat] for seat in early}
        assert max(grown.values()) < MOST_GROWTH, grown
        told = world.end()
        _fill_up(its)
        assert set(its.admin.get("http://admin/state").json()["adapters"]) == set(SERVED)
        asked = sum(hand.asked for hand in hands)
        gaps = _told(load, begun, ended)
        found = f"{CYCLES / (ended - begun):.0f}/s, {asked} answers; engine {grown['engine'] / 2**20:+.1f} MiB"
    return f"{found}; {gaps}; {counts(told)}"


def _told(load: Load, begun: float, ended: float) -> str:
    before, during = _p99(_gaps(load, begun - 2.0, begun)), _p99(_gaps(load, begun, ended))
    return f"p99 of the others' gaps {before:.0f} ms before, {during:.0f} during"
