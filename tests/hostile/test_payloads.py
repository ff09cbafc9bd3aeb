"""Payloads and the messages of actors: cut, changed, deep, and declared larger than the world."""

from __future__ import annotations

import random
import struct
import tracemalloc
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from asyncpar.actors.runtime.routing import MessageDecoder
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.net.wire.payload import PayloadDecoder, encode_payload
from tests.hostile.actor_messages import every_message
from tests.hostile.inputs import bit_flips, mutated, truncations

FACTOR = 100
"""What is built may take so many times the bytes that came: an empty list takes one byte on the wire and 64 here."""


class Point(msgspec.Struct):
    x: int
    name: str = ""


@dataclass
class Weights:
    step: int
    values: NDArray[np.float32]


PAYLOADS: dict[str, memoryview] = {
    "plain": encode_payload({"a": [1, 2.5, None, True, "text", b"bytes"], "b": {"c": -(2**40)}}, what="x"),
    "struct": encode_payload(Point(3, "here"), what="x"),
    "array": encode_payload(np.arange(12, dtype=np.int32).reshape(3, 4), what="x"),
    "arrays": encode_payload([np.ones(3, np.float64), np.zeros((0, 2)), np.ones(5, ml_dtypes.bfloat16)], what="x"),
    "dataclass": encode_payload(Weights(4, np.ones(6, np.float32)), what="x"),
    "scalars": encode_payload([np.float32(1.5), np.int8(-3)], what="x"),
}
TYPES: tuple[Any, ...] = (
    Any,
    int,
    str,
    list[int],
    list[Any],
    dict[str, Any],
    tuple[int, ...],
    set[str],
    Point,
    Weights,
    NDArray[np.float32],
    np.ndarray,
    np.float32,
    list[np.ndarray],
)
DECODERS = [PayloadDecoder[Any](kind) for kind in TYPES]

MESSAGES = every_message()


def take(payload: bytes) -> int:
    """Decode ``payload`` in every way; return how many gave a value.  Anything but the documented errors is raised."""
    values = 0
    for kind, decoder in zip(TYPES, DECODERS, strict=True):
        try:
            decoder.decode(payload, what="x")
            values += 1
        except ProtocolError:
            continue
        except UsageError:
            assert kind is not Any, "whatever is well formed fits Any"
    return values


def take_message(payload: bytes) -> bool:
    """Decode ``payload`` as a message; True if it is one."""
    try:
        MessageDecoder().decode(payload)
    except ProtocolError:
        return False
    return True


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_that_is_cut_anywhere_is_refused(name: str) -> None:
    valid = bytes(PAYLOADS[name])
    assert take(valid) > 0
    for cut in truncations(valid):
        assert take(cut) == 0


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_with_any_bit_changed_is_a_value_or_a_documented_error(name: str) -> None:
    valid = bytes(PAYLOADS[name])
    outcomes = [take(changed) for changed in bit_flips(valid)]
    assert 0 in outcomes
    assert any(outcomes)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_is_cut_anywhere_is_refused(name: str) -> None:
    assert take_message(MESSAGES[name])
    assert not any(take_message(cut) for cut in truncations(MESSAGES[name]))


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_with_any_bit_changed_is_a_message_or_a_protocol_error(name: str) -> None:
    outcomes = {take_message(changed) for changed in bit_flips(MESSAGES[name])}
    assert outcomes == {True, False}


def test_a_hundred_thousand_mutations_are_values_or_documented_errors() -> None:
    dice = random.Random(7)
    payloads = [bytes(payload) for payload in PAYLOADS.values()]
    decoders = [PayloadDecoder[Any](), PayloadDecoder[Any](list[Any]), PayloadDecoder[Any](Weights)]
    messages = list(MESSAGES.values())
    decoder = MessageDecoder()
    refused = 0
    for turn in range(100_000):
        try:
            if turn % 2:
                decoder.decode(mutated(dice.choice(messages), dice))
            else:
                dice.choice(decoders).decode(mutated(dice.choice(payloads), dice), what="x")
        except (ProtocolError, UsageError):
            refused += 1
    assert 50_000 < refused < 100_000


def payload_of(envelope: bytes) -> bytes:
    """Return a payload with these bytes as its envelope."""
    return struct.pack("<B3xI", 1, len(envelope)) + envelope


DEEP = {
    "lists": b"\x91" * 100_000 + b"\xc0",
    "maps": b"\x81\xa1a" * 100_000 + b"\xc0",
    "long lists": b"\xdd\x00\x00\x00\x01" * 100_000 + b"\xc0",
    "lists in an argument": b"\x93\x01\x07\x91" + b"\x91" * 100_000 + b"\xc0",
    "lists in a call": b"\x96\x01\x07\xa1a\xa1e\x91"
    + b"\x91" * 1_000_000
    + b"\xc0\x80",  # the stack of 3.14 bears 100,000
}
HUGE = {
    "list": b"\xdd\xff\xff\xff\xff",
    "map": b"\xdf\xff\xff\xff\xff",
    "text": b"\xdb\xff\xff\xff\xff",
    "bytes": b"\xc6\xff\xff\xff\xff",
    "extension": b"\xc9\xff\xff\xff\xff\x01",
    "large list": b"\xdd\x10\x00\x00\x00" + b"\xc0" * 1000,
    "lists of what is left": b"".join(b"\xdd" + struct.pack(">I", 1_000 - 5 * turn) for turn in range(200)) * 5,
    "arguments of a call": b"\x96\x01\x07\xa1a\xa1e\xdd\xff\xff\xff\xff",
    "keywords of a call": b"\x96\x01\x07\xa1a\xa1e\x90\xdf\xff\xff\xff\xff",
}


@pytest.mark.parametrize("envelope", [*DEEP.values(), *HUGE.values()], ids=[*DEEP, *HUGE])
def test_deep_and_huge_plain_data_is_refused_within_memory_that_goes_with_its_bytes(envelope: bytes) -> None:
    payload = payload_of(envelope)
    tracemalloc.start()
    try:
        assert take(payload) == 0
        assert not take_message(payload)
        assert tracemalloc.get_traced_memory()[1] <= FACTOR * len(payload) + 700_000  # threads of the runner, too
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("element", [b"\x90", b"\x80", b"\xa0", b"\xc4\x00", b"\x00"])
def test_what_is_built_stays_within_a_constant_factor_of_what_came(element: bytes) -> None:
    count = 100_000
    payload = payload_of(b"\xdd" + struct.pack(">I", count) + element * count)
    tracemalloc.start()
    try:
        value = DECODERS[0].decode(payload, what="x")
        assert len(value) == count
        assert tracemalloc.get_traced_memory()[1] <= FACTOR * len(payload)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("declared", [0, 1, 2**31 - 1, 2**31, 2**32 - 1])
def test_an_envelope_of_any_declared_length_is_refused_or_fits(declared: int) -> None:
    take(struct.pack("<B3xI", 1, declared) + b"\xc0" * 10)


EXTREMES = (0, 1, 63, 64, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


@pytest.mark.parametrize("code", [1, 5, 12, 14, 15])
def test_descriptions_of_arrays_with_extreme_shapes_and_offsets_are_refused_or_empty(code: int) -> None:
    decoder = PayloadDecoder[Any]()
    for offset in EXTREMES:
        for shape in [(size,) for size in EXTREMES] + [(one, other) for one in EXTREMES for other in EXTREMES]:
            content = struct.pack(f"<BBQ{len(shape)}Q", code, len(shape), offset, *shape)
            envelope = b"\xc7" + bytes([len(content), 1]) + content
            try:
                array = decoder.decode(payload_of(envelope) + bytes(200), what="x")
            except ProtocolError:
                continue
            assert array.nbytes <= 200


@pytest.mark.parametrize("dimensions", [0, 1, 32, 33, 64, 65, 255])
def test_arrays_of_any_number_of_dimensions_are_values_or_refused(dimensions: int) -> None:
    for size in (0, 1, 2):
        content = struct.pack(f"<BBQ{dimensions}Q", 6, dimensions, 0, *[size] * dimensions)
        take(payload_of(b"\xc8" + struct.pack(">H", len(content)) + b"\x01" + content) + bytes(100))


@pytest.mark.parametrize("code", range(-128, 128))
def test_extensions_of_every_type_are_refused_or_arrays(code: int) -> None:
    for content in (b"", b"\x00", bytes(10), bytes(18)):
        envelope = b"\xc7" + struct.pack("Bb", len(content), code) + content
        assert take(payload_of(envelope)) == 0 or code == -1, "only timestamps are extensions of msgpack itself"


@pytest.mark.parametrize("kind", [np.void, np.bytes_, np.str_])
def test_a_number_does_not_say_how_much_memory_a_scalar_takes(kind: Any) -> None:
    with pytest.raises(UsageError, match="Expected"):
        PayloadDecoder[Any](kind).decode(encode_payload(1 << 33, what="x"), what="x")


def test_a_number_too_large_for_its_kind_is_infinite_or_refused() -> None:
    large = encode_payload(1e300, what="x")
    assert PayloadDecoder[Any](np.float16).decode(large, what="x") == np.inf
    with pytest.raises(UsageError, match=r"x: Expected `numpy.int8`, got 1e\+300"):
        PayloadDecoder[Any](np.int8).decode(large, what="x")
