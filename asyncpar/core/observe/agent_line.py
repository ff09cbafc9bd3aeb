"""The line between a launched rank and its agent: signs of life one way, losses of other ranks the other way.

Theory of operation.  The agent of a host sees what ranks cannot see of each other: that a process has ended, is
stopped, or runs no Python code.  It writes losses into a pipe (``ASYNCPAR_NOTICE_FD``), one JSON object per line,
before it asks ranks to end, so a rank receives the reason first.  The rank reports its phase through its ``Reporter``,
and a dedicated thread sends a heartbeat every second: it stops when something holds the interpreter lock, and continues
while the event loop is busy, or a library that has released the lock.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, NamedTuple, TypeVar

from asyncpar.core.observe.rank_reports import Phase
from asyncpar.core.observe.reporting import Reporter
from asyncpar.errors import PeerLost

BEAT_SECONDS: Final = 1.0
_READ_BYTES: Final = 1 << 16
T = TypeVar("T")


class Loss(NamedTuple):
    """The agent's report that ``rank`` is lost; ``how`` it ended, ``host`` where it ran."""

    rank: int
    host: str
    how: str


class AgentLine:
    """The rank's end.  ``open`` and ``close`` it on the event loop that uses it; without an agent it does nothing.

    A process may be in several worlds one after another, and the pipe outlives them: losses of other generations than
    this rank's are dropped, and counted in ``stale``, because their ranks mean other members now.
    """

    def __init__(self, reporter: Reporter, descriptor: int | None, *, generation: int) -> None:
        """``descriptor`` is the pipe that carries losses; it stays the caller's."""
        self.reporter = reporter
        self._descriptor = descriptor
        self._generation = generation
        self.stale = 0
        self.on_condition: Callable[[int, str], None] = lambda _rank, _how: None
        """Receives the agents' view of ranks that cannot answer: the rank, and ``is stopped``; "": it runs."""
        self._losses: list[Loss] = []
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[int, str], object] | None = None
        self._partial = b""
        self._is_over = threading.Event()

    def open(self) -> None:
        """Start to listen, and to send heartbeats."""
        self.reporter.phase(Phase.FORMING)
        if self.reporter.is_connected:
            threading.Thread(target=self._beat, name="asyncpar beat", daemon=True).start()
        if self._descriptor is not None:
            os.set_blocking(self._descriptor, False)
            os.set_inheritable(self._descriptor, False)
            asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_over.is_set()

    def close(self) -> None:
        """Stop listening."""
        self._is_over.set()
        self.reporter.phase(Phase.LEFT)
        self._stop_reading()

    async def unless_lost(self, work: Coroutine[Any, Any, T], operation: str) -> T:
        """Return the result of ``work``.  Raises ``PeerLost`` as soon as the agent reports that a rank is lost.

        Agents report a loss before they ask ranks to end.  So a cancellation that results from it raises the loss, too,
        however busy this process was when both arrived.
        """
        running = asyncio.ensure_future(work)
        is_cancelled = await self._wait_for(running)
        if self._losses and (is_cancelled or running.cancelled() or running.exception() is not None):
            rank, host, how = self._losses[0]
            has_failed = not running.cancelled()
            raise PeerLost(
                f"{operation}: rank {rank} on {host} is lost: {how}",
                rank=rank,
                host=host,
                operation=operation,
                cause=how,
            ) from (running.exception() if has_failed else None)
        return running.result()

    async def _wait_for(self, running: asyncio.Future[Any]) -> bool:
        """Wait until ``running`` is done; a loss cancels it.

        Returns whether this call was cancelled because of a loss; a cancellation that no loss explains is raised.
        """
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        both: set[asyncio.Future[Any]] = {running, waiter}
        try:
            if not self._losses:
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                running.cancel()
                await asyncio.wait({running})
        except asyncio.CancelledError:
            running.cancel()
            await asyncio.wait({running})
            self._read_now()
            if not self._losses:
                raise
            return True
        finally:
            self._waiter = None
            waiter.cancel()
        return False

    def deliver(self, take: Callable[[int, str], object]) -> None:
        """Pass each loss (rank, how) to ``take``, those so far and all from now on: this rank is part of its world."""
        self._take = take
        self.reporter.phase(Phase.MEMBER)
        losses, self._losses = self._losses, []
        for loss in losses:
            take(loss.rank, loss.how)

    def _read_now(self) -> None:
        """Read data that has arrived but that the loop has not noticed yet."""
        if self._descriptor is not None:
            self._read()

    def _read(self) -> None:
        assert self._descriptor is not None
        try:
            chunk = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:  # the agent is gone
            self._stop_reading()
            return
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        for line in lines:
            fields = json.loads(line)
            if fields.pop("generation") != self._generation:
                self.stale += 1
            elif "condition" in fields:
                self.on_condition(fields["rank"], fields["condition"])
            else:
                self._receive(Loss(**fields))

    def _receive(self, loss: Loss) -> None:
        if self._take is not None:
            self._take(loss.rank, loss.how)
            return
        self._losses.append(loss)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _stop_reading(self) -> None:
        if self._descriptor is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._descriptor = None

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_SECONDS):
            self.reporter.beat()


def encode_loss(loss: Loss, *, generation: int) -> bytes:
    """Encode ``loss``, of a rank of that generation, as the agent writes it."""
    return json.dumps({"generation": generation, **loss._asdict()}).encode() + b"\n"


def encode_condition(rank: int, how: str, *, generation: int) -> bytes:
    """Encode the condition of ``rank``, of that generation, as the agent writes it; "": it runs."""
    return json.dumps({"generation": generation, "rank": rank, "condition": how}).encode() + b"\n"
