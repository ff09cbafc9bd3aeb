"""Taking the legs of a scheme: work in threads that take turns, collectives on the loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from asyncpar.collectives.offload import INLINE_BYTES, off_loop
from asyncpar.gradsync.schemes import Leg, Scheme


class ThreadTurns:
    """Who may use a thread: ``sending`` work comes before a bucket's first message, ``receiving`` work after it.

    Of each kind a few run at a time, in the order in which they asked.  Buckets that are ready together would otherwise
    all be encoded together, and the wire would be idle until the first of them is done, which is almost when the last
    one is.
    """

    def __init__(self, *, threads: int) -> None:
        self.sending = asyncio.Semaphore(threads)
        self.receiving = asyncio.Semaphore(threads)


@dataclass(slots=True, kw_only=True)
class WalkTimes:
    """Seconds of one walk: of work before the first message and after it, without the wait for a thread, and of
    collectives."""

    sending: float = 0.0
    receiving: float = 0.0
    exchanging: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One way of ``scheme`` through legs.  No collective begins before ``agreed`` is set."""

    scheme: Scheme
    turns: ThreadTurns
    agreed: asyncio.Event
    times: WalkTimes = field(default_factory=WalkTimes)

    async def take(
        self, legs: Sequence[Leg], *, before: Callable[[], None], after: Callable[[], None] | None = None
    ) -> None:
        """Take ``legs`` and settle the scheme behind the last.

        ``before`` is done in one go with the work of the first, ``after`` with the settling.
        """
        works: list[Callable[[], None]] = [before]
        is_first = True
        for leg in legs:
            works += [] if leg.work is None else [leg.work]
            await self.work(works, is_first=is_first)
            await self.agreed.wait()
            begun = time.perf_counter()
            await leg.exchange.run()
            self.times.exchanging += time.perf_counter() - begun
            works, is_first = [], False
        await self.work([*works, self.scheme.settle, *([] if after is None else [after])], is_first=is_first)

    async def work(self, works: Sequence[Callable[[], None]], *, is_first: bool) -> None:
        """Do ``works``, in a thread when its turn has come, if they would hold up the loop."""
        nbytes = self.scheme.flat.nbytes
        if not works:
            return
        work = partial(self._do, works, is_first=is_first)
        if nbytes <= INLINE_BYTES:
            work()
            return
        async with self.turns.sending if is_first else self.turns.receiving:
            await off_loop(work, nbytes=nbytes)

    def _do(self, works: Sequence[Callable[[], None]], *, is_first: bool) -> None:
        begun = time.perf_counter()
        for work in works:
            work()
        seconds = time.perf_counter() - begun
        if is_first:
            self.times.sending += seconds
        else:
            self.times.receiving += seconds
