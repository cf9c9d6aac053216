"""What the engine cannot read ends the front end that said it, so that another one begins: nobody is left unheard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from octavo.core.errors import OctavoError
from octavo.serve.links.engine_side import EngineSide
from octavo.serve.links.messages import Adapters, ApiHello, Explain, FromEngine, Left, Link, ToEngine
from octavo.serve.roles.api import _FrontEnd
from octavo.serve.roles.engine import _EngineProcess
from octavo.serve.roles.held import HeldSubmits
from octavo.serve.roles.sockets import identity_of

ENGINE, FRONT, OTHER = 3, 5, 6
FROM_FRONT: Link[ToEngine, FromEngine] = Link(FromEngine)


def test_whoever_is_cut_off_is_told_and_ends() -> None:
    core: Any = None
    side = EngineSide(core, lambda message, now: core)
    process: Any = SimpleNamespace(
        link=Link(ToEngine),
        child=SimpleNamespace(epoch=ENGINE, say=lambda line: None),
        side=side,
        _fresh=True,
        _held=HeldSubmits(core),
        _loader=SimpleNamespace(told=lambda: Adapters(())),
    )
    for front in (FRONT, OTHER):
        frames = [identity_of(front), *FROM_FRONT.pack(ApiHello(f"api-{front}"), front, ENGINE)]
        _EngineProcess._hear(process, frames, 0.0)
    side.outbox.clear()  # the adapters, which all hear of
    malformed = FROM_FRONT.pack(Explain(1, "x" * 257, ""), FRONT, ENGINE)
    _EngineProcess._hear(process, [identity_of(FRONT), *malformed], 0.0)
    told = list(side.parcels(ENGINE))
    assert side.peers == (OTHER,) and [epoch for epoch, _ in told] == [FRONT]
    assert FROM_FRONT.unpack(told[0][1], FRONT) == (ENGINE, Left(FRONT))
    child: Any = SimpleNamespace(epoch=FRONT)
    with pytest.raises(OctavoError, match="hears us no more"):
        _FrontEnd(child)._hear(told[0][1])
