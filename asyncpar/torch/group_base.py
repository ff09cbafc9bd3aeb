"""What all operations of a process group share: who is in it, how they begin, how it ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from asyncpar.blocking.pending import Pending
from asyncpar.blocking.thread import LoopThread
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import AsyncparError, PeerTimeout, UsageError
from asyncpar.node import Node
from asyncpar.torch.errors import as_torch
from asyncpar.torch.registration import NAME
from asyncpar.torch.work import Work

T = TypeVar("T")
Make = Callable[[], Coroutine[Any, Any, Any]]


SMALL = 64 << 10
"""Bytes up to which an operation is done in the calling thread if possible: that is quicker than changing threads."""

_LONGEST_SECONDS = 24 * 3600.0

ENDING_SECONDS = 5.0
"""How long ending a group waits for operations that are being cancelled, and for a node to leave its world."""


class GroupBase(dist.ProcessGroup):
    """One group of ranks; ``communicator`` is asyncpar's over the same ranks, ``thread`` that of its event loop.

    ``node`` is the node of this rank; the group that ``owns_node``, a default group, stops it at its end.
    """

    def __init__(
        self, communicator: Communicator, thread: LoopThread, node: Node, *, store: dist.Store, owns_node: bool
    ) -> None:
        super().__init__(communicator.rank, communicator.size)
        self.communicator = communicator
        self.thread = thread
        self.node = node
        self.is_ended = False
        self.paths: dict[str, Any] = {}
        """What runs operations on tensors elsewhere than in the CPU's memory, by type of device."""
        self._store = store
        self._owns_node = owns_node
        self._pending: set[Pending[Any]] = set()
        self._name = self._description = ""

    # -- what torch asks a group for ---------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def getRank(self) -> int:  # noqa: N802
        return self.communicator.rank

    def getSize(self) -> int:  # noqa: N802
        return self.communicator.size

    def rank(self) -> int:
        return self.communicator.rank

    def size(self) -> int:
        return self.communicator.size

    def name(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def get_group_store(self) -> dist.Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation may go without progress before it raises ``PeerTimeout``."""
        self.communicator.timeout = timeout.total_seconds()

    _set_default_timeout = set_timeout

    @property
    def seconds(self) -> float:
        """How long an operation may go without progress before it raises ``PeerTimeout``."""
        return self.communicator.timeout or _LONGEST_SECONDS

    # -- beginning ---------------------------------------------------------------------------------------------------

    def start(
        self,
        make: Make,
        tensors: Sequence[torch.Tensor],
        *,
        operation: str,
        options: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Begin the operation that ``make`` makes, whose results will be in ``tensors``.

        It takes its place in the order of the group's operations now.  ``options`` are torch's: their ``timeout``
        bounds it (or ``timeout``), and one that will be waited for at once is done in this thread as far as possible.
        """
        if self.is_ended:
            raise as_torch(UsageError(f"{operation}: this process group was destroyed; make a new one"))
        limit = getattr(options, "timeout", None) if timeout is None else timeout
        seconds = limit.total_seconds() if limit is not None else 0.0
        if seconds > 0 and seconds != self.communicator.timeout:
            make = self._bounded(make, seconds, operation)
        at_once = not getattr(options, "asyncOp", True) or all(tensor.nbytes <= SMALL for tensor in tensors)
        pending = self.thread.start(make, at_once=at_once)
        if not pending.is_done:
            self._pending.add(pending)
            pending.add_done_callback(self._pending.discard)
        return Work(pending, tensors, operation=operation, check_may_wait=self.thread.check_may_wait)

    def refuse(self, operation: str, error: AsyncparError) -> AsyncparError:
        """Return what to raise for wrong arguments of ``operation``."""
        error.args = (f"{operation}: {error}",)
        return as_torch(error)

    def _bounded(self, make: Make, seconds: float, operation: str) -> Make:
        """Return ``make``, for an operation that may take ``seconds``."""

        async def within(call: Coroutine[Any, Any, T]) -> T:
            try:
                async with asyncio.timeout(seconds):
                    return await call
            except TimeoutError as error:
                if isinstance(error, AsyncparError):
                    raise
                cause = error.__cause__ or error.__context__
                told = f": {cause}" if cause is not None and str(cause) else ""
                raise PeerTimeout(
                    f"rank {self.communicator.rank}: {operation}: not over within its timeout of {seconds} s{told}"
                ) from None

        return lambda: within(make())

    # -- ending ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the group on this rank: what is under way is cancelled, and the node of a default group stops."""
        if self.is_ended:
            return
        self.is_ended = True
        self._cancel_pending()
        if self._owns_node:
            self.thread.forget(self)
            if not self.thread.is_closed:
                with suppress(TimeoutError):
                    self.thread.call(self.node.stop, timeout=ENDING_SECONDS)

    def abort(self) -> None:
        """End the group on this rank at once; other ranks' operations with it fail."""
        self.shutdown()

    def _cancel_pending(self) -> None:
        pending = [*self._pending]
        for one in pending:
            one.cancel()
        for one in pending:
            with suppress(Exception):  # whoever waits for it gets this
                one.wait(ENDING_SECONDS)


async def together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await calls that were made already, one after another; if one fails, those after it are given up."""
    results: list[T] = []
    waiting = deque(calls)
    try:
        while waiting:
            results.append(await waiting.popleft())
    except BaseException:
        for call in waiting:
            call.close()
        raise
    return results
