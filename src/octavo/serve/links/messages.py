"""The messages between processes: typed, bounded. Fixed schemas, so no byte received names a type to build.

An *epoch* is the number of one life of one process, given by the supervisor and never given again. A *row* is the
number under which a front end follows one choice in one engine: a request with n choices takes n rows in sequence, and
new ones in each engine that takes it over. Whatever names a row that is not followed any more is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from octavo.core.batch import TokenLogprobs
from octavo.core.params import MAX_CHOICES, SamplingParams
from octavo.core.request import MAX_ID_CHARACTERS
from octavo.serve.links.wire import MAX_BYTES, Link, ProtocolError, ends_of, relayed
from octavo.tokenizers.base import TokenizerTraits

__all__ = [
    "CHOICE_END", "MAX_ADAPTERS", "MAX_BYTES", "MAX_EXPLANATION", "MAX_ORPHANS", "REQUEST_END", "TOKEN", "AdapterDone",
    "Adapters", "Answer", "ApiHello", "Beat", "Cancel", "Drain", "EngineFacts", "Event", "Explain", "Explained",
    "Failed", "Flush", "FromEngine", "FromText", "Gone", "Join", "Joined", "Left", "Link", "LoadAdapter", "Look",
    "Orders", "Orphaned", "ProtocolError", "Question", "Read", "Ready", "Refused", "Replace", "Route", "Seen", "Shed",
    "Shown", "Stats", "Step", "Stop", "Submit", "Texts", "ToChild", "ToEngine", "ToSupervisor", "ToText",
    "UnloadAdapter", "Up", "ends_of", "pack_logprobs", "relayed", "unpack_logprobs",
]  # fmt: skip

MAX_EXPLANATION = 4 << 20
MAX_SEEN = 4 << 20
MAX_ORPHANS = 4096
MAX_ADAPTERS = 1 << 14  # names
MAX_HIDDEN = 4 << 20  # of a pooled state, as `TokenEvent` has it
TOKEN, CHOICE_END, REQUEST_END = range(3)  # kinds of `Event`

_Name = Annotated[str, Meta(max_length=MAX_ID_CHARACTERS)]
_Text = Annotated[str, Meta(max_length=4096)]
_Row = Annotated[int, Meta(ge=0, lt=2**62)]
_Id = Annotated[int, Meta(ge=0, lt=2**31)]
_Epoch = Annotated[int, Meta(ge=1, lt=2**62)]
_Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]
Logprobs = tuple[int, float, int, tuple[tuple[int, float], ...], tuple[tuple[int, float], ...]]


class _Message(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """Written once, then read: nobody changes a message."""


# -- front end to engine


class ApiHello(_Message, tag=1):
    """A front end begins. A seat has one occupant: what was asked for from it before, by whichever life, ends here."""

    seat: _Name


class Submit(_Message, tag=2):
    """Run a request, or go on with one.

    ``outputs``, ``ended``: for each choice the tokens that are known, and whether it has ended; empty for a new one.
    ``mu``: what mirostat allows each choice after those; empty without it.
    """

    row: _Row  # of choice 0
    request_id: _Name
    prompt: tuple[_Id, ...]
    params: SamplingParams
    seed: int
    tenant: _Name = ""
    salt: _Text = ""
    priority: int = 0
    waited: _Seconds = 0.0  # since it arrived
    outputs: Annotated[tuple[tuple[_Id, ...], ...], Meta(max_length=MAX_CHOICES)] = ()
    ended: Annotated[tuple[bool, ...], Meta(max_length=MAX_CHOICES)] = ()
    bulk: bool = False
    adapter: _Name = ""  # digest of its content
    mu: Annotated[tuple[float, ...], Meta(max_length=MAX_CHOICES)] = ()


class Cancel(_Message, tag=3):
    """Nobody wants the request of this row (of choice 0) any more."""

    row: _Row


class Stop(_Message, tag=4):
    """A choice ends after this many output tokens: a stop string was found."""

    row: _Row
    num_tokens: _Id
    reason: int | _Text | None


class Read(_Message, tag=5):
    """The reader of a request has taken all of it: for the timeline."""

    request_id: _Name


class Shed(_Message, tag=6):
    """A request was turned away at the door: for the timeline."""

    request_id: _Name
    reason: _Text
    status: int
    retry_after: float


class Beat(_Message, tag=7):
    """The sender lives."""


class Explain(_Message, tag=8):
    """Why did a tenant's request take as long as it did? Answered with ``Explained``, by the same number."""

    number: _Row
    request_id: _Name
    tenant: _Name


class Look(_Message, tag=9):
    """Somebody watches: what does the engine do right now? Answered with ``Seen``."""


class Join(_Message, tag=10):
    """A detokenizer asks that what is drawn goes through it from now on. Answered with ``Joined``."""


class Flush(_Message, tag=11):
    """Forget what is cached and nobody uses."""


class LoadAdapter(_Message, tag=12):
    """Serve the adapter in a folder under a name. Answered with ``AdapterDone``, by the same number.

    With a digest it is what another engine has served, which requests that follow may need: it is read at once.
    """

    number: _Row
    name: _Name
    path: _Text
    digest: _Name = ""


class UnloadAdapter(_Message, tag=13):
    """The name stands for nothing from now on. Answered with ``AdapterDone``."""

    number: _Row
    name: _Name


ToEngine = (
    LoadAdapter | UnloadAdapter | Flush | ApiHello | Submit | Cancel | Stop | Read | Shed | Beat | Explain | Look | Join
)


# -- engine to front end


class Event(_Message):
    """An event of one choice that is no plain token: `octavo.core.events.TokenEvent`."""

    row: _Row
    kind: Annotated[int, Meta(ge=TOKEN, le=REQUEST_END)]
    index: int = -1
    token: int = -1
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: _Name | None = None
    stop_reason: int | _Text | None = None
    error: _Text | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    spent: Annotated[tuple[float, ...], Meta(max_length=8)] = ()
    hidden: Annotated[str, Meta(max_length=MAX_HIDDEN)] = ""


class Step(_Message, tag=20):
    """What one step has for a front end: plain tokens as columns (row, index in the output, token), then the rest."""

    rows: tuple[int, ...]
    indices: tuple[int, ...]
    tokens: tuple[int, ...]
    events: tuple[Event, ...] = ()


class Refused(_Message, tag=21):
    """The engine does not take the request of this row: ``InvalidInput`` in three parts."""

    row: _Row
    field: _Text
    value: int | float | bool | _Text | None
    remedy: _Text


class Stats(_Message, tag=22):
    """Gauges and counters of the engine."""

    values: dict[_Name, float]


class Explained(_Message, tag=23):
    """The answer to ``Explain``: a list in JSON, see `octavo.engine.explained`."""

    number: _Row
    content: Annotated[bytes, Meta(max_length=MAX_EXPLANATION)]


class Seen(_Message, tag=24):
    """The answer to ``Look``: `octavo.engine.live.snapshot`, in JSON."""

    content: Annotated[bytes, Meta(max_length=MAX_SEEN)]


class Orphaned(_Message, tag=27):
    """Requests that ended with their front end, which has died: (tenant, id) of each. For who is asked about them."""

    names: Annotated[tuple[tuple[_Name, _Name], ...], Meta(max_length=MAX_ORPHANS)]


class Joined(_Message, tag=25):
    """The answer to ``Join``: what is relayed follows."""


class Left(_Message, tag=26):
    """To a detokenizer: a front end has died, or counts as dead. To that itself: it is heard no more."""

    epoch: _Epoch


class AdapterDone(_Message, tag=28):
    """The answer to ``LoadAdapter`` and ``UnloadAdapter``: ``InvalidInput`` in three parts, or an empty field."""

    number: _Row
    field: _Text = ""
    value: int | float | bool | _Text | None = None
    remedy: _Text = ""


class Adapters(_Message, tag=29):
    """The adapters that are served from now on: name, folder, digest, rank."""

    served: Annotated[tuple[tuple[_Name, _Text, _Name, _Id], ...], Meta(max_length=MAX_ADAPTERS)]


FromEngine = AdapterDone | Adapters | Step | Refused | Stats | Explained | Seen | Orphaned | Joined | Left


# -- engine to detokenizer to front end

# what a token shows: its text; where a stop string ended the choice, that, the tokens to keep, and the stop string
Shown = str | tuple[str, _Id, _Text]


class Route(_Message, tag=50):
    """The detokenizer has joined this engine: what is asked of it from now on will come back with its text."""

    engine: _Epoch


class Texts(_Message, tag=51):
    """The text of a ``Step``: for each of its tokens, then for each of its events. None: it is of nobody known."""

    plain: tuple[Shown | None, ...]
    events: tuple[Shown | None, ...] = ()
    words: dict[_Id, bytes] = {}  # what tokens with logprobs, and those beside them, look like


ToText = ApiHello | Submit | Cancel | Step | Joined | Left
FromText = Step | Route


# -- children to supervisor, and back


class EngineFacts(_Message):
    """What a front end has to know of the model that runs."""

    name: _Text
    source: _Text  # where its tokenizer is
    max_seq_len: int
    vocab_size: int
    eos_ids: tuple[_Id, ...]
    numerics_id: _Text
    exact: bool  # a resumed request has the same tokens
    traits: TokenizerTraits = TokenizerTraits("")
    num_words: int = 0  # of its tokenizer
    model_bytes: int = 0  # of its files
    hidden_size: int = 0
    pooling: _Name = "last"  # and `normalize`: `octavo.models.pooling.Pooling`
    normalize: bool = True


class Ready(_Message, tag=40):
    """A child serves, and can be connected to at this address, if at all."""

    facts: EngineFacts | None = None
    address: _Text = ""


class Failed(_Message, tag=41):
    """A child cannot start, and its user may mend that: ``InvalidInput`` in three parts; without a field, any error."""

    field: _Text
    value: int | float | bool | _Text | None
    remedy: _Text


class Up(_Message, tag=42):
    """Somebody whom the receiver has to do with serves, at this address."""

    seat: _Name
    epoch: _Epoch
    address: _Text
    facts: EngineFacts | None = None  # of an engine


class Gone(_Message, tag=43):
    """Somebody has died; another one will take the seat."""

    seat: _Name
    epoch: _Epoch


class Drain(_Message, tag=45):
    """Finish what is open, take nothing new, end. Told again: end now."""


class Orders(_Message, tag=46):
    """What the operator has set, for the front ends to come; ``problem``: why another model could not be loaded."""

    draining: bool = False
    log_level: _Text = ""  # empty: as configured
    problem: _Text = ""


class Replace(_Message, tag=47):
    """Nothing is open any more: load another model, or, if that fails, the one that there was."""

    model: _Text


class Question(_Message, tag=48):
    """A front end asks the register something (`octavo.serve.register.Asked`), or tells it, with the number 0."""

    number: _Row
    asked: msgspec.Raw


class Answer(_Message, tag=49):
    """What the register says: a value in MessagePack, or an error (status, message, param, code, headers)."""

    number: _Row
    content: bytes = b""
    error: tuple[int, str, str | None, str | None, dict[str, str]] | None = None


ToSupervisor = Ready | Failed | Beat | Orders | Replace | Question
ToChild = Up | Gone | Drain | Orders | Answer


def pack_logprobs(entry: TokenLogprobs | None) -> Logprobs | None:
    """Logprobs of one token, for a message."""
    return None if entry is None else (entry.token_id, entry.logprob, entry.rank, entry.top, entry.chosen)


def unpack_logprobs(entries: Iterable[Logprobs | None]) -> tuple[TokenLogprobs | None, ...]:
    """The inverse, for several."""
    return tuple(None if entry is None else TokenLogprobs(*entry) for entry in entries)
