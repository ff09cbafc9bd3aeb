"""The fixed binary header in front of every frame on a lane.

Layout, little endian, 40 bytes:

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

The payload follows at once.  ``(group, sequence, tag)`` is the *key* by which a frame meets the receive posted for it.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from asyncpar.errors import ProtocolError

MAGIC = b"ap"
VERSION = 1
_LAYOUT = struct.Struct("<2sBBIQQIIQ")
HEADER_BYTES = _LAYOUT.size

MESSAGE_GROUP = 0
"""The group number of actor messages, which need no posted receive."""


class FrameKind(enum.IntEnum):
    """What a frame is."""

    EAGER = 1
    """A small payload, sent before the receiver is known to be ready; spends eager credit."""
    BULK = 2
    """A payload that the receiver granted."""
    REQUEST = 3
    """The sender asks for a grant; the payload is the u64 length it wants to send."""
    GRANT = 4
    """The receiver has memory posted for this key; the payload is the u64 length it expects."""
    CREDIT = 5
    """The receiver consumed eager payloads; the payload is the u64 number of bytes returned."""
    ABORT = 6
    """An operation ended in failure at the sender of this frame; the payload says why."""
    PROBE = 7
    """Somebody has waited for long: where are you?  The payload describes the asker's operation."""
    STATUS = 8
    """The answer to a probe."""
    NOTICE = 9
    """A rank is lost (sequence holds its number); passed on once by everyone."""
    GOODBYE = 10
    """The sender leaves in good order and sends nothing more."""
    STRIPED = 11
    """A granted payload in parts, one on each connection of the link: the header, with the length of the whole, goes
    over each of them, before its part (see ``stripes``)."""
    CHUNK = 12
    """The next bytes of a granted message are in the sender's shared memory; the payload is the u64 offset."""
    FREED = 13
    """The receiver has read the chunk at that offset; the payload is the u64 offset."""
    VOID = 14
    """In place of a frame that was taken back before it began; it has that frame's number (see ``integrity``)."""
    POSITION = 15
    """How many bytes have come over the connection (in ``sequence``); see ``transport.positions``."""


class Key(NamedTuple):
    """What a frame and a posted receive must have in common."""

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
