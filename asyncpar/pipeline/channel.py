"""The messages of an alarm: one reception is always pending, and sends are not awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.standing import stand_for_object
from asyncpar.errors import AsyncparError, PeerError, PeerLost, PeerTimeout, StaleGeneration
from asyncpar.pipeline.errors import Mailing

PATIENCE: Final = 1.0
"""Seconds without news after which a wait also watches whether the missing ranks are alive."""

_TAG: Final = 0
_TAG_OF_WATCHES: Final = 1


class PipelineChannel:
    """Delivers mailings of any rank of ``group`` to ``on_mailing``, and errors of the reception to ``on_error``.

    One reception is pending from the first ``listen`` to ``close``, or to the end of the node: it is never cancelled in
    between, since a mailing that arrives at that moment would be lost.  The channel owns it, and the mailings in
    flight; these end by themselves, at the latest after the communicator's timeout.
    """

    def __init__(
        self, group: Communicator, *, on_mailing: Callable[[Mailing], None], on_error: Callable[[AsyncparError], None]
    ) -> None:
        self._group = group
        self._on_mailing = on_mailing
        self._on_error = on_error
        self._reception: asyncio.Task[Mailing] | None = None
        self._sendings: set[asyncio.Task[None]] = set()

    def listen(self) -> None:
        """Start a reception unless one is pending."""
        if self._group.size > 1 and self._reception is None:
            self._reception = asyncio.create_task(_receive(self._group), name="reception of an alarm")
            self._reception.add_done_callback(self._on_received)

    def post(self, mailing: Mailing, dests: Sequence[int], *, must_arrive: bool = False) -> None:
        """Start sending ``mailing`` to ``dests``; if it ``must_arrive``, failures are errors."""
        for dest in dests:
            sending = asyncio.create_task(self._send(mailing, dest, must_arrive), name=f"mailing to rank {dest}")
            self._sendings.add(sending)
            sending.add_done_callback(self._sendings.discard)

    async def wait(self, news: asyncio.Event, missing: Sequence[int]) -> None:
        """Wait for ``news`` of ranks ``missing``.

        Raises ``PeerLost`` if one of them is gone, and ``PeerTimeout`` if there is no news for too long.
        """
        try:
            async with asyncio.timeout(PATIENCE):
                await news.wait()
                return
        except TimeoutError:
            watches: list[asyncio.Task[Any]] = [
                asyncio.create_task(_receive_nothing(self._group, rank), name=f"watch over rank {rank}")
                for rank in missing
            ]
        waiting = asyncio.create_task(news.wait(), name="news of an alarm")
        try:
            done, _ = await asyncio.wait({waiting, *watches}, return_when=asyncio.FIRST_COMPLETED)
            for one in watches:
                if one in done:
                    one.result()
        finally:
            for task in (waiting, *watches):
                task.cancel()
            await asyncio.gather(waiting, *watches, return_exceptions=True)

    async def close(self, grace: float) -> None:
        """End the reception.  Mailings have ``grace`` seconds to leave.  Idempotent."""
        reception, self._reception = self._reception, None
        if reception is not None:
            reception.cancel()
        if self._sendings:
            await asyncio.wait(self._sendings, timeout=grace)
        for sending in self._sendings:
            sending.cancel()

    async def _send(self, mailing: Mailing, dest: int, must_arrive: bool) -> None:
        try:
            await self._group.send_object(mailing, dest, tag=_TAG)
        except (PeerError, StaleGeneration) as error:
            if must_arrive:
                self._on_error(error)
            # otherwise the rank is gone, which all ranks learn, or hangs and receives nothing from any rank

    def _on_received(self, reception: asyncio.Task[Mailing]) -> None:
        is_ours = self._reception is reception
        if is_ours:
            self._reception = None
        error = None if reception.cancelled() else reception.exception()
        if not is_ours or reception.cancelled():
            return
        if not isinstance(error, PeerLost) and not self._group.is_over:
            self.listen()
        if error is None:
            self._on_mailing(reception.result())
        elif not isinstance(error, PeerTimeout):
            self._on_error(error if isinstance(error, AsyncparError) else AsyncparError(repr(error)))


async def _receive(group: Communicator) -> Mailing:
    return await stand_for_object(group, tag=_TAG, wanted=Mailing)


async def _receive_nothing(group: Communicator, rank: int) -> None:
    """Raise ``PeerLost`` if ``rank`` is gone, and ``PeerTimeout`` if it is silent for too long."""
    await group.recv_object(rank, tag=_TAG_OF_WATCHES)
