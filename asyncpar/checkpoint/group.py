"""Work that all ranks do at once, each of which must know that it has succeeded on all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar

from asyncpar.checkpoint.threads import Stopped, WorkProgress
from asyncpar.collectives.communicator import Communicator, recorder_of
from asyncpar.core.observe.records import EventKind
from asyncpar.core.observe.spans import EventSpan
from asyncpar.errors import AsyncparError, CheckpointError, PeerCancelled, PeerError, UsageError

T = TypeVar("T")

_BEAT: Final = 0.5
"""Seconds after which a working rank checks whether the others still are."""

_GRACE: Final = 5.0
"""Seconds given to a thread that was stopped; one that hangs is abandoned."""

_CANCELLED: Final = "it was cancelled"


class CheckpointGroup:
    """The ranks of ``communicator`` during one save or load, in a separate group; this process without one.

    Create it where the call is made, since groups are numbered by calls.  A rank that fails or is cancelled leaves the
    group: the others learn this within a second and raise, too, whatever they are doing.
    """

    def __init__(self, communicator: Communicator | None, what: str) -> None:
        self._group = None if communicator is None else communicator.subgroup(range(communicator.size), name=what)
        assert communicator is None or self._group is not None, "every rank is one of all"
        self._what = what
        self._has_begun = False
        self._has_left = False

    @property
    def rank(self) -> int:
        return 0 if self._group is None else self._group.rank

    @property
    def size(self) -> int:
        return 1 if self._group is None else self._group.size

    async def run_on_all(self, work: Callable[[WorkProgress], T], *, wanted: Any) -> list[T]:
        """Run ``work`` in a thread and return its result of each rank, each of type ``wanted``.

        Raises its error, after notifying the others, ``CheckpointError`` if it fails on another rank, and
        ``PeerCancelled`` if that is cancelled.  A rank whose work makes no progress for the group's timeout fails;
        otherwise it may take any time.
        """
        self._has_begun = True
        recorder = None if self._group is None else recorder_of(self._group)
        with EventSpan(self._what, kind=EventKind.CHECKPOINT, recorder=recorder):
            return await self._run_on_all(work, wanted=wanted)

    async def _run_on_all(self, work: Callable[[WorkProgress], T], *, wanted: Any) -> list[T]:
        progress = WorkProgress()
        running = asyncio.get_running_loop().run_in_executor(None, work, progress)
        try:
            await self._until_all_are_through(running, progress)
            return await self._gather(running.result(), wanted)
        except BaseException as error:
            progress.stop()
            if isinstance(error, PeerCancelled):
                self._has_left = True  # the failed rank has notified all others
            self.leave(_reason(error), because_of=error.rank if isinstance(error, PeerError) else None)
            await _ended(running)
            if isinstance(error, PeerCancelled) and error.cause not in (_CANCELLED, "cancelled"):
                message = f"{self._what}: rank {self._place(error.rank)} failed: {error.cause}"
                raise CheckpointError(message, rank=error.rank) from error
            raise

    def leave(self, why: str, *, because_of: int | None = None) -> None:
        """Leave, and notify the others of the reason ``why``, without waiting for them.

        ``because_of`` is the rank of the world that caused it, if it is another one.
        """
        if self._has_left or self._group is None or self.size == 1:
            return
        self._has_left = True
        following = self._group.all_gather_object(None)  # the one that others may have reached, but not passed
        self._group.give_up(self._group.ranks[self.rank] if because_of is None else because_of, why)
        with suppress(PeerCancelled):
            following.send(None)  # ends at once, with the reason given for it

    def refuse(self, error: UsageError) -> Coroutine[Any, Any, Any]:
        """Leave because of ``error``, and return a coroutine that raises it."""

        async def refused() -> Any:
            raise error

        self.leave(str(error))
        return refused()

    def leave_unbegun(self) -> None:
        """Handle a cancelled call; if it had not begun, the other ranks must not wait for this one."""
        if not self._has_begun:
            self.leave(_CANCELLED)

    def _place(self, world_rank: int | None) -> int | None:
        """Return the number in the group of a rank of the world."""
        return None if world_rank is None or self._group is None else self._group.ranks.index(world_rank)

    async def _gather(self, value: T, wanted: Any) -> list[T]:
        """Return the ``value`` of every rank."""
        return [value] if self._group is None else await self._group.all_gather_object(value, wanted=wanted)

    async def _until_all_are_through(self, running: asyncio.Future[T], progress: WorkProgress) -> None:
        loop, timeout = asyncio.get_running_loop(), None if self._group is None else self._group.timeout
        beat = _BEAT if timeout is None else min(_BEAT, timeout / 3)
        done, moved_at = progress.done, loop.time()
        while True:
            await asyncio.wait({running}, timeout=beat)
            if running.done():
                running.result()
            elif progress.done != done:
                done, moved_at = progress.done, loop.time()
            elif timeout is not None and loop.time() - moved_at >= timeout:
                raise CheckpointError(f"{self._what}: no progress for {timeout:g} s; does the file system hang?")
            if all(await self._gather(running.done(), bool)):
                return


async def _ended(running: asyncio.Future[Any]) -> None:
    """Wait for a stopped thread, unless it hangs; its error has been reported or does not matter."""
    running.add_done_callback(lambda done: None if done.cancelled() else done.exception())
    await asyncio.wait({running}, timeout=_GRACE)


def _reason(error: BaseException) -> str:
    match error:
        case asyncio.CancelledError():
            return _CANCELLED
        case AsyncparError():
            return str(error)
        case Stopped():
            return "it was asked to stop"
    return f"{type(error).__name__}: {error}"
