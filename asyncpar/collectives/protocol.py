"""Contents of frames about operations: descriptions, control messages, and envelopes of messages.  Pure.

A description travels as text, and as a 32-bit fingerprint in every frame.  Control frames are msgpack of checked
structs.  An envelope precedes every message between two ranks: dtype and shape, in a fixed number of bytes.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar

import ml_dtypes
import msgspec
import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.core.observe.waits import WaitEdge
from asyncpar.errors import ProtocolError, UsageError


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An operation as its caller wrote it: ``text`` like ``all_reduce(float32[8], sum)``, and the algorithm."""

    text: str
    algorithm: str
    fingerprint: int


def describe(operation: str, arguments: Sequence[str], algorithm: str) -> Description:
    """Return the description of a call; its fingerprint is never 0."""
    text = f"{operation}({', '.join(arguments)})"
    return Description(text, algorithm, _fingerprint(text, algorithm))


def add_detail(description: Description, detail: str) -> Description:
    """Return ``description`` with one more argument in its text, and a fingerprint to match."""
    start = description.text.removesuffix(")")
    text = f"{start}{'' if start.endswith('(') else ', '}{detail})"
    return Description(text, description.algorithm, _fingerprint(text, description.algorithm))


def _fingerprint(text: str, algorithm: str) -> int:
    return zlib.crc32(f"{text}@{algorithm}".encode()) or 1


def difference(rank: int, one: Description, other_rank: int, other: Description, *, where: str) -> str:
    """Return the error message for two ranks that call different operations at the same place."""
    if rank > other_rank:
        rank, one, other_rank, other = other_rank, other, rank, one
    texts = [one.text, other.text]
    if texts[0] == texts[1]:
        texts = [f"{text} by {called.algorithm}" for text, called in zip(texts, (one, other), strict=True)]
    return f"rank {rank} calls {texts[0]} where rank {other_rank} calls {texts[1]} ({where})"


_TEXT_LIMIT = 4096
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=_TEXT_LIMIT)]

MOST_WAITS: Final = 64
"""Maximum number of waits of other ranks in an answer."""

Reason = Literal["cancelled", "failed", "refused", "mismatch", "lost", "timeout"]


class Abort(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Report that an operation failed at the sender.

    ``text`` is the reason.  A mismatch that the sender has detected comes with its own ``operation``, and the receiver
    answers with its own (``is_answer``, which is not answered again); third ranks get the whole ``text`` and no
    operation.  ``rank`` is the lost rank, or the one that the sender has waited for without success.
    """

    reason: Reason
    text: _Text = ""
    operation: Description | None = None
    is_answer: bool = False
    rank: int | None = None


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ask the receiver where it is: the sender waits for it in ``operation``."""

    operation: Description


class Status(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to a probe: ``text`` is the sender's place, like ``in all_reduce #811``.

    ``culprit`` is the rank that the sender holds responsible, which has not answered for ``silent_for`` seconds (None:
    it does answer, and ``where`` describes its program).  ``waits`` are the waits that the sender has or knows of.  It
    is sent again when the sender learns of another culprit, or of other waits.
    """

    text: _Text
    culprit: int | None = None
    silent_for: float | None = None
    where: _Text = ""
    waits: Annotated[tuple[WaitEdge, ...], msgspec.Meta(max_length=MOST_WAITS)] = ()


Message = TypeVar("Message", Abort, Probe, Status)

_encode = msgspec.msgpack.Encoder().encode


def encode_control(message: Abort | Probe | Status) -> bytes:
    """Encode ``message`` as the payload of a control frame."""
    return _encode(message)


def decode_control(payload: bytes, kind: type[Message]) -> Message:
    """Decode the message of a control frame.  Raises ``ProtocolError`` for anything else."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise ProtocolError(f"{kind.__name__} frame: {error}") from error


def shortened(text: str) -> str:
    """Cut ``text`` to the size that fits a control frame."""
    return text if len(text) <= _TEXT_LIMIT else text[: _TEXT_LIMIT - 3] + "..."


MAX_DIMENSIONS: Final = 16
_MAX_BYTES: Final = 1 << 62
_LAYOUT = struct.Struct(f"<BBB5xQ{MAX_DIMENSIONS}Q")
ENVELOPE_BYTES: Final = _LAYOUT.size

_NAMES = ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
_DTYPES: tuple[np.dtype[Any], ...] = (
    *(np.dtype(name) for name in _NAMES),
    np.dtype(ml_dtypes.bfloat16),
)


ANSWER_BYTES: Final = 8 * 50
"""Bytes of the answer to the sender of an array that is on a device."""

DECLINED: Final = b"\xff" * ANSWER_BYTES
"""The answer that asks for the array through host memory."""


class Envelope(NamedTuple):
    """Header of an array of ``shape`` and ``dtype``; ``is_object`` means that it is the bytes of an encoded object.

    ``is_on_device`` means that the sender has it on a CUDA device, and waits for the way to send it.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_object: bool
    is_on_device: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return "an object" if self.is_object else f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


_ARRAY, _OBJECT, _DEVICE_ARRAY = range(3)


def encode_envelope(array: Array, *, is_object: bool, is_on_device: bool = False) -> bytes:
    """Encode the envelope of ``array``.  Raises ``UsageError`` for arrays that cannot be sent."""
    if array.dtype not in _DTYPES:
        raise UsageError(f"x: expected one of {', '.join(dtype.name for dtype in _DTYPES)}, got {array.dtype.name}")
    if array.ndim > MAX_DIMENSIONS:
        raise UsageError(f"x: expected at most {MAX_DIMENSIONS} dimensions, got {array.ndim}; reshape it")
    dims = (*array.shape, *(0 for _ in range(MAX_DIMENSIONS - array.ndim)))
    kind = _OBJECT if is_object else _DEVICE_ARRAY if is_on_device else _ARRAY
    return _LAYOUT.pack(_DTYPES.index(array.dtype), array.ndim, kind, array.nbytes, *dims)


def decode_envelope(content: bytes | bytearray) -> Envelope:
    """Decode an envelope from ``encode_envelope``.  Raises ``ProtocolError`` for anything else."""
    code, ndim, kind, nbytes, *dims = _LAYOUT.unpack(content)
    if code >= len(_DTYPES) or ndim > MAX_DIMENSIONS or kind > _DEVICE_ARRAY:
        raise ProtocolError(f"message envelope: dtype {code}, {ndim} dimensions and kind {kind} are not known here")
    envelope = Envelope(_DTYPES[code], tuple(dims[:ndim]), kind == _OBJECT, kind == _DEVICE_ARRAY)
    if any(dims[ndim:]) or math.prod(max(1, dim) for dim in envelope.shape) > _MAX_BYTES // envelope.dtype.itemsize:
        raise ProtocolError(f"message envelope: dimensions {dims[:ndim]} and then {dims[ndim:]} cannot be meant")
    if envelope.nbytes != nbytes:
        raise ProtocolError(f"message envelope: {envelope} has {envelope.nbytes} bytes, but {nbytes} are declared")
    return envelope
