"""A barrier that names who does not come."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.keys import LARGEST_TAG
from asyncpar.errors import AsyncparError, PeerTimeout
from asyncpar.torch.errors import as_torch

if TYPE_CHECKING:
    from asyncpar.torch.group_base import GroupBase

_TAG = LARGEST_TAG
_ANSWER_SECONDS = 2.0
"""How much longer than rank 0 the others wait, so that its answer, which names the missing, arrives."""


def monitored_barrier(group: GroupBase, timeout: timedelta | None, *, wait_all_ranks: bool) -> None:
    """Block until all ranks of ``group`` have called this; else raise ``PeerTimeout`` naming the missing ones.

    Rank 0 hears from everybody, then answers everybody.  Words carry the number of the barrier, so that those of a rank
    which was late to an earlier one are not taken for its coming to this one.
    """
    communicator = group.communicator
    seconds = timeout.total_seconds() if timeout is not None else group.seconds

    def make() -> Coroutine[Any, Any, None]:
        group.barriers += 1
        if communicator.rank == 0:
            return _collect(communicator, group.barriers, seconds, wait_all_ranks=wait_all_ranks)
        return _report(communicator, group.barriers, seconds)

    try:
        group.call(make, "monitored_barrier")
    except AsyncparError as error:
        raise as_torch(error) from None


async def _collect(communicator: Communicator, number: int, seconds: float, *, wait_all_ranks: bool) -> None:
    """Be rank 0."""
    waiting = {rank: asyncio.ensure_future(_hear(communicator, rank, number)) for rank in range(1, communicator.size)}
    when = asyncio.ALL_COMPLETED if wait_all_ranks else asyncio.FIRST_EXCEPTION
    try:
        if waiting:
            await asyncio.wait(waiting.values(), timeout=seconds, return_when=when)
        missing = [rank for rank, heard in waiting.items() if not heard.done()]
        failed = [rank for rank, heard in waiting.items() if heard.done() and heard.exception() is not None]
        errors = [waiting[rank].exception() for rank in failed]
    finally:
        for heard in waiting.values():
            heard.cancel()
    absent = sorted(missing + failed)
    if not wait_all_ranks:
        absent = absent[:1]
    present = [rank for rank in waiting if rank not in missing and rank not in failed]
    await _answer(communicator, present, [number, *absent])
    for error in errors:
        if error is not None:
            raise error
    if absent:
        raise PeerTimeout(_told(absent, seconds), rank=communicator.ranks[absent[0]], operation="monitored_barrier")


async def _hear(communicator: Communicator, rank: int, number: int) -> list[int]:
    """Return what ``rank`` says in barrier ``number`` beside that, and forget what it said in earlier ones."""
    while True:
        said, *words = (await communicator.recv(rank, tag=_TAG)).tolist()
        if said == number:
            return words


async def _answer(communicator: Communicator, ranks: Sequence[int], numbers: Sequence[int]) -> None:
    words = np.array(numbers, np.int64)
    await asyncio.gather(*(communicator.send(words, rank, tag=_TAG) for rank in ranks), return_exceptions=True)


async def _report(communicator: Communicator, number: int, seconds: float) -> None:
    """Be another rank."""
    try:
        async with asyncio.timeout(seconds + _ANSWER_SECONDS):
            await communicator.send(np.array([number], np.int64), 0, tag=_TAG)
            absent = await _hear(communicator, 0, number)
    except TimeoutError as error:
        if isinstance(error, PeerTimeout):
            raise
        message = f"monitored_barrier: rank 0 has not come, or not answered, within {seconds} s"
        raise PeerTimeout(message, rank=communicator.ranks[0], operation="monitored_barrier") from None
    if absent:
        raise PeerTimeout(_told(absent, seconds), operation="monitored_barrier")


def _told(absent: Sequence[int], seconds: float) -> str:
    """Name those who are ``absent``, in words that programs look for in the messages of torch's other backends."""
    ranks = f"{'Rank' if len(absent) == 1 else 'Ranks'} {', '.join(map(str, absent))}"
    return f"Rank 0 timed out in monitoredBarrier after {seconds} s: {ranks} failed to pass monitoredBarrier in time"
