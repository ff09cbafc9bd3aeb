"""Messages about operations and about a forming arena: cut, changed, extreme."""

from __future__ import annotations

import contextlib
import random
import struct
from collections.abc import Callable

import numpy as np
import pytest

from asyncpar.collectives.gathers import check_lengths
from asyncpar.collectives.protocol import (
    ENVELOPE_BYTES,
    Abort,
    Probe,
    Status,
    decode_control,
    decode_envelope,
    describe,
    encode_control,
    encode_envelope,
)
from asyncpar.errors import ProtocolError
from asyncpar.net.arena.formation_machine import (
    ArenaVerdict,
    Message,
    Ready,
    Roster,
    SegmentOffer,
    Unable,
    decode_message,
    encode_message,
)
from asyncpar.net.arena.segment import NONCE_BYTES
from tests.hostile.inputs import bit_flips, mutated, truncations

_DESCRIPTION = describe("all_reduce", ("float32[8]", "sum"), "ring")
_OFFER = SegmentOffer(
    rank=2,
    terms="terms of settings",
    nonce=b"n" * NONCE_BYTES,
    control_bytes=4096,
    heap_bytes=1 << 20,
    process="1234:5678",
    cores=b"\x03",
    quota=2.0,
    maps_heaps=True,
)
CONTROLS: tuple[Abort | Probe | Status, ...] = (
    Abort("mismatch", "text", _DESCRIPTION, is_answer=True, rank=3),
    Abort("cancelled"),
    Probe(_DESCRIPTION),
    Status("in all_reduce #811"),
)
FORMATIONS: tuple[Message, ...] = (
    _OFFER,
    Unable("no memory"),
    Roster([_OFFER, _OFFER]),
    Ready(),
    ArenaVerdict("rank 1 is gone", 1),
    ArenaVerdict(),
)

Decode = Callable[[bytes], object]


def _controls(content: bytes) -> object:
    """Decode as every kind of control message; all must end alike, in a message or in ``ProtocolError``."""
    with contextlib.suppress(ProtocolError):
        return decode_control(content, Abort)
    with contextlib.suppress(ProtocolError):
        return decode_control(content, Probe)
    return decode_control(content, Status)


MESSAGES: dict[str, tuple[bytes, Decode]] = {
    **{
        f"{type(message).__name__} {place}": (encode_control(message), _controls)
        for place, message in enumerate(CONTROLS)
    },
    **{
        f"{type(message).__name__} {place}": (encode_message(message), decode_message)
        for place, message in enumerate(FORMATIONS)
    },
}


def is_taken(content: bytes, decode: Decode) -> bool:
    """Is this a message?  Anything raised but ``ProtocolError`` passes through."""
    try:
        decode(content)
    except ProtocolError:
        return False
    return True


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_is_cut_anywhere_is_refused(name: str) -> None:
    valid, decode = MESSAGES[name]
    assert is_taken(valid, decode)
    assert not any(is_taken(cut, decode) for cut in truncations(valid))


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_with_any_bit_changed_is_a_message_or_a_protocol_error(name: str) -> None:
    valid, decode = MESSAGES[name]
    assert not all(is_taken(changed, decode) for changed in bit_flips(valid))


def test_mutations_of_messages_are_messages_or_protocol_errors() -> None:
    dice = random.Random(11)
    messages = list(MESSAGES.values())
    for _ in range(50_000):
        valid, decode = dice.choice(messages)
        is_taken(mutated(valid, dice), decode)


@pytest.mark.parametrize(
    "content",
    [
        b"\x91" * 60_000,
        b"\x81\xa1a" * 20_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x93\x03\xdd\xff\xff\xff\xff",
        b"\x92\x02\xa2\xff\xff",
        b"\x81\xa4text\xa2\xff\xfe",
        b"\x95\x02\xa1a" + b"\x91" * 60_000,
        b"\xc7\x04\x01abcd",
        b"",
    ],
)
def test_deep_huge_and_unreadable_messages_are_refused(content: bytes) -> None:
    assert not is_taken(content, _controls)
    assert not is_taken(content, decode_message)


def test_a_text_longer_than_any_rank_sends_is_refused() -> None:
    assert is_taken(encode_control(Status("x" * 4096)), _controls)
    for message in (Status("x" * 4097), Abort("failed", "x" * 4097)):
        assert not is_taken(encode_control(message), _controls)


ENVELOPES = [
    encode_envelope(array, is_object=is_object)
    for array, is_object in (
        (np.zeros((2, 3), np.float32), False),
        (np.zeros(7, np.uint8), True),
        (np.zeros(()), False),
    )
]


@pytest.mark.parametrize("valid", ENVELOPES)
def test_an_envelope_with_any_bit_changed_is_refused_or_describes_what_can_be_made(valid: bytes) -> None:
    refused = 0
    for changed in bit_flips(valid):
        try:
            envelope = decode_envelope(changed)
        except ProtocolError:
            refused += 1
            continue
        assert envelope.nbytes <= 8 * 32
        assert np.empty(envelope.shape, envelope.dtype).nbytes == envelope.nbytes
    assert refused > 8 * (ENVELOPE_BYTES - 24)


@pytest.mark.parametrize("one", [0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("other", [0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_an_envelope_with_extreme_dimensions_is_refused_or_describes_what_can_be_made(one: int, other: int) -> None:
    for code, itemsize in ((0, 1), (11, 8), (13, 16)):
        nbytes = one * other * itemsize
        if nbytes >= 1 << 64:
            continue
        content = struct.pack("<BBB5xQ16Q", code, 2, 0, nbytes, one, other, *[0] * 14)
        try:
            envelope = decode_envelope(content)
        except ProtocolError:
            continue
        if envelope.nbytes <= 1 << 30:  # what is larger is never made, see ``Mailbox``
            np.empty(envelope.shape, envelope.dtype)


@pytest.mark.parametrize("length", [-1, -(2**63), 2**62, 2**63 - 1])
def test_lengths_of_objects_that_no_rank_has_are_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="lengths from other ranks"):
        check_lengths(np.array([1, length, 2]))
