"""Conversion of values to the bytes of one message and back: plain data as msgpack, arrays as raw bytes behind it.

Theory of operation.  A payload is, little endian:

    offset  size  field
    0       1     version (1)
    1       3     zero
    4       4     length of the envelope in bytes
    8             the envelope: one msgpack value
    ...           zeros up to the next multiple of 64, then the attachments

An array is represented in the envelope by an extension of type 1, its description (see ``array``).  The attachments
hold the elements in C order, little endian, each array at a multiple of 64.  So an array is copied once when it is
sent, and received as a view on the received memory.  A value of a type that msgpack does not have is an extension of
type 2 (see ``typed_values``).

Nothing received is trusted: dtypes come from a closed table, every array must lie inside the attachments, and values
built from plain data stay within a constant factor of the received bytes.  There is no pickle and no code.
"""

from __future__ import annotations

import struct
import traceback
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final, Generic, NoReturn, TypeVar, get_origin, overload

import msgspec
import numpy as np
from msgspec.msgpack import Ext

from asyncpar.errors import ProtocolError, UsageError
from asyncpar.net.wire.array import (
    AnyArray,
    Buffer,
    check_array,
    describe_array,
    is_sendable,
    lend_array,
    type_name,
    view_array,
    write_array,
)
from asyncpar.net.wire.frame import Payload, Segments
from asyncpar.net.wire.typed_values import (
    DECLARED,
    FIELDS,
    SCALAR,
    UNCHANGED,
    CannotKeep,
    find_declared,
    find_place,
    has_any,
    keep_types,
    mark_declared,
    restore,
    restore_declared,
    restore_scalar,
    sequence_in,
)

T = TypeVar("T")

PAYLOAD_VERSION: Final = 1
ALIGNMENT: Final = 64
FIRST_EXTENSION: Final = 16
"""Lowest code of the extension types that layers above may add; the highest is 127."""

LEAST_LENT: Final = 32 * 1024
"""Smaller arrays are copied even if they could be lent: that is cheaper than a separate piece."""

_HEADER = struct.Struct("<B3xI")
_ARRAY_EXTENSION: Final = 1
_TYPED_EXTENSION: Final = 2
_EXTENSION_CODE_AT: Final = {0xC7: 2, 0xC8: 3, 0xC9: 5} | dict.fromkeys(range(0xD4, 0xD9), 1)
"""First bytes of msgpack extensions, with the offsets of their codes."""
_MAX_ENVELOPE: Final = 2**32 - 1


class Extension(ABC):
    """Values of an additional kind, which a layer above adds to payloads (such as references to actors)."""

    @abstractmethod
    def encode(self, value: object) -> Ext | None:
        """Return ``value`` as an extension with a code from ``FIRST_EXTENSION`` on; None if it is of another kind.

        Raises ``UsageError`` for objects easily mistaken for such a value, naming what can be sent instead.
        """

    @abstractmethod
    def decode(self, code: int, content: memoryview) -> object:
        """Return the value from which ``encode`` made this.  Raises ``ProtocolError`` for anything else."""

    @abstractmethod
    def convert(self, wanted: Any, value: object) -> object:
        """Return ``value`` in the form of the annotation ``wanted``.  Raises ``TypeError`` if it does not fit."""


class UnwrittenPayload:
    """A payload whose arrays are still to be copied, from memory that must not change meanwhile."""

    __slots__ = ("_arrays", "_front", "nbytes")

    def __init__(self, front: bytes, arrays: Sequence[tuple[int, AnyArray]], nbytes: int) -> None:
        self._front = front
        self._arrays = arrays
        self.nbytes = nbytes

    def __len__(self) -> int:
        return self.nbytes

    def write(self) -> memoryview:
        """Return the payload: contiguous new bytes, arrays copied exactly once.  In any thread."""
        if not self._arrays:
            return memoryview(self._front)
        memory = np.empty(self.nbytes, np.uint8).data
        self.write_into(memory)
        return memory

    def write_into(self, memory: memoryview) -> None:
        """Write the payload into ``memory``, which has the same length.  In any thread."""
        front = self._front
        start, end = _align(len(front)), len(front)
        memory[:end] = front
        for offset, array in self._arrays:
            offset += start
            memory[end:offset] = bytes(offset - end)
            write_array(array, memory, offset)
            end = offset + array.nbytes


class PayloadEncoder:
    """Builds one payload.  ``part`` encodes values inside the envelope; ``finish`` makes the payload.

    ``declares``: receivers declare types.  Otherwise values that only they could restore, such as members of
    enumerations, are refused.
    """

    def __init__(self, *, extension: Extension | None = None, limit: int | None = None, declares: bool = True) -> None:
        self._extension = extension
        self._declares = declares
        self._limit = limit
        self._arrays: list[tuple[int, AnyArray]] = []
        self._attached = 0
        self._what = ""
        self._is_trial = False

    def part(self, value: object, *, what: str) -> msgspec.Raw:
        """Return ``value`` encoded; it may then stand anywhere in the envelope given to ``finish``.

        Raises ``UsageError`` naming ``what`` and the type that cannot be sent.
        """
        typed = self.typed(value, what=what)
        try:
            return msgspec.Raw(self._encode(typed, what))
        except UsageError as error:
            raise self._at_place(value, what, error) from error.__cause__

    def typed(self, value: object, *, what: str) -> Any:
        """Return the representation of ``value`` in the envelope given to ``finish``, so that it arrives with its type.

        Raises ``UsageError`` like ``part``.
        """
        self._what = what
        if type(value) in UNCHANGED:
            return value
        try:
            return keep_types(value, self._wrap)
        except CannotKeep as error:
            raise self._at_place(value, what, UsageError(f"{what}: {error}")) from None
        except UsageError as error:
            raise self._at_place(value, what, error) from error.__cause__
        except Exception as error:  # including errors of user code on attribute access
            raise self._at_place(value, what, _cannot_send(value, what, error)) from error

    def _at_place(self, value: object, what: str, error: UsageError) -> UsageError:
        """Return ``error`` with the place in ``value`` of the part that cannot be sent."""
        if self._is_trial:
            return error

        def refusal(part: object) -> str:
            trial = PayloadEncoder(extension=self._extension, declares=self._declares)
            trial._is_trial = True
            try:
                trial.part(part, what=what)
            except UsageError as refused:
                return str(refused).removeprefix(f"{what}: ")
            return ""

        place, why = find_place(value, refusal)
        return UsageError(f"{what}, at {place}: {why}") if place else error

    def finish(self, envelope: object, *, what: str) -> memoryview:
        """Return the payload: contiguous new bytes, arrays copied exactly once.

        ``envelope`` is a message of parts, or made by ``typed``: types that msgpack does not have are lost in others.
        Raises ``UsageError`` like ``part``, and if the payload is larger than the limit.
        """
        return self.prepare(envelope, what=what).write()

    def prepare(self, envelope: object, *, what: str) -> UnwrittenPayload:
        """Return the payload like ``finish``, but copy no arrays yet."""
        return self._unwritten(self._front(envelope, what))

    def finish_lent(self, envelope: object, *, what: str) -> Payload:
        """Return the payload like ``finish``, but with large arrays in their own memory instead of copies.

        Such an array must not change until the payload has been sent or released.  Arrays that are small, or not in
        wire format, are copied all the same.
        """
        front = self._front(envelope, what)
        return self._unwritten(front).write() if self._attached < LEAST_LENT else self._lent(front)

    def _unwritten(self, front: bytes) -> UnwrittenPayload:
        nbytes = _align(len(front)) + self._attached if self._arrays else len(front)
        return UnwrittenPayload(front, self._arrays, nbytes)

    def _lent(self, front: bytes) -> Segments:
        own = bytearray(front)
        start, end = _align(len(own)), len(own)
        views: list[memoryview] = []
        for offset, array in self._arrays:
            own += bytes(start + offset - end)
            lent = lend_array(array) if array.nbytes >= LEAST_LENT else None
            if lent is None:
                lent = np.empty(array.nbytes, np.uint8).data
                write_array(array, lent, 0)
            if len(lent) >= LEAST_LENT:
                views += [memoryview(own), lent]
                own = bytearray()
            else:
                own += lent
            end = start + offset + array.nbytes
        return Segments([*views, memoryview(own)])

    def _front(self, envelope: object, what: str) -> bytes:
        """Return the bytes before the attachments, after checking the total size."""
        encoded = self._encode(envelope, what)
        if len(encoded) > _MAX_ENVELOPE:
            raise UsageError(
                f"{what}: at most {_MAX_ENVELOPE} bytes of plain data can be sent, got {len(encoded)}; numbers go as "
                "numpy arrays, which do not count, and texts and bytes in parts"
            )
        front = _HEADER.pack(PAYLOAD_VERSION, len(encoded)) + encoded
        self._check_size(_align(len(front)) + self._attached if self._arrays else len(front), what)
        return front

    def _encode(self, value: object, what: str) -> bytes:
        self._what = what
        try:
            return msgspec.msgpack.encode(value, enc_hook=self._lower)
        except UsageError:
            raise
        except Exception as error:  # including errors of user code on attribute access
            raise _cannot_send(value, what, error) from error

    def _wrap(self, code: int, content: Any) -> Ext:
        if code == FIELDS and self._declares:
            return Ext(_TYPED_EXTENSION, b"")  # not used: this call is only a query
        if code in (DECLARED, FIELDS) and not self._declares:
            raise CannotKeep(
                f"a value of type {content[0]} cannot be sent where no type is declared, it would become plain data; "
                "declare the type, or send plain data"
            )
        return Ext(_TYPED_EXTENSION, msgspec.msgpack.encode([code, content], enc_hook=self._lower))

    def _lower(self, value: object) -> object:
        """Convert a value unknown to msgpack to one that it knows."""
        if isinstance(value, np.ndarray):
            return self._attach(value)
        if isinstance(value, np.generic) and value.dtype.kind != "c" and is_sendable(value.dtype):
            return value.item()
        try:
            lowered = None if self._extension is None else self._extension.encode(value)
        except UsageError as error:
            raise UsageError(f"{self._what}: {error}") from None
        if lowered is None:
            raise UsageError(
                f"{self._what}: a value of type {type_name(type(value))} cannot be sent; expected plain data (numbers, "
                "strings, bytes, lists, dicts, dates), dataclasses, msgspec.Struct or numpy arrays"
            )
        return lowered

    def _attach(self, array: AnyArray) -> Ext:
        offset = _align(self._attached)
        description = describe_array(array, offset, what=self._what)
        self._attached = offset + array.nbytes
        self._arrays.append((offset, array))
        return Ext(_ARRAY_EXTENSION, description)

    def _check_size(self, size: int, what: str) -> None:
        if self._limit is not None and size > self._limit:
            raise UsageError(
                f"{what}: at most {self._limit} bytes fit into one message, got {size}; send it in parts (an endpoint "
                "that yields them is a stream), or arrays by comm.send and recv or a collective"
            )


class PayloadDecoder(Generic[T]):
    """Decodes payloads, or parts of them, to values of one type.  Make it once per type; not for several threads.

    Arrays are views on the payload, writable if it is, and keep it alive.  With the type ``Any``, dataclasses and
    structs become dicts, and values that need a declared type (members of enumerations, named tuples, an application's
    kinds of lists and dicts) are refused by name; with ``as_plain`` they become the plain values that they hold.

    Raises ``UsageError`` if the type cannot be checked.
    """

    def __init__(
        self,
        type: Any = Any,  # noqa: A002
        *,
        extension: Extension | None = None,
        as_plain: bool = False,
    ) -> None:
        self._extension = extension
        self._payload: Buffer = b""
        self._type = type
        self._is_any = type in (Any, object)
        self._is_sequence = (get_origin(type) or type) in (tuple, list, set, frozenset)
        self._declared = _as_plain if as_plain else _refuse_declared
        self._holds_any: bool | None = None
        """Whether ``type`` has places for values of any type; determined on demand."""
        self._typed_values = 0
        """Number of decoded values with a type."""
        self._keeps_scalars = not as_plain
        """Whether numpy scalars stay scalars, rather than becoming numbers."""
        self._untyped = msgspec.msgpack.Decoder[Any](Any, ext_hook=self._lift)
        try:
            self._decoder = msgspec.msgpack.Decoder[Any](type, ext_hook=self._lift, dec_hook=self._convert)
        except (TypeError, ValueError) as error:
            raise UsageError(f"type: {type} cannot be used for values that are sent: {error}") from error

    def decode(self, payload: Buffer, *, what: str) -> T:
        """Return the value in ``payload``.

        Raises ``UsageError`` naming ``what`` if the value is not of the type, ``ProtocolError`` if the bytes could not
        come from an encoder.
        """
        end = _HEADER.size + _envelope_length(payload)
        return self._run(memoryview(payload)[_HEADER.size : end], payload, what)

    def decode_part(self, part: msgspec.Raw, payload: Buffer, *, what: object) -> T:
        """Return the value of a part that was decoded, as ``msgspec.Raw``, from the envelope of ``payload``.

        ``what`` is turned into text only if it is needed.
        """
        return self._run(part, payload, what)

    def _run(self, encoded: memoryview | msgspec.Raw, payload: Buffer, what: object) -> T:
        self._payload = payload
        try:
            value: T = self._decoder.decode(encoded) if self._is_any else self._decode_typed(encoded)
        except ProtocolError as error:
            raise ProtocolError(f"{what}: {error}") from error
        except UsageError as error:
            raise UsageError(f"{what}: {error}") from error
        except msgspec.ValidationError as error:
            if self._is_any:
                raise ProtocolError(f"{what}: {error}") from error
            raise UsageError(f"{what}: {error}") from error
        except (ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise ProtocolError(f"{what}: not a payload: {error}") from error
        except Exception as error:  # user code: a value that checks itself in its ``__post_init__``
            raise UsageError(f"{what}: {_describe(error)}") from error
        finally:
            self._payload = b""
        return value

    def _decode_typed(self, encoded: memoryview | msgspec.Raw) -> Any:
        """Decode by the type directly, or, if the types of values and places differ in form, in two steps."""
        failure: msgspec.ValidationError | None = None
        content = _typed_content(encoded)
        if content is None or self._is_sequence:
            try:
                return self._decoder.decode(encoded if content is None else sequence_in(content) or encoded)
            except msgspec.ValidationError as error:
                failure = error
        before = self._typed_values
        try:
            return self._decode_in_steps(encoded, failure)
        except msgspec.ValidationError:
            if not self._keeps_scalars or self._typed_values == before:
                raise
        self._keeps_scalars = False  # a place declared as a number gets the number of a scalar
        try:
            return self._decode_in_steps(encoded, failure)
        finally:
            self._keeps_scalars = True

    def _decode_in_steps(self, encoded: memoryview | msgspec.Raw, failure: msgspec.ValidationError | None) -> Any:
        """Decode to plain values first, and convert them; ``failure`` is why that is needed."""
        before, declared = self._typed_values, self._declared
        self._declared = self._mark_declared
        try:
            value = self._untyped.decode(encoded)
        except ProtocolError as error:
            raise (failure or error) from None
        finally:
            self._declared = declared
        if self._typed_values == before and failure is not None:
            raise failure
        value = msgspec.convert(value, self._type, dec_hook=self._convert)
        if self._holds_any and (left := find_declared(value)) is not None:
            declared(left.declared_name, left)
        return value

    def _mark_declared(self, name: str, value: object) -> object:
        """Return a plain value that will be converted; marked, if it may be at a place without a type."""
        if self._holds_any is None:
            self._holds_any = has_any(self._type)
        return mark_declared(name, value) if self._holds_any else value

    def _lift_typed(self, content: memoryview) -> object:
        self._typed_values += 1
        decoded = self._untyped.decode(content)
        if not isinstance(decoded, list) or len(decoded) != 2 or type(decoded[0]) is not int:
            raise ProtocolError("payload: a value with a type is a code and a content")
        code, inner = decoded
        if code == SCALAR:
            scalar = restore_scalar(inner)
            return scalar if self._keeps_scalars else scalar.item()
        return self._declared(*restore_declared(inner)) if code == DECLARED else restore(code, inner)

    def _lift(self, code: int, content: memoryview) -> object:
        if code == _ARRAY_EXTENSION:
            return view_array(content, self._payload, _align(_HEADER.size + _envelope_length(self._payload)))
        if code == _TYPED_EXTENSION:
            return self._lift_typed(content)
        if self._extension is None or code < FIRST_EXTENSION:
            raise ProtocolError(f"payload: extension type {code} is not known here")
        return self._extension.decode(code, content)

    def _convert(self, wanted: Any, value: object) -> object:
        kind = get_origin(wanted) or wanted
        if isinstance(kind, type):
            if issubclass(kind, np.ndarray):
                return check_array(wanted, value)
            is_sized = issubclass(kind, np.flexible)  # a number would set how much memory to allocate
            if issubclass(kind, np.generic) and not is_sized and isinstance(value, bool | int | float):
                return _convert_number(kind, value)
        if self._extension is not None:
            return self._extension.convert(wanted, value)
        if isinstance(kind, type) and isinstance(value, kind):
            return value
        raise TypeError(f"Expected `{type_name(wanted)}`, got `{type_name(type(value))}`")


def encode_payload(value: object, *, what: str, declares: bool = True) -> memoryview:
    """Return ``value`` as the bytes of one message; see ``PayloadEncoder`` for ``declares``.

    It may hold plain data, dataclasses, ``msgspec.Struct`` and numpy arrays (any layout; they arrive in C order),
    nested as you like.  Tuples, sets, dates, ``Decimal``, ``UUID``, numpy scalars and the like keep their types.

    Raises ``UsageError`` naming ``what`` and the type that cannot be sent.
    """
    return prepare_payload(value, what=what, declares=declares).write()


def prepare_payload(value: object, *, what: str, declares: bool = True) -> UnwrittenPayload:
    """Return ``value`` like ``encode_payload``, but copy no arrays yet."""
    encoder = PayloadEncoder(declares=declares)
    return encoder.prepare(encoder.part(value, what=what), what=what)


@overload
def decode_payload(buffer: Buffer, *, what: str = "payload") -> Any: ...
@overload
def decode_payload(buffer: Buffer, type: type[T], *, what: str = "payload") -> T: ...
@overload
def decode_payload(buffer: Buffer, type: Any, *, what: str = "payload") -> Any: ...
def decode_payload(buffer: Buffer, type: Any = Any, *, what: str = "payload") -> Any:  # noqa: A002
    """Return the value that ``encode_payload`` put into ``buffer``; see ``PayloadDecoder`` for its form.

    Raises ``UsageError`` naming ``what`` if it is not of ``type``, and ``ProtocolError`` for hostile bytes.
    """
    return PayloadDecoder[Any](type).decode(buffer, what=what)


def _typed_content(encoded: memoryview | msgspec.Raw) -> memoryview | None:
    """Return the content of a value that is itself, not only in parts, of a type that msgpack does not have."""
    content = memoryview(encoded)
    at = _EXTENSION_CODE_AT.get(content[0]) if content else None
    if at is None or at >= len(content) or content[at] != _TYPED_EXTENSION:
        return None
    return content[at + 1 :]


def _refuse_declared(name: str, _value: object) -> NoReturn:
    raise UsageError(
        f"a value of type {name} cannot be received where no type is declared, it would become plain data; "
        "declare the type, or send plain data"
    )


def _as_plain(_name: str, value: object) -> object:
    return value


def _convert_number(kind: Any, value: float) -> object:
    """Return a number as the scalar ``kind``; one that is too large for a float becomes infinite."""
    try:
        with np.errstate(over="ignore"):
            return kind(value)
    except (ValueError, OverflowError) as error:
        raise TypeError(f"Expected `{type_name(kind)}`, got {value}: {error}") from error


def _cannot_send(value: object, what: str, error: Exception) -> UsageError:
    return UsageError(f"{what}: a value of type {type_name(type(value))} cannot be sent: {_describe(error)}")


def _describe(error: Exception) -> str:
    """Return the text of ``error``, even if making it fails."""
    return "".join(traceback.format_exception_only(error)).strip()


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _envelope_length(payload: Buffer) -> int:
    if len(payload) < _HEADER.size:
        raise ProtocolError(f"payload: at least {_HEADER.size} bytes are needed, got {len(payload)}")
    version, length = _HEADER.unpack_from(payload)
    if version != PAYLOAD_VERSION:
        raise ProtocolError(f"payload version: this side speaks {PAYLOAD_VERSION}, the peer sent {version}")
    if length > len(payload) - _HEADER.size:
        raise ProtocolError(f"payload: an envelope of {length} bytes does not fit into {len(payload)} bytes")
    return int(length)
