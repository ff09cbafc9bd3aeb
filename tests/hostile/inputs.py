"""Hostile versions of valid bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator


def truncations(valid: bytes) -> Iterator[bytes]:
    """Yield every proper beginning of ``valid``, the empty one included."""
    for length in range(len(valid)):
        yield valid[:length]


def bit_flips(valid: bytes, *, first: int = 0, last: int | None = None) -> Iterator[bytes]:
    """Yield ``valid`` with each single bit of its bytes ``first`` up to ``last`` flipped."""
    changed = bytearray(valid)
    for place in range(first, len(valid) if last is None else last):
        for bit in range(8):
            changed[place] ^= 1 << bit
            yield bytes(changed)
            changed[place] ^= 1 << bit


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
