"""Sizes in bytes, as people write them.  Pure."""

from __future__ import annotations

import re

from asyncpar.errors import UsageError

_SIZE = re.compile(r"(\d+)(B|[KMG](?:I?B)?)?", re.ASCII | re.IGNORECASE)
_UNITS = {"": 1, "B": 1}
_POWERS = {"K": 1, "M": 2, "G": 3}
LARGEST = 1 << 50


def parse_size(name: str, text: str) -> int:
    """Return the bytes of ``4``, ``64K``, ``25MB`` or ``1GiB``, the value of the option ``name``.

    K, M and G alone are powers of 1024, as in nccl-tests, and so are KiB, MiB and GiB; KB, MB and GB are of 1000.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{name}: expected a size such as 4, 64K or 25MB, got {text!r}")
    unit = (match[2] or "").upper()
    factor = _UNITS[unit] if unit in _UNITS else _factor(unit)
    count = int(match[1]) * factor if len(match[1]) <= 20 else LARGEST + 1
    if not 1 <= count <= LARGEST:
        raise UsageError(f"{name}: expected a size of 1 byte to 1024 TiB, got {text!r}")
    return count


def _factor(unit: str) -> int:
    base = 1000 if unit.endswith("B") and "I" not in unit else 1024
    return int(base ** _POWERS[unit[0]])


def sizes_between(smallest: int, largest: int, factor: int) -> tuple[int, ...]:
    """Return ``smallest`` and its products with powers of ``factor``, up to ``largest``."""
    sizes = []
    size = smallest
    while size <= largest:
        sizes.append(size)
        size *= factor
    return tuple(sizes)


def short_size(count: int) -> str:
    """Return a few characters for people: ``4``, ``64K``, ``25MB``, ``3000000``."""
    for unit in ("G", "M", "K", "GB", "MB", "KB"):
        size, rest = divmod(count, _factor(unit))
        if size and not rest:
            return f"{size}{unit}"
    return str(count)
