"""Recordings: every event of the table comes back as it was; what is cut or damaged ends the reading, nothing else."""

import io
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_run import PLANS, Run, worlds

from octavo.core import event_codec, recording
from octavo.core.errors import InvalidInput
from octavo.core.event_codec import EventReader, EventWriter
from octavo.core.event_table import KINDS
from octavo.core.recording import MAGIC, FrameWriter, RecordingReader
from octavo.core.timeline import plain

COUNT = st.one_of(st.integers(0, 300), st.integers(0, 2**64 - 1))
NAME = st.sampled_from(["a", "b", "", "é\ud800", "request-1"])
CHOICE = st.integers(0, 70)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), st.lists, max_leaves=4)
VALUES = {
    "count": COUNT,
    "number": st.integers(-(2**62), 2**62),
    "seconds": st.floats(allow_nan=False),
    "name": NAME,
    "text": st.text(max_size=5),
    "ids": st.lists(COUNT, max_size=4),
    "tokens": st.lists(st.none() | st.integers(-2, 2**40), max_size=4),
    "branches": st.lists(st.lists(NAME, min_size=1, max_size=1).map(lambda n: [n[0], 1]), max_size=3),
    "rows": st.lists(st.tuples(NAME, CHOICE, COUNT, st.text(max_size=4)).map(list), max_size=3),
    "json": JSON,
}


def value_of(field):
    return st.none() | VALUES[field.type].filter(lambda v: v is not None) if field.optional else VALUES[field.type]


def event_of(kind):
    fields = {field.name: value_of(field) for field in kind.fields}
    return st.tuples(st.just(kind.name), st.sampled_from([0.0, 1.5, -2.25e300]), st.fixed_dictionaries(fields))


EVENTS = st.lists(st.sampled_from(KINDS).flatmap(event_of), max_size=12)
START = ("start", 0.0, {"process": "p", "epoch": 4, "facts": {}})


def recorded(events, flush_every=0):
    """The bytes of a recording."""
    out = io.BytesIO(MAGIC)
    out.seek(0, io.SEEK_END)
    writer = FrameWriter(out.write)
    for i, event in enumerate(events):
        writer.add(*event)
        if flush_every and i % flush_every == 0:
            writer.flush()
    writer.flush()
    return out.getvalue()


def read(data):
    """(kind, t, fields) of each event, and the damage."""
    reader = RecordingReader(io.BytesIO(data).read)
    events = [(e["kind"], e["t"], {k: v for k, v in e.items() if k not in HEAD}) for e in reader]
    return events, reader.damage


HEAD = ("v", "process", "n", "t", "kind")


def expected(events):
    found, epoch = [], None
    for kind, t, values in events:
        epoch = values["epoch"] if kind == "start" else epoch
        found.append((kind, t, {"epoch": epoch, **plain(kind, values)}))
        if kind == "start":
            del found[-1][2]["process"]
    return found


@given(EVENTS, st.integers(0, 3))
@settings(max_examples=200)
def test_what_is_written_is_read(events, flush_every):
    events = [START, *events]
    assert read(recorded(events, flush_every)) == (expected(events), None)


@given(EVENTS, st.data())
@settings(max_examples=100)
def test_a_cut_recording_gives_whole_frames_and_says_so(events, data):
    events = [START, *events]
    whole = recorded(events, 1)
    cut = data.draw(st.integers(len(MAGIC), len(whole)))
    found, damage = read(whole[:cut])
    assert found == expected(events)[: len(found)]
    assert (damage is None) == (recorded(events[: len(found)], 1) == whole[:cut])


@given(EVENTS, st.data())
@settings(max_examples=200)
def test_a_changed_byte_never_changes_an_event(events, data):
    events = [START, *events]
    whole = bytearray(recorded(events, 2))
    at = data.draw(st.integers(len(MAGIC), len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    found, damage = read(bytes(whole))
    assert found == expected(events)[: len(found)]
    assert damage is not None and "after" in damage


def framed(events):
    """A frame around bytes that nobody checked."""
    data = zlib.compress(events)
    head = struct.pack("<II", len(data), len(events))
    return MAGIC + head + struct.pack("<I", zlib.crc32(data, zlib.crc32(head))) + data


@given(st.binary(max_size=60), st.booleans())
@settings(max_examples=400)
def test_hostile_events_end_the_reading(data, after_start):
    before = EventWriter().encode(*START) if after_start else b""
    _, damage = read(framed(before + data))
    assert damage is not None or not data or after_start


@pytest.mark.parametrize(
    "tail",
    [
        bytes([5 * 2 + 1, 1, 0, 255, 255, 255, 255, 127, 2]),  # tokens: far more than there is
        bytes([1 * 2 + 1, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1]),  # a count of 70 bits
        bytes([27 * 2 + 1, 9]),  # a name that nobody gave
        bytes([8 * 2 + 1, 2]) + b"[[",  # no JSON
        bytes([8 * 2 + 1, *event_codec._count(200000)]) + b"[" * 200000,  # too deep
        bytes([4 * 2 + 1, 0, 1]) + b"\xff",  # no UTF-8
        bytes([24 * 2 + 1, 1, 1, 3, 0, 0, 0]),  # values of three bytes
        bytes([25 * 2 + 1, 1, 2]),  # neither old nor new branches
        bytes([25 * 2 + 1, 1, 0, 1, 0, 1, 97, 0]),  # fewer choices than requests
        bytes([5 * 2 + 1, 1, 3]),  # tokens of a fourth kind
        bytes([63 * 2 + 1]),  # a kind that is not known
    ],
)
def test_each_kind_of_nonsense_is_damage(tail):
    found, damage = read(framed(EventWriter().encode(*START) + tail))
    assert len(found) == 1 and damage is not None


def test_sizes_are_checked_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(recording, "MAX_FRAME", 100)
    huge = MAGIC + struct.pack("<III", 101, 5, 0)
    asked, data = [], io.BytesIO(huge)
    reader = RecordingReader(lambda size: asked.append(size) or data.read(size))
    assert list(reader) == [] and "101 bytes" in reader.damage
    assert max(asked) < 101
    bomb = framed(b"\0" * 200)
    assert "bytes of events" in read(bomb)[1]
    head = struct.pack("<II", len(zlib.compress(b"\0" * 90)), 5)
    data = zlib.compress(b"\0" * 90)
    lying = MAGIC + head + struct.pack("<I", zlib.crc32(data, zlib.crc32(head))) + data
    assert "another size" in read(lying)[1]
    noise = b"no deflate"
    head = struct.pack("<II", len(noise), 5)
    assert "inflated" in read(MAGIC + head + struct.pack("<I", zlib.crc32(noise, zlib.crc32(head))) + noise)[1]


def test_an_event_without_a_start_is_damage():
    assert "before the first start" in read(recorded([("read", 1.0, {"request": "a"})]))[1]
    assert "leans on" in read(framed(bytes([42 * 2 + 1, 0, 1, 97])))[1]


@pytest.mark.parametrize("data", [b"", b"hello", b"octavo timeline 9\n"])
def test_what_is_no_recording_is_refused(data):
    with pytest.raises(InvalidInput, match="version" if b"9" in data else "--record"):
        RecordingReader(io.BytesIO(data).read)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("party", {}),
        ("read", {"request": 3}),
        ("read", {}),
        ("read", {"request": "a", "x": 1}),
        ("delivered", {"spent": -1}),
        ("delivered", {"spent": 1 << 64}),
        ("copy", {"step": 1, "pages": [-1]}),
        ("copy", {"step": 1, "pages": [1 << 64]}),
        ("arrive", {"request": "a", "prompt": [], "facts": {1, 2}}),
    ],
)
def test_what_is_not_in_the_table_cannot_be_written(kind, values):
    with pytest.raises(InvalidInput):
        EventWriter().encode(kind, 0.0, values)


def test_names_take_places_in_turn(monkeypatch):
    monkeypatch.setattr(event_codec, "_PLACES", 3)
    names = ["a", "b", "c", "d", "a", "c", "d", "b", "a", "b"]
    writer, reader = EventWriter(), EventReader()
    data = b"".join(writer.encode("read", 0.0, {"request": name}) for name in names)
    assert [values["request"] for _, _, values in reader.decode(data)] == names


def test_frames_close_by_themselves(monkeypatch):
    monkeypatch.setattr(recording, "_FRAME", 40)
    monkeypatch.setattr(recording, "MAX_FRAME", 60)
    events = [START] + [("read", float(i), {"request": "x" * 20 + str(i)}) for i in range(9)]
    written = []
    writer = FrameWriter(written.append)
    for event in events:
        writer.add(*event)
    assert len(written) > 3 and writer.num_events == 10
    writer.flush()
    assert read(MAGIC + b"".join(written)) == (expected(events), None)
    with pytest.raises(InvalidInput, match="at most"):
        writer.add("read", 0.0, {"request": "y" * 70})


@given(worlds(), st.lists(PLANS, min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_every_event_of_a_run_is_in_the_table_and_comes_back(world, plans):
    run, writer, data, heard = Run(world, plans), EventWriter(), [], []
    run.model.always_draws = True

    def listen(kind, t, values):
        data.append(writer.encode(kind, t, values))
        heard.append((kind, t, plain(kind, values)))

    run.scheduler.timeline.listen(listen)
    run.play()
    told = [(kind, t, values) for kind, t, values in EventReader().decode(b"".join(data))]
    assert told == heard
    kept = [(e["kind"], e["t"]) for e in run.scheduler.timeline]
    assert kept == [(kind, t) for kind, t, _ in heard if kind != "arrive"][-len(kept) :]
