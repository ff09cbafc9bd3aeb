from __future__ import annotations

import contextlib
import datetime
import enum
import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from asyncpar.errors import ProtocolError, UsageError
from asyncpar.net.wire.frame import Segments
from asyncpar.net.wire.payload import (
    ALIGNMENT,
    FIRST_EXTENSION,
    LEAST_LENT,
    Extension,
    PayloadDecoder,
    PayloadEncoder,
    decode_payload,
    encode_payload,
)

DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
]


class Colour(enum.Enum):
    RED = "red"


class Point(msgspec.Struct):
    x: int
    weights: np.ndarray


@dataclass
class Batch:
    step: int
    tokens: npt.NDArray[np.int32]
    names: tuple[str, ...] = ()
    masks: dict[str, Any] = field(default_factory=dict)


def received(value: object) -> bytearray:
    """Encode ``value`` and let it arrive in fresh memory, as on a link."""
    return bytearray(encode_payload(value, what="value"))


def roundtrip(value: object, kind: Any = Any) -> Any:
    return decode_payload(received(value), kind)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@given(plain)
def test_plain_values_come_back_equal(value: object) -> None:
    assert roundtrip(value) == value


@given(
    hnp.arrays(
        dtype=hnp.integer_dtypes() | hnp.floating_dtypes(sizes=(16, 32, 64)) | hnp.boolean_dtypes(),
        shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
    )
)
def test_arrays_come_back_bit_for_bit_whatever_their_byte_order(array: npt.NDArray[Any]) -> None:
    result = roundtrip(array)
    assert result.shape == array.shape
    assert result.dtype == array.dtype.newbyteorder("<")
    assert result.tobytes() == array.astype(result.dtype).tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (3, 5)], ids=str)
def test_every_dtype_travels_in_every_shape(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    result = roundtrip({"a": [array]})["a"][0]
    assert result.dtype == array.dtype
    assert result.shape == shape
    assert result.tobytes() == array.tobytes()


def test_arrays_of_any_layout_arrive_in_order() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = [base.T, base[::2, ::-3], np.asfortranarray(base), np.broadcast_to(base[0], (3, 6)), base[1:1]]
    for view, result in zip(views, roundtrip(views), strict=True):
        np.testing.assert_array_equal(result, view)
        assert result.flags.c_contiguous


def test_decoded_arrays_are_writable_views_on_the_received_memory() -> None:
    memory = received([np.zeros(100, np.float64), np.ones(3, np.int8)])
    first, second = decode_payload(memory)
    first[:] = 7.0
    second[:] = 5
    again_first, again_second = decode_payload(memory)
    assert again_first.tolist() == [7.0] * 100
    assert again_second.tolist() == [5] * 3


def test_array_bytes_are_aligned_and_stand_outside_the_envelope() -> None:
    array = np.full(1000, 0xAB, np.uint8)
    payload = bytes(encode_payload(["x", array, array], what="value"))
    first = payload.index(b"\xab" * 1000)
    assert first % ALIGNMENT == 0
    assert payload.index(b"\xab" * 1000, first + 1000) % ALIGNMENT == 0


def test_padding_is_zero_so_that_no_old_memory_leaks() -> None:
    array = np.full(65, 0xFF, np.uint8)
    payload = bytes(encode_payload([array, array], what="value"))
    end = 8 + int.from_bytes(payload[4:8], "little")
    assert set(payload[end:]) == {0, 0xFF}
    assert payload[end:].count(0xFF) == 130
    assert payload.endswith(b"\xff")


def test_dataclasses_and_structs_come_back_typed() -> None:
    batch = Batch(step=3, tokens=np.arange(5, dtype=np.int32), names=("a", "b"), masks={"m": np.array(True)})
    result = roundtrip(batch, Batch)
    assert (result.step, result.names, result.tokens.tolist()) == (3, ("a", "b"), [0, 1, 2, 3, 4])
    assert result.masks["m"] == np.True_
    point = roundtrip(Point(1, np.ones(2)), Point)
    assert (point.x, point.weights.tolist()) == (1, [1.0, 1.0])


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ((1, "a"), tuple[int, str]),
        ({1, 2}, set[int]),
        (Colour.RED, Colour),
        (datetime.date(2024, 2, 29), datetime.date),
        ({(1, 2): "x"}, dict[tuple[int, int], str]),
        (None, np.ndarray | None),
        (3, float),
        (5, object),
    ],
    ids=str,
)
def test_annotations_give_values_their_type_back(value: object, kind: Any) -> None:
    assert roundtrip(value, kind) == value


def test_numpy_scalars_keep_their_types() -> None:
    scalars = [np.float32(0.5), np.int64(-3), np.bool_(True), ml_dtypes.bfloat16(1.5), np.float64(2.5)]
    result = roundtrip(scalars)
    assert result == [0.5, -3, True, 1.5, 2.5]
    assert [type(item) for item in result] == [type(scalar) for scalar in scalars]
    assert [type(item) for item in roundtrip(scalars, list[float | int | bool])] == [float, int, bool, float, float]
    assert type(roundtrip(np.float32(0.5), np.float32)) is np.float32
    assert roundtrip({np.int64(1): "x"}) == {1: "x"}


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("3", int, "argument n: Expected `int`, got `str`"),
        ({"step": 1, "tokens": 3}, Batch, r"argument n: Expected `numpy.ndarray`, got `int` - at `\$.tokens`"),
        (np.zeros(2), npt.NDArray[np.int32], "argument n: Expected an array of `numpy.int32`, got one of `float64`"),
        (np.zeros(2), int, "argument n: Expected `int`, got `ext`"),
        ([1], np.ndarray, "argument n: Expected `numpy.ndarray`, got `list`"),
        ("x", np.float32, "argument n: Expected `numpy.float32`, got `str`"),
    ],
)
def test_a_value_of_another_type_is_a_usage_error_that_names_the_argument(value: object, kind: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        decode_payload(received(value), kind, what="argument n")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "object"),
        ([{"a": lambda: 1}], "function"),
        (np.array([object()]), "dtype object"),
        (np.array(["a"]), "dtype <U1"),
        (np.zeros(2, [("a", "f4")]), "dtype"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray"),
        (np.zeros((2, 2)).view(np.matrix), "matrix"),
        (2**70, "int"),
        ("\ud800", "str"),
        (np.zeros(1, np.longdouble), "dtype"),
        (np.longdouble(1), "longdouble"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_value_that_cannot_be_sent_is_a_usage_error_that_names_it(value: object, named: str) -> None:
    with pytest.raises(UsageError, match=rf"argument weights(, at \S+)?: .*{named}"):
        encode_payload(value, what="argument weights")


def test_a_value_that_contains_itself_is_a_usage_error() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UsageError, match="argument tree: a value of type list cannot be sent"):
        encode_payload(value, what="argument tree")


def test_the_limit_is_checked_before_memory_is_taken() -> None:
    huge = np.broadcast_to(np.float32(0), (1 << 40,))
    with pytest.raises(UsageError, match=r"x: at most 1000 bytes fit into one message, got 4398\d+; send it in parts"):
        PayloadEncoder(limit=1000).finish(huge, what="x")


def test_a_type_that_cannot_be_checked_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be used for values that are sent"):
        PayloadDecoder(np.ndarray | int)


class _Temperature:
    def __init__(self, degrees: int) -> None:
        self.degrees = degrees


class _Temperatures(Extension):
    def encode(self, value: object) -> msgspec.msgpack.Ext | None:
        return msgspec.msgpack.Ext(FIRST_EXTENSION, bytes([value.degrees])) if isinstance(value, _Temperature) else None

    def decode(self, code: int, content: memoryview) -> object:
        return _Temperature(content[0])

    def convert(self, wanted: Any, value: object) -> object:
        if not isinstance(value, wanted):
            raise TypeError(f"Expected a temperature, got {value!r}")
        return value


def test_layers_above_can_add_a_kind_of_value() -> None:
    extension = _Temperatures()
    encoder = PayloadEncoder(extension=extension)
    part = encoder.part([_Temperature(20), np.arange(3)], what="x")
    payload = encoder.finish({"part": part}, what="x")
    parts = PayloadDecoder[dict[str, msgspec.Raw]](dict[str, msgspec.Raw]).decode(payload, what="x")
    decoder = PayloadDecoder[Any](Any, extension=extension)
    temperature, array = decoder.decode_part(parts["part"], payload, what="x")
    assert (temperature.degrees, array.tolist()) == (20, [0, 1, 2])
    typed = PayloadDecoder[_Temperature](_Temperature, extension=extension)
    assert typed.decode(PayloadEncoder(extension=extension).finish(_Temperature(5), what="x"), what="x").degrees == 5
    with pytest.raises(UsageError, match="y: Expected a temperature, got 3"):
        typed.decode(encode_payload(3, what="y"), what="y")


# -- hostile bytes --------------------------------------------------------------------------------------------------


def enveloped(envelope: bytes, attachments: bytes = b"") -> bytearray:
    payload = bytearray(b"\x01\0\0\0" + len(envelope).to_bytes(4, "little") + envelope)
    if attachments:
        payload += bytes(-len(payload) % ALIGNMENT) + attachments
    return payload


def array_extension(content: bytes) -> bytes:
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(1, content))


def u64(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


@given(st.binary(max_size=300))
def test_garbage_is_a_protocol_error_or_a_value(garbage: bytes) -> None:
    for payload in (garbage, enveloped(garbage), enveloped(garbage, b"attached" * 20)):
        with contextlib.suppress(ProtocolError):
            decode_payload(payload)


@given(plain, st.data())
def test_damaged_payloads_never_raise_anything_else(value: object, data: st.DataObject) -> None:
    payload = received([value, np.arange(20, dtype=np.int16), {"b": np.zeros((2, 3))}])
    for _ in range(3):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        decode_payload(payload[: data.draw(st.integers(0, len(payload)))])


@given(plain, st.data())
def test_damaged_payloads_of_a_known_type_are_usage_or_protocol_errors(value: object, data: st.DataObject) -> None:
    payload = received({"step": 3, "tokens": np.arange(20, dtype=np.int32), "names": ["a"], "masks": {"v": value}})
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError, UsageError):
        assert isinstance(decode_payload(payload, Batch), Batch)


def test_truncation_at_every_byte_is_a_protocol_error() -> None:
    payload = received({"a": np.arange(10), "b": "text"})
    for end in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode_payload(payload[:end])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\x0b", "too short"),
        (b"\xff\x00" + u64(0), "dtype code 255"),
        (b"\x00\x00" + u64(0), "dtype code 0"),
        (b"\x0b\x02" + u64(0, 1), "2 dimensions"),
        (b"\x0b\x01" + u64(0, 17), "exceeds"),
        (b"\x0b\x01" + u64(0, 2**62), "exceeds"),
        (b"\x0b\x02" + u64(0, 2**63, 2), "exceeds"),
        (b"\x0b\x01" + u64(2**64 - 64, 16), "exceeds"),
        (b"\x0b\x02" + u64(0, 2**63, 0), "array: shape"),
        (b"\x0b\x41" + u64(0, *[1] * 65), "65 dimensions"),
    ],
)
def test_array_descriptions_that_lie_are_protocol_errors(content: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        decode_payload(enveloped(array_extension(content), bytes(64)))


def test_unknown_versions_and_extension_types_are_protocol_errors() -> None:
    with pytest.raises(ProtocolError, match="version: this side speaks 1, the peer sent 2"):
        decode_payload(b"\x02" + bytes(enveloped(b"\xc0"))[1:])
    with pytest.raises(ProtocolError, match="extension type 77"):
        decode_payload(enveloped(msgspec.msgpack.encode(msgspec.msgpack.Ext(77, b""))))


@pytest.mark.parametrize(
    "prefix", [b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9"], ids=["array", "map", "bin", "str", "ext"]
)
def test_declared_lengths_take_no_memory(prefix: bytes) -> None:
    payload = enveloped(prefix + b"\xff\xff\xff\xff" + b"\x01" * 10_000)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode_payload(payload)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_deep_nesting_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="not a payload"):
        decode_payload(enveloped(b"\x91" * 100_000 + b"\x01"))


LENT: dict[str, npt.NDArray[Any]] = {
    "large": np.arange(LEAST_LENT, dtype=np.float64),
    "turned": np.arange(LEAST_LENT).reshape(4, -1).T,
    "small": np.arange(3, dtype=np.int8),
    "bfloat16": np.ones((3, LEAST_LENT), ml_dtypes.bfloat16),
    "foreign": np.arange(LEAST_LENT, dtype=">i4"),
    "empty": np.zeros((0, 5)),
    "none": np.array(1.5),
    "mask": np.zeros(LEAST_LENT, np.bool_),
}


@pytest.mark.parametrize("names", [tuple(LENT), ("large",), ("small", "large", "small"), ("turned",), ("small",)])
def test_lent_arrays_make_the_same_payload_as_copied_ones(names: tuple[str, ...]) -> None:
    value = [LENT[name] for name in names]
    copied = PayloadEncoder().finish(value, what="value")
    lent = PayloadEncoder().finish_lent(value, what="value")
    assert bytes(lent) == bytes(copied)
    assert len(lent) == len(copied)


def test_only_arrays_that_lie_as_they_travel_are_lent_and_large_ones_only() -> None:
    for name, array in LENT.items():
        payload = PayloadEncoder().finish_lent(array, what="value")
        before = bytes(payload)
        kept = array.copy()
        array[...] = 0
        assert (bytes(payload) != before) == (name in ("large", "bfloat16")), name
        array[...] = kept


def test_lent_arrays_may_be_read_only_and_of_a_subclass() -> None:
    array = np.arange(LEAST_LENT, dtype=np.float32)
    array.flags.writeable = False
    for value in (array, array.view(np.matrix)):
        payload = PayloadEncoder().finish_lent(value, what="value")
        assert isinstance(payload, Segments)
        assert np.array_equal(decode_payload(bytes(payload)), value)


def test_lent_payloads_keep_to_the_limit_too() -> None:
    with pytest.raises(UsageError, match="at most 1000 bytes fit into one message"):
        PayloadEncoder(limit=1000).finish_lent(np.zeros(LEAST_LENT), what="value")
