"""Ranks that run a block together fail in it together.

Theory of operation.  Every block has a number, the same on all ranks, because all enter their blocks in one order.  A
rank that fails in a block sends a *notice* with that number to every other rank, and goes on failing: it waits for
nobody.  Each rank has one reception from any rank pending, which stays pending between blocks, so that no notice can
get lost between two receptions.  A notice of the block that runs cancels it, as ``asyncio.timeout`` would; a later one
is kept until that block begins (a rank may be ahead); an earlier one is dropped.

A rank leaves a block in good order only when all have come to its end: each *calls* a barrier at the beginning, which
allots its place in the order of operations, and awaits it at the end.  Who fails gives the call up, so that nobody
waits for him there either.  So no rank goes on while another can still fail; the one exception is a rank that is
cancelled, or dies, while it waits in that barrier.

Failing has echoes: a rank that is cancelled by a notice cancels its operations, and their peers see ``PeerCancelled``
perhaps before the notice that explains it.  Such a failure is called an *echo*; who sees one waits a moment for the
origin, and reports that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import AsyncparError, PeerCancelled, PeerError, PeerLost, PeerTimeout, ProtocolError, UsageError
from asyncpar.pipeline.notice import Notice, NoticeKind, StepFailed, error_of

__all__ = ["GRACE", "StepAlarm", "StepFailed"]

GRACE: Final = 2.0
"""Seconds that a rank which sees only the echo of a failure waits for its origin."""

_LONGEST_TEXT = 4000


class _Block:
    """One block that runs on this rank."""

    def __init__(self, number: int, task: asyncio.Task[object]) -> None:
        self.number = number
        self.task = task
        self.cancelling = task.cancelling()
        self.notices: list[Notice] = []
        self.error: AsyncparError | None = None
        self.has_cancelled = False
        self.is_failing = False
        self.news = asyncio.Event()

    @property
    def origin(self) -> Notice | None:
        return next((notice for notice in self.notices if notice.is_origin), None)

    def tell(self, what: Notice | AsyncparError) -> None:
        """Another rank has left the block, or nobody can be heard any more: this ends it here, too."""
        if isinstance(what, Notice):
            self.notices.append(what)
        elif self.error is None:
            self.error = what
        self.news.set()
        if not self.has_cancelled and not self.is_failing:
            self.has_cancelled = True
            self.task.cancel()

    def take_back(self) -> bool:
        """Return whether the task was cancelled by nobody but ``tell``; that cancellation is over now."""
        return self.has_cancelled and self.task.uncancel() <= self.cancelling


class StepAlarm:
    """Ends what the ranks of ``communicator`` do together on all of them as soon as one fails in it.

    Make one on every rank, in the same order as other groups are made.  It owns the reception of notices, which is
    pending from the first block to ``close`` (or the end of the node), and the notices that are on their way; these end
    by themselves, the latest after the communicator's timeout.
    """

    def __init__(self, communicator: Communicator, *, grace: float = GRACE) -> None:
        if not grace >= 0.0:
            raise UsageError(f"grace: expected 0 or more seconds, got {grace!r}")
        group = communicator.subgroup(range(communicator.size), name=f"{communicator.name} alarm")
        assert group is not None, "this rank is in its own group"
        self._group = group
        self._grace = grace
        self._number = 0
        self._block: _Block | None = None
        self._early: list[Notice] = []
        self._reception: asyncio.Task[Notice] | None = None
        self._notices: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Run the block on all ranks, or end it on all of them.

        If this rank fails in it, the others are told and the error goes on at once.  If another one does, this block is
        cancelled and raises ``StepFailed``, or ``PeerLost`` if that rank is gone.  Left in good order only when all
        ranks have come to its end, which takes a barrier.
        """
        task = asyncio.current_task()
        assert task is not None, "a block runs in a task"
        if self._block is not None:
            raise UsageError("watch: expected one block at a time, but one is running already")
        self._number += 1
        block = self._block = _Block(self._number, task)
        closing = self._group.barrier()
        try:
            try:
                self._listen()
                self._recall(block)
                yield
                await closing
            except BaseException as error:
                _give_up(closing)
                outcome = await self._ended(block, error)
                if outcome is error:
                    raise
                raise outcome from error
        finally:
            self._block = None

    async def close(self) -> None:
        """Listen no more.  Notices get a moment to go, but are not waited for if a peer is hung.  Idempotent."""
        reception, self._reception = self._reception, None
        if reception is not None:
            reception.cancel()
        if self._notices:
            await asyncio.wait(self._notices, timeout=self._grace)
        for notice in self._notices:
            notice.cancel()

    # -- ends ------------------------------------------------------------------------------------------------------

    async def _ended(self, block: _Block, error: BaseException) -> BaseException:
        """Tell the others what happened here, and return what this rank raises.

        One turn of the loop goes by, in which the notices leave: nothing may be left of this rank after it.
        """
        block.is_failing = True
        was_told = block.take_back()
        if isinstance(error, asyncio.CancelledError):
            if not was_told:
                return await self._tell(block, error, NoticeKind.CANCELLED, "it was cancelled")
        elif not isinstance(error, PeerCancelled):
            lost = error.rank if isinstance(error, PeerLost) else None
            kind = NoticeKind.FAILED if lost is None else NoticeKind.LOST
            culprit = error.rank if isinstance(error, PeerError) else None
            return await self._tell(block, error, kind, _text_of(error), culprit)
        elif not was_told:
            error = await self._tell(block, error, NoticeKind.ECHO, _text_of(error), error.rank)
            if isinstance(error, asyncio.CancelledError):
                return error
        return await self._explained(block, error)

    async def _explained(self, block: _Block, error: BaseException) -> BaseException:
        """Return the origin of ``error``, which came from another rank; wait a moment for it."""
        try:
            async with asyncio.timeout(self._grace):
                while block.origin is None and block.error is None:
                    block.news.clear()
                    await block.news.wait()
        except TimeoutError:
            pass  # there was only an echo: somebody left an operation alone, not the block
        except asyncio.CancelledError as cancelled:
            return cancelled
        if block.origin is not None:
            return self._error_of(block.origin)
        if block.error is not None:
            return block.error
        return error if isinstance(error, AsyncparError) else self._error_of(block.notices[0])

    def _error_of(self, notice: Notice) -> PeerError:
        return error_of(notice, self._group.ranks, me=self._group.rank, group=self._group.name)

    # -- telling ---------------------------------------------------------------------------------------------------

    async def _tell(
        self, block: _Block, error: BaseException, kind: NoticeKind, text: str, culprit: int | None = None
    ) -> BaseException:
        """Send notices to all others in the background, because one of them may be hung; return ``error``."""
        me = self._group.rank
        notice = Notice(
            block=block.number,
            sender=me,
            kind=kind,
            culprit=self._group.ranks[me] if culprit is None else culprit,
            text=text[:_LONGEST_TEXT],
        )
        for other in range(self._group.size):
            if other != me:
                sending = asyncio.create_task(_send(self._group, notice, other), name=f"notice to rank {other}")
                self._notices.add(sending)
                sending.add_done_callback(self._notices.discard)
        if isinstance(error, GeneratorExit):
            return error  # nothing can be awaited any more
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as cancelled:
            return cancelled
        return error

    # -- hearing ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Have a reception pending."""
        if self._group.size > 1 and self._reception is None:
            self._reception = asyncio.create_task(_receive(self._group), name="notices of a step")
            self._reception.add_done_callback(self._heard)

    def _heard(self, reception: asyncio.Task[Notice]) -> None:
        if self._reception is reception:
            self._reception = None
        if reception.cancelled():
            return
        error = reception.exception()
        if error is None:
            self._listen()
            self._take(reception.result())
        elif isinstance(error, PeerTimeout):  # quiet for so long, which is how it should be
            if self._block is not None:
                self._listen()
        elif self._block is not None:
            if not isinstance(error, PeerLost):
                self._listen()
            told = error if isinstance(error, AsyncparError) else AsyncparError(_text_of(error))
            self._block.tell(told)

    def _take(self, notice: Notice) -> None:
        if not 0 <= notice.sender < self._group.size:
            if self._block is not None:
                self._block.tell(ProtocolError(f"a notice of a step has come from rank {notice.sender} of its group"))
        elif self._block is not None and notice.block == self._block.number:
            self._block.tell(notice)
        elif notice.block > self._number:
            self._early.append(notice)

    def _recall(self, block: _Block) -> None:
        """Take the notices of this block that came before it began."""
        early, self._early = self._early, []
        block.notices += [notice for notice in early if notice.block == block.number]
        self._early = [notice for notice in early if notice.block > block.number]
        if block.notices:
            raise self._error_of(block.notices[0])


def _give_up(call: Coroutine[Any, Any, None]) -> None:
    """Let nobody wait for what this rank has called and will not do."""
    call.close()
    asyncio.get_running_loop().call_soon(call.close)  # keeps it alive until the others have been told


async def _send(group: Communicator, notice: Notice, dest: int) -> None:
    try:
        await group.send_object(notice, dest)
    except PeerError:
        return  # who cannot be told is gone, and everybody learns that; or hangs, and is told nothing by anyone


async def _receive(group: Communicator) -> Notice:
    notice: Notice = await group.recv_object(wanted=Notice)
    return notice


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
