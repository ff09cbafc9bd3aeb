"""Numbers and checksums of the frames of one direction of a channel.

What a channel between two ranks carries for each frame, little endian:

    header     40 bytes, see ``header``
    number     u32: how many frames went before on this channel, modulo 2**32
    checksum   u32: CRC-32 of header and number
    payload    as many bytes as the header says, or the part of them that this connection carries
    checksum   u32: CRC32C of that, only where payloads are checked and there are any bytes

The first checksum starts from a seed that the two ends derive from their handshake, another one for each connection and
direction; the second starts from the first.  So a frame is taken only in its place on its own connection, with its own
payload: what is damaged, lost, swapped, repeated, or recorded elsewhere is found, at the latest by the next frame.

Damage of b bits goes unnoticed with probability 2**-32, and never when b is at most 3 or all b lie within 32 bits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Final
from zlib import crc32

from asyncpar.errors import ProtocolError
from asyncpar.net.wire.frame import HEADER_BYTES, Payload, views_of

_U32 = struct.Struct("<I")
_SEAL = struct.Struct("<II")

SEAL_BYTES: Final = _SEAL.size
"""What number and checksum add to a header."""

TAIL_BYTES: Final = _U32.size
"""What the checksum of a payload adds to it."""

SEALED_BYTES: Final = HEADER_BYTES + SEAL_BYTES

_NUMBERED: Final = HEADER_BYTES + _U32.size
_LARGEST: Final = 0xFFFF_FFFF


class FrameDamaged(ProtocolError):  # noqa: N818
    """The bytes that arrived are not those that were sent."""


@cache
def payload_checksum() -> Callable[[memoryview, int], int]:
    """Return the function that continues a CRC32C with more bytes.  It has hardware speed and releases the GIL.

    Loaded when a payload is to be checked first, because that takes 50 ms and ranks of one host never need it.
    """
    from awscrt.checksums import crc32c

    function: Callable[[memoryview, int], int] = crc32c
    return function


class PayloadChecksum:
    """The checksum of one payload, which is taken piece by piece."""

    __slots__ = ("_continue", "_value", "covered")

    def __init__(self, start: int) -> None:
        self._continue = payload_checksum()
        self._value = start
        self.covered = 0
        """How many bytes of what is left of the payload are in the checksum already."""

    def cover(self, payload: Payload, end: int) -> None:
        """Continue with the bytes of ``payload`` up to ``end``, as far as they are not covered."""
        if end > self.covered:
            for view in views_of(payload[self.covered : end]):
                self._value = self._continue(view, self._value)
            self.covered = end

    def tail(self) -> bytes:
        """Return what follows the payload, all of which is covered."""
        return _U32.pack(self._value)


class FrameSealer:
    """Number and seal the frames that go out, in the order in which they go."""

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
        """Return ``head``, sealed with the number of the frame that was sealed as ``sealed`` and does not go out."""
        return self._seal(head, _U32.unpack_from(sealed, HEADER_BYTES)[0])

    def begin_payload(self, sealed: bytes, length: int) -> PayloadChecksum | None:
        """Return the checksum for the payload behind ``sealed``; None if it has none."""
        if not self._checks_payloads or length == 0:
            return None
        return PayloadChecksum(_U32.unpack_from(sealed, _NUMBERED)[0])

    def _seal(self, head: bytes, number: int) -> bytes:
        numbered = head + _U32.pack(number)
        return numbered + _U32.pack(crc32(numbered, self._seed))


class FrameVerifier:
    """Check the frames that come in.  Raises ``FrameDamaged``."""

    def __init__(self, seed: int = 0, *, checks_payloads: bool = False) -> None:
        self._seed = seed
        self._number = 0
        self._checks_payloads = checks_payloads
        self._expected = 0
        self._value = 0

    def check_header(self, data: memoryview, offset: int) -> None:
        """Check the header at ``offset`` of ``data``, which is the next frame's."""
        number, checksum = _SEAL.unpack_from(data, offset + HEADER_BYTES)
        if crc32(data[offset : offset + _NUMBERED], self._seed) != checksum:
            raise FrameDamaged(f"frame {self._number}: the checksum of its header is wrong")
        if number != self._number:
            raise FrameDamaged(f"frame {self._number} was expected, frame {number} came")
        self._value = checksum

    def next_frame(self) -> None:
        """Count a frame, whose header was taken."""
        self._number = (self._number + 1) & _LARGEST

    def tail_bytes(self, length: int) -> int:
        """Return how many bytes follow a payload of ``length`` bytes."""
        return TAIL_BYTES if self._checks_payloads and length else 0

    def add(self, view: memoryview) -> None:
        """Continue with bytes of the payload."""
        self._value = payload_checksum()(view, self._value)

    def check_payload(self, data: memoryview, offset: int) -> None:
        """Compare with the checksum at ``offset`` of ``data``."""
        if _U32.unpack_from(data, offset)[0] != self._value:
            raise FrameDamaged(f"frame {(self._number - 1) & _LARGEST}: the checksum of its payload is wrong")
