"""Messages of a forming arena survive the trip; anything else is refused."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.errors import ProtocolError
from asyncpar.net.arena.formation_machine import (
    MAX_MESSAGE_BYTES,
    OFFERS_PER_MESSAGE,
    ArenaVerdict,
    Message,
    Ready,
    Roster,
    SegmentOffer,
    Unable,
    decode_cores,
    decode_message,
    describe,
    encode_cores,
    encode_message,
)

LARGEST = SegmentOffer(
    rank=2**32 - 1,
    terms="t" * 200,
    nonce=bytes(32),
    control_bytes=1 << 56,
    heap_bytes=1 << 56,
    process="p" * 100,
    cores=b"\xff" * 128,
    quota=math.inf,
    maps_heaps=False,
)


@pytest.mark.parametrize(
    "message", [LARGEST, Unable("no memory"), Roster([LARGEST]), Ready(), ArenaVerdict(), ArenaVerdict("gone", 3)]
)
def test_messages_survive_the_trip(message: Message) -> None:
    assert decode_message(encode_message(message)) == message


def test_the_largest_roster_fits_into_a_message() -> None:
    assert len(encode_message(Roster([LARGEST] * OFFERS_PER_MESSAGE))) <= MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([9]),
        msgspec.msgpack.encode([2, "x" * 501]),
        msgspec.msgpack.encode([5, "gone", -1]),
        msgspec.msgpack.encode([1, 0, "t", b"short", 1, 1, "p", b"", 1.0, True]),
        encode_message(Roster([LARGEST] * (OFFERS_PER_MESSAGE + 1))),
    ],
)
def test_what_is_no_message_is_refused(value: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^arena: a message cannot be read"):
        decode_message(value)


@given(content=st.binary(max_size=200))
def test_whatever_arrives_is_a_message_or_refused(content: bytes) -> None:
    try:
        message = decode_message(content)
    except ProtocolError:
        return
    assert isinstance(message, Message)


@given(cores=st.frozensets(st.integers(0, 1023)))
def test_cores_survive_the_trip(cores: frozenset[int]) -> None:
    assert decode_cores(encode_cores(cores)) == cores
    assert len(encode_cores(cores)) <= 128


def test_errors_are_described_without_their_number() -> None:
    assert describe(OSError(28, "No space left on device")) == "No space left on device"
    assert describe(ProtocolError("a segment is torn")) == "a segment is torn"
    assert describe(TimeoutError()) == "TimeoutError"
