"""Hostile versions of valid bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator


def truncations(valid: bytes) -> Iterator[bytes]:
    """Yield every proper beginning of ``valid``, the empty one included."""
    for length in range(len(valid)):
        yield valid[:length]


def bit_flips(valid: bytes, *, first: int = 0, last: int | None = None, each: int = 1) -> Iterator[bytes]:
    """Yield ``valid`` with each single bit of its bytes ``first`` up to ``last`` flipped, or with every so many-th.

    With an odd number that is less than 8, that is a bit of each byte, at all places in turn.
    """
    changed = bytearray(valid)
    for bit in range(8 * first, 8 * (len(valid) if last is None else last), each):
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)
        changed[bit // 8] ^= 1 << bit % 8


def mutated(valid: bytes, dice: random.Random) -> bytes:
    """Return ``valid`` with a few bytes changed, cut, doubled or followed by others."""
    changed = bytearray(valid)
    for _ in range(dice.randrange(1, 4)):
        changed[dice.randrange(len(changed))] = dice.getrandbits(8)
    match dice.getrandbits(2):
        case 0:
            del changed[dice.randrange(len(changed)) :]
        case 1:
            changed += dice.randbytes(dice.randrange(1, 60))
        case 2:
            changed += valid
    return bytes(changed)
