"""How a large payload is cut into parts that travel over several connections at once."""

from __future__ import annotations

from typing import Final

from asyncpar.wire.header import FrameHeader, FrameKind

STRIPE_BYTES: Final = 128 * 1024
"""Least size of a part: less does not pay.  Part of the protocol, and more than a reader ever reads ahead."""


def is_worth_striping(length: int, connections: int) -> bool:
    """Does a payload of ``length`` bytes travel in parts?"""
    return connections > 1 and length >= connections * STRIPE_BYTES


def stripe(length: int, connections: int, index: int) -> tuple[int, int]:
    """Return where part ``index`` of ``connections`` begins and ends: nearly equal parts, in order, of all bytes."""
    return length * index // connections, length * (index + 1) // connections


def part_length(header: FrameHeader, connections: int, index: int) -> int:
    """Return how many bytes of the payload of ``header`` follow it on connection ``index``."""
    if header.kind is not FrameKind.STRIPED:
        return header.length
    start, stop = stripe(header.length, connections, index)
    return stop - start
