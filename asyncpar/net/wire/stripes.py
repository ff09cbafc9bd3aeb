"""How a large payload is cut into parts that travel over several connections at once."""

from __future__ import annotations

from typing import Final

from asyncpar.net.wire.header import FrameHeader, FrameKind

STRIPE_BYTES: Final = 128 * 1024
"""Least size of a part: less does not pay.  Part of the protocol, and more than a reader ever reads ahead."""


def parts_of(length: int, connections: int) -> int:
    """Return in how many parts a payload of ``length`` bytes travels, over as many of the first connections."""
    return max(1, min(connections, length // STRIPE_BYTES))


def stripe(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return where part ``index`` of ``parts`` begins and ends: nearly equal parts, in order, of all bytes."""
    return length * index // parts, length * (index + 1) // parts


def share_of(header: FrameHeader, connections: int, index: int) -> int:
    """Return how many bytes of the payload of ``header`` follow it on connection ``index``."""
    if header.kind is not FrameKind.STRIPED:
        return header.length
    start, stop = stripe(header.length, parts_of(header.length, connections), index)
    return stop - start
