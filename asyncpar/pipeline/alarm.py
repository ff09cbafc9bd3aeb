"""Ranks that run a block together also fail in it together.

Theory of operation.  Every block has a number, the same on all ranks, because all enter their blocks in one order.  A
rank that fails in a block sends a *notice* with that number to every other rank and raises its error without waiting
for any of them.  Each rank has one reception from any rank pending, which stays pending between blocks, so that no
notice can get lost between two receptions.  A notice of the running block cancels it, as ``asyncio.timeout`` would; a
later one is kept until that block begins (a rank may be ahead); an earlier one is dropped.

A rank leaves a block without an error only when all have reached its end: each *calls* a barrier at the beginning,
which allots its place in the order of operations, and awaits it at the end.  A rank that fails abandons the call, so
that no rank waits for it there either.  So no rank continues while another can still fail; the one exception is a rank
that is cancelled, or dies, while it waits in that barrier.

A failure has echoes: a rank that is cancelled by a notice cancels its operations, and their peers may see
``PeerCancelled`` before the notice that explains it.  Such a failure is called an *echo*; a rank that sees one waits up
to ``grace`` seconds for the origin, and raises that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.standing import stand_for_object
from asyncpar.errors import (
    AsyncparError,
    PeerCancelled,
    PeerError,
    PeerLost,
    PeerTimeout,
    ProtocolError,
    StaleGeneration,
    UsageError,
)
from asyncpar.pipeline.errors import Mailing, Notice, NoticeKind, StepFailed, Word, error_of

__all__ = ["GRACE", "StepAlarm", "StepFailed"]

GRACE: Final = 2.0
"""Seconds for which a rank that sees only the echo of a failure waits for its origin."""

_LONGEST_TEXT = 4000


PATIENCE: Final = 1.0
"""Seconds without news after which a wait also watches whether the missing ranks are alive."""

_TAG: Final = 0
_TAG_OF_WATCHES: Final = 1


class StepAlarm:
    """Ends a common block of the ranks of ``communicator`` on all of them as soon as one fails in it.

    Create one on every rank, in the same order as other groups, and ``close`` it.

    A rank that sees an echo waits for up to ``grace`` seconds for its origin.
    """

    def __init__(self, communicator: Communicator, *, grace: float = GRACE) -> None:
        if not grace >= 0.0:
            raise UsageError(f"grace: expected 0 or more seconds, got {grace!r}")
        group = communicator.subgroup(range(communicator.size), name=f"{communicator.name} alarm")
        assert group is not None, "this rank is in its own group"
        self._group = group
        self._grace = grace
        self._number = 0
        self._block: RunningBlock | None = None
        self._early: list[Notice] = []
        self._words: dict[tuple[int, str], dict[int, Any]] = {}
        self._channel = PipelineChannel(group, on_mailing=self._take, on_error=self._take_error)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks, in world numbering, that run blocks together."""
        return self._group.ranks

    @property
    def block(self) -> int:
        """The number of the running block; raises ``UsageError`` if there is none."""
        return self._running.number

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        """Run the block on all ranks, or end it on all of them.

        If this rank fails in it, the others are notified and the error propagates at once.  If another one does, this
        block is cancelled and raises ``StepFailed``, or ``PeerLost`` if that rank is gone.  It ends without an error
        only when all ranks have reached its end, which takes a barrier.
        """
        task = asyncio.current_task()
        assert task is not None, "a block runs in a task"
        if self._block is not None:
            raise UsageError("watch: expected one block at a time, but one is running already")
        self._number += 1
        closing = self._group.barrier()
        block = self._block = RunningBlock(self._number, task)
        try:
            try:
                self._channel.listen()
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

    async def exchange(self, topic: str, value: Any, ranks: Sequence[int]) -> list[Any]:
        """Return the values of ``ranks`` (of the world, this one among them) for ``topic`` in this block.

        Values are plain data.  All of ``ranks`` call it, once per block and topic; unlike a collective, it matches
        again after a block in which some have called it and others have failed before.
        """
        block, me = self._running, self._group.rank
        if not set(ranks) <= set(self.ranks):
            raise UsageError(f"ranks: expected some of {self.ranks}, got {tuple(ranks)}")
        places = [self.ranks.index(rank) for rank in ranks]
        others = [place for place in places if place != me]
        word = Word(block=block.number, sender=me, topic=topic, value=value)
        self._channel.post(Mailing(word=word), others, must_arrive=True)
        received = self._words.setdefault((block.number, topic), {})
        while missing := [place for place in others if place not in received]:
            block.news.clear()
            await self._channel.wait(block.news, missing)
        return [value if place == me else received[place] for place in places]

    async def close(self) -> None:
        """End the reception.  Outgoing notices have ``grace`` seconds to leave.  Idempotent."""
        await self._channel.close(self._grace)

    # -- ends ------------------------------------------------------------------------------------------------------

    async def _ended(self, block: RunningBlock, error: BaseException) -> BaseException:
        """Notify the others of the error here, and return the error that this rank raises.

        This takes one turn of the loop, in which the notices leave: nothing may be left of this rank afterwards.
        """
        block.is_failing = True
        was_notified = block.take_back()
        if isinstance(error, PeerCancelled) and block.is_cancelled_by_others:
            error = asyncio.CancelledError("cancelled while another rank ended the operation that was waited for")
        is_known = bool(block.notices)
        if isinstance(error, asyncio.CancelledError):
            if not was_notified:
                return await self._notify(block, error, NoticeKind.CANCELLED, "it was cancelled")
            if block.error is not None and not is_known:
                error = block.error  # perhaps only this rank has seen it
        if not isinstance(error, (PeerCancelled, asyncio.CancelledError)):
            culprit = error.rank if isinstance(error, PeerError) else None
            is_loss = isinstance(error, PeerLost) and culprit is not None
            kind = NoticeKind.LOST if is_loss else NoticeKind.FAILED
            return await self._notify(block, error, kind, _text_of(error), culprit)
        if isinstance(error, PeerCancelled) and not is_known:
            error = await self._notify(block, error, NoticeKind.ECHO, _text_of(error), error.rank)
            if isinstance(error, asyncio.CancelledError):
                return error
        return await self._explained(block, error)

    async def _explained(self, block: RunningBlock, error: BaseException) -> BaseException:
        """Return the origin of ``error``, which came from another rank; wait up to ``grace`` seconds for it."""
        try:
            async with asyncio.timeout(self._grace):
                while block.origin is None and block.error is None:
                    block.news.clear()
                    await block.news.wait()
        except TimeoutError:
            pass  # from the grace time only: no rank reported an origin, so the echo itself is raised below
        except asyncio.CancelledError as cancelled:
            return cancelled
        if block.origin is not None:
            return self._error_of(block.origin)
        if block.error is not None:
            return block.error
        return error if isinstance(error, AsyncparError) else self._error_of(block.notices[0])

    @property
    def _running(self) -> RunningBlock:
        if self._block is None:
            raise UsageError("alarm: expected to be used within a block that it watches, but none runs")
        return self._block

    def _error_of(self, notice: Notice) -> PeerError:
        return error_of(notice, self._group.ranks, me=self._group.rank, group=self._group.name)

    # -- sending ---------------------------------------------------------------------------------------------------

    async def _notify(
        self, block: RunningBlock, error: BaseException, kind: NoticeKind, text: str, culprit: int | None = None
    ) -> BaseException:
        """Send notices to all others in the background, since one of them may hang; return ``error``."""
        me = self._group.rank
        notice = Notice(
            block=block.number,
            sender=me,
            kind=kind,
            culprit=self._group.ranks[me] if culprit is None else culprit,
            text=text[:_LONGEST_TEXT],
        )
        others = [other for other in range(self._group.size) if other != me]
        self._channel.post(Mailing(notice=notice), others)
        if isinstance(error, GeneratorExit):
            return error  # nothing can be awaited any more
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError as cancelled:
            return cancelled
        return error

    # -- receiving -------------------------------------------------------------------------------------------------

    def _take(self, mailing: Mailing) -> None:
        content = mailing.notice or mailing.word
        if content is None or not 0 <= content.sender < self._group.size:
            self._take_error(ProtocolError("the channel of an alarm received a message that ranks do not send"))
        elif isinstance(content, Word):
            if content.block >= self._number:
                self._words.setdefault((content.block, content.topic), {})[content.sender] = content.value
                if self._block is not None:
                    self._block.news.set()
        elif self._block is not None and content.block == self._block.number:
            self._block.interrupt(content)
        elif content.block > self._number:
            self._early.append(content)

    def _take_error(self, error: AsyncparError) -> None:
        if self._block is not None:
            self._block.interrupt(error)

    def _recall(self, block: RunningBlock) -> None:
        """Take the notices of this block that arrived before it began, and forget the words of earlier ones."""
        early, self._early = self._early, []
        block.notices += [notice for notice in early if notice.block == block.number]
        self._early = [notice for notice in early if notice.block > block.number]
        self._words = {place: received for place, received in self._words.items() if place[0] >= block.number}
        if block.notices:
            raise self._error_of(block.notices[0])


def _give_up(call: Coroutine[Any, Any, None]) -> None:
    """Abort, on all ranks, a call that this rank does not await."""
    call.close()
    asyncio.get_running_loop().call_soon(call.close)  # keeps it alive until the others have been notified


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class RunningBlock:
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
        """Set whenever a notice, a word or an error has arrived."""

    @property
    def origin(self) -> Notice | None:
        return next((notice for notice in self.notices if notice.is_origin), None)

    def interrupt(self, why: Notice | AsyncparError) -> None:
        """End the block here: another rank has left it, or no notice can be received any more."""
        if isinstance(why, Notice):
            self.notices.append(why)
        elif self.error is None:
            self.error = why
        self.news.set()
        if not self.has_cancelled and not self.is_failing:
            self.has_cancelled = True
            self.task.cancel()

    @property
    def is_cancelled_by_others(self) -> bool:
        """Whether the task has been cancelled within the block by other means than ``interrupt``."""
        return self.task.cancelling() > self.cancelling

    def take_back(self) -> bool:
        """Return whether only ``interrupt`` cancelled the task, and undo that cancellation."""
        return self.has_cancelled and self.task.uncancel() <= self.cancelling


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
