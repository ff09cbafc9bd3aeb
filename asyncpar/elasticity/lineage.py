"""Lineage: the history of a state.  Two states of one step are the same training only if their lineages are equal.

The digest of a state is BLAKE2b over names, types and shapes, plain values, and the 64-bit XXH3 of every block of every
array.  XXH3 guards against chance, not against forgery: a sender of a state has proved that it belongs to the job, and
only accidental changes (another order of additions, a flipped bit) have to be detected, at memory speed: BLAKE2b of
everything would take thirty times as long, in every step.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from asyncpar.hosts.lineage import DIGEST_BYTES, Lineage

BLOCK_BYTES = 4 << 20
"""Bytes of an array that share a checksum; also the size of a newcomer's requests."""


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """Name, dtype and shape of one array of a state."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, name: str, array: NDArray[Any]) -> ArrayShape:
        return cls(name, str(array.dtype), array.shape, array.nbytes)

    @property
    def blocks(self) -> int:
        """The number of blocks of its content."""
        return -(-self.nbytes // BLOCK_BYTES)


def block_of(array: NDArray[Any], number: int) -> memoryview:
    """Return the memory of block ``number`` of a C-contiguous array."""
    content = array.reshape(-1).view(np.uint8).data
    return content[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]


def checksums(array: NDArray[Any]) -> tuple[int, ...]:
    """Return the checksums of the blocks of a C-contiguous array; may run in any thread, and lets others run."""
    return tuple(xxh3_64_intdigest(block_of(array, number)) for number in range(-(-array.nbytes // BLOCK_BYTES)))


def checksum(block: memoryview | bytes) -> int:
    """Return the checksum of one block."""
    return xxh3_64_intdigest(block)


def state_digest(arrays: Sequence[tuple[ArrayShape, Iterable[int]]], values: Mapping[str, bytes]) -> bytes:
    """Return the digest of a state of ``arrays``, with the checksums of their blocks, and ``values``."""
    hashing = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for shape, sums in arrays:
        hashing.update(f"{shape.name}\0{shape.dtype}\0{shape.shape}\0".encode())
        hashing.update(b"".join(number.to_bytes(8, "little") for number in sums))
    for name in sorted(values):
        hashing.update(f"{name}\0{len(values[name])}\0".encode())
        hashing.update(values[name])
    return hashing.digest()


def describe_frozen(gathered: Sequence[Sequence[str]]) -> str:
    """Return which parameters are frozen on which rank, to be appended to a message; "" if all ranks have the same."""
    if all(names == gathered[0] for names in gathered):
        return ""
    found = (f"rank {rank}: {', '.join(names) or 'none'}" for rank, names in enumerate(gathered))
    return f"; they differ in what is frozen (requires_grad): {', '.join(found)}"


def describe_divergence(lineages: Sequence[Lineage], hosts: Sequence[str]) -> str:
    """Name the ranks, on ``hosts``, whose lineage differs from the majority's; all ranks if there is no majority."""
    usual, count = Counter(lineages).most_common(1)[0]
    odd = [rank for rank, lineage in enumerate(lineages) if lineage != usual]
    shown = ", ".join(f"rank {rank}: step {each.step} {each.digest.hex()}" for rank, each in enumerate(lineages))
    if 2 * count <= len(lineages):
        return f"the ranks differ in state: {shown}"
    named = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in odd)
    verb = "has" if len(odd) == 1 else "have"
    return (
        f"{named} {verb} another state after step {usual.step - 1} than the others; the program or its libraries "
        f"differ, or it is not deterministic: {shown}"
    )
