"""The base of a process group: its ranks, the start of operations, and its end."""

from __future__ import annotations

import asyncio
import mmap
import sys
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from asyncpar.blocking.pending import Pending
from asyncpar.blocking.thread import LoopThread
from asyncpar.collectives.arrays import check_rank, check_tag
from asyncpar.collectives.communicator import Communicator, agreeing, announce_leaving, overdue
from asyncpar.errors import AsyncparError, PeerTimeout, UsageError
from asyncpar.net.arena.arena import ArenaMemory
from asyncpar.net.transport.links import LEFT
from asyncpar.node import Node
from asyncpar.torch.errors import as_torch
from asyncpar.torch.instrumentation import NAME, is_profiled, recorded
from asyncpar.torch.optimizer_steps import OptimizerSteps
from asyncpar.torch.work import Work, is_inflight_on

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)
Make = Callable[[], Coroutine[Any, Any, Any]]


SEND, RECEIVE, RECEIVE_ANY = "send", "recv", "recvAnySource"
MESSAGES = (SEND, RECEIVE, RECEIVE_ANY)

SMALL = 2 << 20
"""Bytes up to which an operation runs in the calling thread if possible, which is faster than switching threads.

Thus DDP's first bucket wakes no other thread, which would take the core from the backward pass.
"""

ANSWER_SECONDS = 1.0
"""Limit of seconds for which a wait that has failed asks other ranks which of them is missing."""

_LONGEST_SECONDS = 24 * 3600.0

ENDING_SECONDS = 5.0
"""Seconds for which the end of a group waits for cancelled operations, and for the node to leave its world."""

FAREWELL_SECONDS = 1.0
"""Seconds for which a rank without pending operations waits for others that may still receive its messages."""

ANNOUNCEMENT_SECONDS = 0.1
"""Seconds of that after which it announces that it leaves, so that ranks that leave together need no announcement."""

DELIVERY_SECONDS = 5.0
"""Seconds for which a rank that ends its group without an exception waits until its sends have been received."""

NEWS_SECONDS = 0.5
"""Seconds for which a rank stays after another's failure, so that the others do not take this one for the cause."""

remains: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
"""Mapped shared memory of worlds that this process has left, kept by views of it, which may be garbage."""


class GroupBase(dist.ProcessGroup):
    """One group of ranks; ``communicator`` is asyncpar's over the same ranks, ``thread`` that of its event loop.

    ``node`` is the node of this rank; the group that ``owns_node``, a default group, stops it at its end.  ``steps``
    are those of the default group.
    """

    def __init__(
        self,
        communicator: Communicator,
        thread: LoopThread,
        node: Node,
        *,
        store: dist.Store,
        owns_node: bool,
        steps: OptimizerSteps,
    ) -> None:
        super().__init__(communicator.rank, communicator.size)
        self.communicator = communicator
        self.thread = thread
        self.node = node
        self.is_ended = False
        self.steps = steps
        self.barriers = 0
        """The number of monitored barriers so far."""
        self.paths: dict[str, Any] = {}
        """By type of device, the object that runs operations on tensors outside the CPU's memory."""
        self._begun = 0
        """The number of operations begun so far."""
        self._common_detail = ""
        """See ``agreeing``."""
        self._store = store
        self._owns_node = owns_node
        self._pending: set[Pending[Any]] = set()
        self._sends: set[Pending[Any]] = set()
        """Pending sends; the end of the group waits for them."""
        self._name = self._description = ""

    # -- the interface that torch expects ----------------------------------------------------------------------------

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
        """Set the time without progress after which an operation raises ``PeerTimeout``."""
        try:
            if not isinstance(timeout, timedelta):
                raise UsageError(f"timeout: expected a timedelta, got {timeout!r}")
            self.communicator.timeout = timeout.total_seconds()
        except UsageError as error:
            raise as_torch(error) from None

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of operations that this rank has begun in this group."""
        return self._begun

    def _set_sequence_number_for_group(self) -> None:
        """Set the first sequence number, which is 0 on all ranks."""

    @property
    def seconds(self) -> float:
        """Seconds without progress after which an operation raises ``PeerTimeout``."""
        return self.communicator.timeout or _LONGEST_SECONDS

    def own_cuda_path(self) -> Any:
        """Return the object that runs operations on CUDA tensors over ``communicator``."""
        raise NotImplementedError

    # -- beginning ---------------------------------------------------------------------------------------------------

    def start(
        self,
        make: Make,
        tensors: Sequence[torch.Tensor],
        *,
        operation: str,
        options: Any = None,
        inputs: Sequence[torch.Tensor] | None = None,
        follow: Callable[[], None] | None = None,
        detail: str = "",
        peer: int | None = None,
    ) -> Work:
        """Start the operation of ``make``, whose results will be in ``tensors``.

        It takes its place in the order of the group's operations now.  ``options`` are torch's: their ``timeout``
        bounds it, and a synchronous operation runs in this thread as far as possible.  Profilers show ``inputs``; by
        default those are ``tensors``, as for operations in place.  ``follow`` is called by each successful wait, in its
        thread.  All ranks must pass the same ``detail``.  ``peer`` is the other rank of a message.
        """
        self._check_open(operation)
        for each in (detail, self._common_detail):
            if each:
                make = partial(agreeing, self.communicator, each, make)
        limit = getattr(options, "timeout", None)
        seconds = limit.total_seconds() if limit is not None else 0.0
        if seconds > 0 and seconds != self.communicator.timeout:
            make = self._bounded(make, seconds, operation)
        if is_profiled():
            make = recorded(make, operation, tensors if inputs is None else inputs)
        at_once = not getattr(options, "asyncOp", True) or all(map(_is_small, tensors))
        self._begun += 1
        pending = self._begin(make, operation, at_once=at_once)
        if operation == SEND and not pending.is_done:
            self._sends.add(pending)
            pending.add_done_callback(self._sends.discard)
        work = Work(
            pending,
            tensors,
            operation=operation,
            check_may_wait=self.thread.check_may_wait,
            overdue=partial(self._overdue, is_message=operation in MESSAGES, peer=peer),
            follow=follow,
            waited=self.steps.waited,
        )
        if is_inflight_on():
            work.enter()
        return work

    @contextmanager
    def agreeing(self, detail: str) -> Iterator[None]:
        """Add ``detail`` to those of the operations that are started within: all ranks must pass the same."""
        before, self._common_detail = self._common_detail, detail
        try:
            yield
        finally:
            self._common_detail = before

    def call(self, make: Make, operation: str) -> None:
        """Run the operation of ``make``, which has no tensors, and wait for it.

        The end of the group cancels it, and so does an exception in the wait, such as ``KeyboardInterrupt``.
        """
        self._check_open(operation)
        self.thread.check_may_wait()
        pending = self._begin(make, operation, at_once=False)
        try:
            pending.wait()
        finally:
            pending.cancel()
            del pending  # it has the error whose traceback has this frame

    def refuse(self, operation: str, error: E, notify: Callable[[], None] | None = None) -> E:
        """Return the error to raise for wrong arguments of ``operation``.

        ``notify``, called on the loop, gives the call its place, at which it ends on the other ranks with the reason.
        It is not called for a destroyed group, nor for an error that was already handled.
        """
        if notify is not None and not self.is_ended and not isinstance(error, dist.DistBackendError):
            self._begun += 1
            with suppress(UsageError):  # the loop has ended, and with it all groups
                self.thread.start(partial(_do, notify), at_once=True, what=operation)
        return as_torch(error, operation)

    def _begin(self, make: Make, operation: str, *, at_once: bool) -> Pending[Any]:
        """Start an operation, which the end of this group cancels."""
        try:
            pending = self.thread.start(make, at_once=at_once, what=operation)
        except UsageError as error:
            raise self.refuse(operation, error) from None
        if not pending.is_done:
            self._pending.add(pending)
            pending.add_done_callback(self._pending.discard)
            if self.is_ended:  # in this moment, by another thread
                pending.cancel()
        return pending

    def _check_open(self, operation: str) -> None:
        if self.is_ended:
            raise as_torch(UsageError("this process group was destroyed; make a new one"), operation)

    def _overdue(self, text: str, *, is_message: bool, peer: int | None) -> PeerTimeout:
        """Return the error that begins with ``text`` and names the rank for which an operation of this group waits."""
        communicator = self.communicator

        def ask() -> Coroutine[Any, Any, PeerTimeout]:
            return overdue(communicator, text, ANSWER_SECONDS, is_message=is_message, peer=peer)

        try:
            return self.thread.call(ask)
        except AsyncparError as error:  # the loop is ending
            return PeerTimeout(f"{text}: {error}")

    def _bounded(self, make: Make, seconds: float, operation: str) -> Make:
        """Return ``make``, limited to ``seconds``."""

        async def within(call: Coroutine[Any, Any, T]) -> T:
            try:
                async with asyncio.timeout(seconds):
                    return await call
            except TimeoutError as error:
                if isinstance(error, AsyncparError):
                    raise
                cause = error.__cause__ or error.__context__
                reason = f": {cause}" if cause is not None and str(cause) else ""
                raise PeerTimeout(
                    f"rank {self.communicator.rank}: {operation}: not over within its timeout of {seconds} s{reason}"
                ) from None

        return lambda: within(make())

    # -- ending ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the group on this rank: cancel pending operations, and make the node of a default group leave its world.

        Unless an exception is being handled, pending sends are completed before that, if they are received within
        ``DELIVERY_SECONDS``.  If nothing else is pending then, the node waits for those of the other ranks, for at most
        ``FAREWELL_SECONDS``: they may not have received the last messages of this rank yet.
        """
        if not self.is_ended and sys.exc_info()[0] is None:
            self._deliver()
        is_through = not self._pending and sys.exc_info()[0] is None
        self._end(lambda: self._leave(is_through=is_through))

    def abort(self) -> None:
        """End the group on this rank at once; other ranks' operations with it fail."""
        self._end(self.node.stop)

    async def leave_at_exit(self) -> None:
        """Stop the node of a program that exits without ending its groups."""
        await self._leave(is_through=not hasattr(sys, "last_value"))  # of an exception that has ended it

    async def _leave(self, *, is_through: bool) -> None:
        """Stop the node, waiting before for those of the others if this rank ``is_through``."""
        if any(error.cause != LEFT for error in self.node.links.lost.values()):
            await asyncio.sleep(NEWS_SECONDS)
        elif is_through and self.communicator.size > 1:
            with suppress(AsyncparError, TimeoutError):  # a rank that does not come needs nothing, or has its own error
                async with asyncio.timeout(FAREWELL_SECONDS):
                    await self._wait_until_all_leave()
        await self.node.stop()

    async def _wait_until_all_leave(self) -> None:
        """Wait until all ranks leave; notify those that do not come soon that they need not wait for this one."""
        farewell = asyncio.ensure_future(self.communicator.barrier(key="torch farewell"))
        try:
            await asyncio.wait([farewell], timeout=ANNOUNCEMENT_SECONDS)
            if not farewell.done():
                announce_leaving(self.communicator)
            await farewell
        finally:
            farewell.cancel()

    def _end(self, leave: Make) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        self._cancel_pending()
        if not self._owns_node:
            self._announce_end()
        else:
            self.steps.close()
            remains.update(_mappings(self.node))
            self.thread.forget(self)
            if not self.thread.is_closed:
                with suppress(TimeoutError):
                    self.thread.call(leave, timeout=ENDING_SECONDS)

    def _announce_end(self) -> None:
        """End operations of this group that other ranks call or will call, since this rank will not."""
        communicator = self.communicator
        rank = communicator.ranks[communicator.rank]
        with suppress(AsyncparError):  # the loop has ended, and with it all groups
            self.thread.do(lambda: communicator.give_up(rank, f"rank {rank} has destroyed its process group"))

    def _deliver(self) -> None:
        """Wait until all messages of this rank have been received or have failed, at most ``DELIVERY_SECONDS``."""
        end = time.monotonic() + DELIVERY_SECONDS
        for send in [*self._sends]:
            with suppress(AsyncparError, TimeoutError):  # its receiver is gone, or does not come
                send.wait(max(0.0, end - time.monotonic()))

    def _cancel_pending(self) -> None:
        pending = [*self._pending]
        for one in pending:
            one.cancel()
        for one in pending:
            with suppress(Exception):  # raised where the operation is awaited
                one.wait(ENDING_SECONDS)


def _mappings(node: Node) -> list[mmap.mmap]:
    """Return the shared memory that ``node`` has mapped."""
    shared = node.links.shared
    return shared.mappings if isinstance(shared, ArenaMemory) else []


def root_of(options: Any, communicator: Communicator) -> int:
    """Return the root in ``options``.  Raises ``UsageError`` unless it is a rank, and its only tensor."""
    tensor = getattr(options, "rootTensor", 0)
    if tensor != 0:
        raise UsageError(f"rootTensor: expected 0, as each rank passes one tensor, got {tensor}")
    return check_rank(options.rootRank, communicator.size)


def check_message(communicator: Communicator, rank: int | None, tag: int, name: str) -> None:
    """Raise ``UsageError`` unless ``rank``, called ``name`` in messages, is another rank of the group (None: any)."""
    if rank is not None and check_rank(rank, communicator.size, name) == communicator.rank:
        raise UsageError(f"{name}: expected another rank than this one, got {rank}")
    if rank is None and communicator.size == 1:
        raise UsageError(f"{name}: there is no other rank to receive from in a group of one")
    check_tag(tag)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.nbytes <= SMALL


def _do(action: Callable[[], None]) -> Coroutine[Any, Any, None]:
    """Call ``action`` now; the returned coroutine does nothing."""

    async def rest() -> None:
        pass

    action()
    return rest()
