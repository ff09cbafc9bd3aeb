"""Frames that were cut, changed, or declare the extreme, as a link takes them.

A changed bit in the elements of an array is a value like any other here: checksums are the business of lanes between
hosts.  Everything else is either taken for what it says or refused with ``ProtocolError``.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from asyncpar.errors import ProtocolError
from asyncpar.net.transport import flow_control, messages
from asyncpar.net.transport.flow_control import EAGER_WINDOW, MAX_PENDING
from asyncpar.net.transport.lane import MAX_FRAME_BYTES
from asyncpar.net.wire.frame import HEADER_BYTES, MESSAGE_GROUP, VERSION, FrameKind, Key
from tests.hostile.inputs import bit_flips, truncations
from tests.hostile.victim import (
    FINGERPRINT,
    GENERATION,
    MESSAGE_BYTES,
    PAYLOAD,
    POSTED,
    Victim,
    every_frame,
    frame,
    number,
)
from tests.soak import chosen

FRAMES = every_frame()
EACH = chosen(3, soak=1)
"""Of so many bits one is changed: two or three of each byte."""

VALID = frame(FrameKind.EAGER, POSTED)
_FIELDS = {"kind": (3, 1), "generation": (4, 4), "group": (8, 8), "sequence": (16, 8), "tag": (24, 4)}
_FIELDS |= {"fingerprint": (28, 4), "length": (32, 8), "magic": (0, 2), "version": (2, 1)}


LITTLE = 768 * 1024
"""Bytes: less than the smallest length claimed here; the runner's own threads allocate up to 300 KB meanwhile."""


@contextmanager
def at_most(limit: int) -> Iterator[None]:
    """No more than ``limit`` bytes may be allocated at any time inside."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] <= limit
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", FRAMES)
async def test_the_frame_itself_is_taken(name: str) -> None:
    victim = Victim()
    if name == "striped":
        with pytest.raises(ProtocolError, match="in parts over a single connection"):
            victim.feed(FRAMES[name])
        return
    victim.feed(FRAMES[name])
    assert victim.reader.is_between_frames


@pytest.mark.parametrize("name", FRAMES)
async def test_a_frame_that_is_cut_anywhere_delivers_nothing(name: str) -> None:
    for cut in truncations(FRAMES[name]):
        victim = Victim()
        if name == "striped" and len(cut) >= HEADER_BYTES:
            continue
        victim.feed(cut)
        assert victim.received is not None
        assert not victim.received.done()
        assert (victim.messages, victim.controls) == ([], [])
        if cut:
            with pytest.raises(ProtocolError, match="in the middle of a frame"):
                victim.reader.check_end()
        else:
            victim.reader.check_end()


@pytest.mark.parametrize("name", FRAMES)
async def test_a_frame_with_any_bit_changed_is_taken_or_refused(name: str) -> None:
    taken = refused = 0
    for changed in bit_flips(FRAMES[name], each=EACH):
        victim = Victim()
        try:
            victim.feed(changed)
            victim.feed(FRAMES["goodbye"])  # lands in what is missing, if the length has grown
            taken += 1
        except ProtocolError:
            refused += 1
        assert victim.received is not None
        is_through = victim.received.done() and victim.received.exception() is None
        assert not is_through or victim.buffer == changed[HEADER_BYTES:]
        assert not is_through or changed[:HEADER_BYTES] == FRAMES[name][:HEADER_BYTES]
    assert taken + refused == -(-8 * len(FRAMES[name]) // EACH)
    assert refused >= 8 * 3 // EACH, "magic and version are checked at least"


async def test_a_changed_header_in_front_of_a_payload_that_is_read_straight_into_memory() -> None:
    payload = bytes(32 * 1024)
    valid = frame(FrameKind.BULK, Key(7, 5, 0), payload)
    for changed in bit_flips(valid, last=HEADER_BYTES):
        victim, target = Victim(), bytearray(len(payload))
        waiter = victim.link.post(Key(7, 5, 0), FINGERPRINT, memoryview(target))
        assert waiter is not None
        try:
            for start in range(0, len(changed), 16 * 1024):
                part = changed[start : start + 16 * 1024]
                while part:
                    place = victim.reader.buffer()
                    count = min(len(place), len(part))
                    place[:count] = part[:count]
                    victim.reader.advance(count)
                    part = part[count:]
        except ProtocolError:
            pass
        assert not waiter.done() or waiter.exception() is not None


def _with(field: str, value: int) -> bytes:
    start, size = _FIELDS[field]
    return VALID[:start] + value.to_bytes(size, "little") + VALID[start + size :]


@pytest.mark.parametrize("kind", FrameKind)
@pytest.mark.parametrize("field", _FIELDS)
async def test_every_field_of_a_header_at_its_extremes_costs_no_memory(field: str, kind: FrameKind) -> None:
    top = (1 << 8 * _FIELDS[field][1]) - 1
    for value in {0, 1, top // 2, top // 2 + 1, top - 1, top, top & 1 << 32, top & 1 << 63}:
        head = bytearray(_with(field, value))
        if field != "kind":
            head[3] = kind
        victim = Victim()
        with at_most(LITTLE):
            try:
                victim.feed(bytes(head))
            except ProtocolError:
                continue
        assert field not in {"magic", "version"} or value == VERSION
        assert field != "generation" or value == GENERATION


@pytest.mark.parametrize("length", [1 << 32, 1 << 35, MAX_FRAME_BYTES])
async def test_a_huge_payload_that_nobody_wants_is_dropped_as_it_comes(length: int) -> None:
    victim = Victim()
    head = _with("length", length)[:HEADER_BYTES]
    victim.feed(frame(FrameKind.GOODBYE, Key(0, 0, 0), b""))
    with at_most(LITTLE):
        victim.reader.feed(head[:3] + bytes([FrameKind.BULK]) + head[4:8] + number(77) + head[16:])
        for _ in range(64):
            victim.reader.feed(bytes(64 * 1024))
    assert not victim.reader.is_between_frames
    with pytest.raises(ProtocolError, match="in the middle of a frame"):
        victim.reader.check_end()


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 1 << 63, (1 << 64) - 1])
async def test_a_payload_longer_than_any_is_refused_at_its_header(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"frame length: at most {MAX_FRAME_BYTES} bytes"):
        Victim().feed(_with("length", length))


@pytest.mark.parametrize("length", [1 << 32, MAX_FRAME_BYTES])
async def test_a_huge_payload_for_a_small_receive_fails_that_receive_only(length: int) -> None:
    victim = Victim()
    head = _with("length", length)[:HEADER_BYTES]
    victim.feed(head[:3] + bytes([FrameKind.BULK]) + head[4:])
    assert victim.received is not None
    assert f"expects {len(PAYLOAD)} bytes, the peer sent {length}" in str(victim.received.exception())


@pytest.mark.parametrize("length", [1 << 20, 1 << 32, 1 << 62])
async def test_a_huge_message_costs_nothing_before_it_is_granted(length: int) -> None:
    victim = Victim()
    message = Key(MESSAGE_GROUP, 0, 0)
    request = frame(FrameKind.REQUEST, message, number(length), fingerprint=0)
    head = frame(FrameKind.BULK, message, b"", fingerprint=0)[:32] + number(length + 1)
    with at_most(LITTLE), pytest.raises(ProtocolError, match=r"without a grant|at most"):
        victim.feed(request + head)


PENDING = chosen(4096, soak=MAX_PENDING)
"""How many frames may wait for something here."""

WINDOW = EAGER_WINDOW * PENDING // MAX_PENDING


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let less wait than links do, in the same proportion: it takes that many frames to get there."""
    for module in (flow_control, messages):
        monkeypatch.setattr(module, "MAX_PENDING", PENDING)
        monkeypatch.setattr(module, "EAGER_WINDOW", WINDOW)


@pytest.mark.usefixtures("bounds")
async def test_grants_requests_and_early_payloads_are_all_bounded() -> None:
    for kind, payload in ((FrameKind.GRANT, number(1)), (FrameKind.REQUEST, number(1)), (FrameKind.EAGER, b"")):
        victim = Victim()
        frames = (frame(kind, Key(7, 9, tag), payload) for tag in itertools.count())
        with pytest.raises(ProtocolError, match=rf"more than {PENDING}|overspent"):
            victim.feed_all(frames)
        assert victim.fed <= WINDOW // HEADER_BYTES + 1
        assert victim.early_bytes <= WINDOW


@pytest.mark.usefixtures("bounds")
@pytest.mark.parametrize("length", [0, 1, MESSAGE_BYTES])
async def test_messages_that_wait_for_a_grant_are_bounded(length: int) -> None:
    victim = Victim()
    frames = (
        frame(FrameKind.REQUEST, Key(MESSAGE_GROUP, sequence, 0), number(length), fingerprint=0)
        for sequence in itertools.count()
    )
    with pytest.raises(ProtocolError, match=f"more than {PENDING} messages wait for a grant"):
        victim.feed_all(frames)
    assert victim.fed <= 2 * PENDING


@pytest.mark.usefixtures("bounds")
async def test_messages_that_wait_for_an_earlier_one_are_bounded() -> None:
    for kind, payload, fingerprint in ((FrameKind.EAGER, b"", 0), (FrameKind.REQUEST, number(0), 1)):
        victim = Victim()
        frames = (
            frame(kind, Key(MESSAGE_GROUP, sequence, 0), payload, fingerprint=fingerprint)
            for sequence in itertools.count(1)
        )
        with pytest.raises(ProtocolError, match=rf"more than {PENDING}|overspent"):
            victim.feed_all(frames)
        assert victim.fed <= WINDOW // HEADER_BYTES + 1
        assert victim.early_bytes <= WINDOW
        assert victim.messages == []


async def test_taking_back_as_many_messages_as_can_wait_takes_no_quadratic_time() -> None:
    victim = Victim()
    for fingerprint in (0, 1):
        for sequence in range(1, MAX_PENDING):
            key = Key(MESSAGE_GROUP, sequence, 0)
            victim.feed(frame(FrameKind.REQUEST, key, number(MESSAGE_BYTES), fingerprint=fingerprint))
    assert victim.messages == []
