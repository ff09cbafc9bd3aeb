"""Do all ranks synchronize the same gradients in the same way?"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError


def digest_of(lines: Sequence[str]) -> str:
    """Return a hash of ``lines``."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


async def check_agreement(communicator: Communicator, lines: Sequence[str], *, key: str) -> None:
    """Raise ``UsageError`` on every rank unless all ranks pass equal ``lines``.

    The message names the first rank that differs from rank 0, and the first line in which it does.  Exchanges one hash
    per rank; the lines themselves only when hashes differ.
    """
    digests = await communicator.all_gather_object(digest_of(lines), key=f"{key}/digest")
    if len(set(digests)) == 1:
        return
    everything: list[list[str]] = await communicator.all_gather_object(list(lines), key=f"{key}/lines")
    message = find_difference(everything)
    assert message is not None, "digests differ, so lines do"
    raise UsageError(message)


def find_difference(everything: Sequence[Sequence[str]]) -> str | None:
    """Describe how the first rank that differs from rank 0 differs; None if none does."""
    first = everything[0]
    for rank, lines in enumerate(everything):
        if list(lines) == list(first):
            continue
        for index in range(max(len(first), len(lines))):
            expected = first[index] if index < len(first) else "nothing more"
            got = lines[index] if index < len(lines) else "nothing more"
            if expected != got:
                return (
                    "parameters: expected the same names, shapes, dtypes, order and settings on all ranks, but where "
                    f"rank 0 has {expected}, rank {rank} has {got}"
                )
    return None
