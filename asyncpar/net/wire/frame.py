"""Frames on a lane: the binary header, payloads, their sinks, parts on several connections, checksums.

Layout of the header, little endian, 40 bytes:

    offset  size  field
    0       2     magic ``b"ap"``
    2       1     version (1)
    3       1     kind (``FrameKind``)
    4       4     generation of the world
    8       8     group
    16      8     sequence: which operation of the group
    24      4     tag: which message of the operation
    28      4     fingerprint of the operation (0: none)
    32      8     length of the payload in bytes

The payload follows immediately, from one place in memory or from several (``Segments``).  ``(group, sequence, tag)`` is
the *key* by which a frame meets the receive posted for it.

A channel between two ranks carries for each frame, little endian:

    header     40 bytes
    number     u32: how many frames went before on this channel, modulo 2**32
    checksum   u32: CRC-32 of header and number
    payload    as many bytes as the header says, or the part of them that this connection carries
    checksum   u64: XXH3 of that, only where payloads are checked and there are any bytes

The first checksum starts from a seed that the two ends derive from their handshake, a different one for each connection
and direction; the second has the first as its seed.  So a frame is accepted only in its place on its own connection,
with its own payload: a frame that is damaged, lost, swapped, repeated, or recorded elsewhere is detected, at the latest
by the next one.

Damage of a payload goes unnoticed with probability 2**-64, damage of a header with 2**-32, and never when at most 3
bits of it changed, or all within 32 bits.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol, runtime_checkable
from zlib import crc32

import numpy as np
from xxhash import xxh3_64

from asyncpar.errors import ProtocolError

MAGIC = b"ap"
VERSION = 1
_LAYOUT = struct.Struct("<2sBBIQQIIQ")
HEADER_BYTES = _LAYOUT.size

MESSAGE_GROUP = 0
"""The group number of actor messages, which need no posted receive."""


class FrameKind(enum.IntEnum):
    """Kinds of frames."""

    EAGER = 1
    """A small payload, sent before the receiver is known to be ready; spends eager credit."""
    BULK = 2
    """A payload that the receiver granted."""
    REQUEST = 3
    """The sender requests a grant; the payload is the u64 length it wants to send."""
    GRANT = 4
    """The receiver has memory posted for this key; the payload is the u64 length it expects."""
    CREDIT = 5
    """The receiver consumed eager payloads; the payload is the u64 number of bytes returned."""
    ABORT = 6
    """An operation ended in failure at the sender of this frame; the payload says why."""
    PROBE = 7
    """The sender has waited for long and asks for the receiver's status; the payload describes its operation."""
    STATUS = 8
    """The answer to a probe."""
    NOTICE = 9
    """A rank is lost (sequence holds its number); forwarded once by every rank."""
    GOODBYE = 10
    """The sender leaves in good order and sends nothing more."""
    STRIPED = 11
    """A granted payload in parts, one on each connection of the link.

    The header, with the length of the whole, goes over each of them, before its part (see ``parts_of``).
    """
    CHUNK = 12
    """The next bytes of a granted message are in the sender's shared memory; the payload is the u64 offset."""
    FREED = 13
    """The receiver has read the chunk at that offset; the payload is the u64 offset."""
    VOID = 14
    """Replaces a frame that was withdrawn before it began; it has that frame's number (see ``FrameSealer``)."""
    POSITION = 15
    """Number of bytes received over the connection (in ``sequence``); see ``transport.positions``."""

    REVOKE = 16
    """The group is revoked; the payload says by whom and why.  Forwarded once by every rank."""
    AGREE = 17
    """A message of an agreement among the survivors of the group; the sequence is the number of the agreement."""
    CONTRIBUTORS = 18
    """A message of the choice of ranks that contribute to an operation.

    The group is the number of a series of such operations, the sequence that of the operation in it.
    """


class Key(NamedTuple):
    """The key by which a frame meets a posted receive."""

    group: int
    sequence: int
    tag: int


class FrameHeader(NamedTuple):
    """One decoded header.  All fields are unsigned."""

    kind: FrameKind
    generation: int
    group: int
    sequence: int
    tag: int
    fingerprint: int
    length: int

    @property
    def key(self) -> Key:
        return Key(self.group, self.sequence, self.tag)


VOID = FrameHeader(FrameKind.VOID, 0, 0, 0, 0, 0, 0)
POSITION = FrameHeader(FrameKind.POSITION, 0, 0, 0, 0, 0, 0)


def encode_header(header: FrameHeader) -> bytes:
    """Return the 40 bytes of ``header``."""
    kind, generation, group, sequence, tag, fingerprint, length = header
    return _LAYOUT.pack(MAGIC, VERSION, kind, generation, group, sequence, tag, fingerprint, length)


_KINDS = {int(kind): kind for kind in FrameKind}


def decode_header(data: bytes | bytearray | memoryview, *, max_length: int, offset: int = 0) -> FrameHeader:
    """Return the header in the 40 bytes of ``data`` from ``offset`` on.

    Raises ``ProtocolError`` for a wrong magic, version or kind, and for a length above ``max_length``.
    """
    magic, version, kind, generation, group, sequence, tag, fingerprint, length = _LAYOUT.unpack_from(data, offset)
    if magic != MAGIC:
        raise ProtocolError(f"frame magic: expected {MAGIC!r}, got {magic!r}")
    if version != VERSION:
        raise ProtocolError(f"frame version: this side speaks {VERSION}, the peer sent {version}")
    known = _KINDS.get(kind)
    if known is None:
        raise ProtocolError(f"frame kind: expected one of {sorted(_KINDS)}, got {kind}")
    if length > max_length:
        raise ProtocolError(f"frame length: at most {max_length} bytes are allowed, the peer declared {length}")
    return tuple.__new__(FrameHeader, (known, generation, group, sequence, tag, fingerprint, length))  # half the time


class Segments:
    """Views on bytes (contiguous, format ``B``), read one after the other as if they were one.

    Behaves like a memoryview where lanes need it: length, slices, ``bytes``.  Only ``bytes`` and ``copy_into`` copy.
    """

    __slots__ = ("_length", "views")

    def __init__(self, views: Iterable[memoryview]) -> None:
        self.views = tuple(view for view in views if len(view))
        self._length = sum(map(len, self.views))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: slice) -> Segments:
        start, stop, step = place.indices(self._length)
        assert step == 1, "segments are cut, not picked apart"
        views: list[memoryview] = []
        for view in self.views:
            if stop <= 0:
                break
            if start < len(view):
                views.append(view[max(start, 0) : stop])
            start -= len(view)
            stop -= len(view)
        return Segments(views)

    def __bytes__(self) -> bytes:
        return b"".join(self.views)

    def copy_into(self, memory: memoryview) -> None:
        """Write all bytes into ``memory``, which has the same length."""
        place = 0
        for view in self.views:
            memory[place : place + len(view)] = view
            place += len(view)


Payload = memoryview | Segments
"""The content of a frame: bytes in one place, or in several."""


def views_of(payload: Payload) -> tuple[memoryview, ...]:
    """Return the contiguous pieces of ``payload``, in order."""
    return (payload,) if isinstance(payload, memoryview) else payload.views


def write_payload(payload: Payload, memory: memoryview) -> None:
    """Copy ``payload`` into ``memory``, which has the same length."""
    if isinstance(payload, memoryview):
        memory[:] = payload
    else:
        payload.copy_into(memory)


class FrameSink(Protocol):
    """Lends memory for payloads and is notified when they have arrived.  Never awaits, never blocks."""

    def lend(self, header: FrameHeader) -> memoryview | None:
        """Return exactly ``header.length`` writable bytes for the payload, or None to drop it.

        Called once per frame, before its payload.  Raises ``ProtocolError`` to end the connection.
        """
        ...

    def landed(self, header: FrameHeader) -> None:
        """Complete the payload of the frame for which memory was last lent.  Not called for dropped payloads."""
        ...


@runtime_checkable
class WholeSink(Protocol):
    """A sink that can also take small frames whole, which is faster."""

    def accept(self, header: FrameHeader, payload: memoryview) -> bool:
        """Accept a frame and copy its payload, which is valid during the call; return False to get it by ``lend``."""
        ...


STRIPE_BYTES: Final = 128 * 1024
"""Least size of a part: smaller ones do not pay.  Part of the protocol, and more than a reader ever reads ahead."""


def parts_of(length: int, connections: int) -> int:
    """Return the number of parts of a payload of ``length`` bytes, sent over that many of the first connections."""
    return max(1, min(connections, length // STRIPE_BYTES))


def stripe(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return start and end of part ``index`` of ``parts``: nearly equal parts, in order, of all bytes."""
    return length * index // parts, length * (index + 1) // parts


def share_of(header: FrameHeader, connections: int, index: int) -> int:
    """Return the number of payload bytes that follow ``header`` on connection ``index``."""
    if header.kind is not FrameKind.STRIPED:
        return header.length
    start, stop = stripe(header.length, parts_of(header.length, connections), index)
    return stop - start


_LARGE: Final = 64 * 1024


def allocate(length: int) -> memoryview:
    """Return new writable memory for ``length`` bytes; its content is undefined.

    Large memory comes from numpy, which asks the system for large pages and does not zero it: a bytearray of 64 MiB
    costs 37 ms, this one 1.5 ms.
    """
    return memoryview(bytearray(length)) if length < _LARGE else np.empty(length, np.uint8).data


_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SEAL = struct.Struct("<II")

SEAL_BYTES: Final = _SEAL.size
"""Bytes that number and checksum add to a header."""

TAIL_BYTES: Final = _U64.size
"""Bytes that the checksum of a payload adds to it."""

SEALED_BYTES: Final = HEADER_BYTES + SEAL_BYTES

_NUMBERED: Final = HEADER_BYTES + _U32.size
_LARGEST: Final = 0xFFFF_FFFF


class FrameDamaged(ProtocolError):  # noqa: N818
    """The bytes that arrived differ from those that were sent."""


class PayloadChecksum:
    """The checksum of one payload, computed piece by piece, at the speed of memory and without the GIL."""

    __slots__ = ("_hash", "covered")

    def __init__(self, seed: int) -> None:
        self._hash = xxh3_64(seed=seed)
        self.covered = 0
        """Number of bytes of the rest of the payload that are already in the checksum."""

    def cover(self, payload: Payload, end: int) -> None:
        """Add the bytes of ``payload`` up to ``end``, as far as they are not covered."""
        if end > self.covered:
            for view in views_of(payload[self.covered : end]):
                self._hash.update(view)
            self.covered = end

    def tail(self) -> bytes:
        """Return the bytes that follow the payload, all of which is covered."""
        return _U64.pack(self._hash.intdigest())


class FrameSealer:
    """Numbers and seals outgoing frames, in the order in which they are sent."""

    def __init__(self, seed: int = 0, *, checks_payloads: bool = False) -> None:
        self._seed = seed
        self._number = 0
        self._checks_payloads = checks_payloads

    def seal(self, head: bytes) -> bytes:
        """Return the encoded header ``head`` of the next frame with its number and checksum."""
        number = self._number
        self._number = (number + 1) & _LARGEST
        return self._seal(head, number)

    def seal_instead(self, sealed: memoryview, head: bytes) -> bytes:
        """Return ``head``, sealed with the number of the frame that was sealed as ``sealed`` and is not sent."""
        return self._seal(head, _U32.unpack_from(sealed, HEADER_BYTES)[0])

    def begin_payload(self, sealed: bytes, length: int) -> PayloadChecksum | None:
        """Return the checksum object for the payload behind ``sealed``; None if it has none."""
        if not self._checks_payloads or length == 0:
            return None
        return PayloadChecksum(_U32.unpack_from(sealed, _NUMBERED)[0])

    def _seal(self, head: bytes, number: int) -> bytes:
        numbered = head + _U32.pack(number)
        return numbered + _U32.pack(crc32(numbered, self._seed))


class FrameVerifier:
    """Checks incoming frames.  Raises ``FrameDamaged``."""

    def __init__(self, seed: int = 0, *, checks_payloads: bool = False) -> None:
        self._seed = seed
        self._number = 0
        self._checks_payloads = checks_payloads
        self._hash = xxh3_64()

    def check_header(self, data: memoryview, offset: int) -> None:
        """Check the header at ``offset`` of ``data``, which is the next frame's."""
        number, checksum = _SEAL.unpack_from(data, offset + HEADER_BYTES)
        if crc32(data[offset : offset + _NUMBERED], self._seed) != checksum:
            raise FrameDamaged(f"frame {self._number}: the checksum of its header is wrong")
        if number != self._number:
            raise FrameDamaged(f"frame {self._number} was expected, frame {number} came")
        self.begin_payload(checksum)

    def begin_payload(self, seed: int) -> None:
        """Start the checksum of the payload behind the header with the checksum ``seed``."""
        if self._checks_payloads:
            self._hash = xxh3_64(seed=seed)

    def next_frame(self) -> None:
        """Count a frame whose header was accepted."""
        self._number = (self._number + 1) & _LARGEST

    def tail_bytes(self, length: int) -> int:
        """Return the number of bytes that follow a payload of ``length`` bytes."""
        return TAIL_BYTES if self._checks_payloads and length else 0

    def add(self, view: memoryview) -> None:
        """Add bytes of the payload to the checksum."""
        self._hash.update(view)

    def check_payload(self, data: memoryview, offset: int) -> None:
        """Compare with the checksum at ``offset`` of ``data``."""
        if _U64.unpack_from(data, offset)[0] != self._hash.intdigest():
            raise FrameDamaged(f"frame {(self._number - 1) & _LARGEST}: the checksum of its payload is wrong")
