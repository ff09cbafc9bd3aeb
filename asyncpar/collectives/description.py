"""What an operation is, in words that travel, and in 32 bits that travel with every frame.  Pure."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence

import msgspec

KEYED = 1 << 63
"""Set in the sequence numbers of operations that are matched by name."""


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One operation as its caller wrote it: ``text`` like ``all_reduce(float32[8], sum)``, and the algorithm."""

    text: str
    algorithm: str
    fingerprint: int


def describe(operation: str, arguments: Sequence[str], algorithm: str) -> Description:
    """Return the description of a call; its fingerprint is never 0."""
    text = f"{operation}({', '.join(arguments)})"
    return Description(text, algorithm, zlib.crc32(f"{text}@{algorithm}".encode()) or 1)


def difference(rank: int, one: Description, other_rank: int, other: Description, *, where: str) -> str:
    """Return the message for two ranks that call different operations at the same place."""
    if rank > other_rank:
        rank, one, other_rank, other = other_rank, other, rank, one
    texts = [one.text, other.text]
    if texts[0] == texts[1]:
        texts = [f"{text} by {said.algorithm}" for text, said in zip(texts, (one, other), strict=True)]
    return f"rank {rank} calls {texts[0]} where rank {other_rank} calls {texts[1]} ({where})"


def hash64(*parts: object) -> int:
    """Return a 64-bit number, never 0, that depends on ``parts`` only: equal in all processes."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1
