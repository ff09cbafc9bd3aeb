"""The queue of messages of an actor, and the queues and tasks of its concurrent endpoints."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from asyncpar.actors.runtime.calls import Delivery
from asyncpar.actors.runtime.declaration import MailboxPolicy, WhenFull
from asyncpar.core.concurrency.worker import WorkerThread

BURST: Final = 32
"""Number of messages handled in a row before the event loop gets a turn, if no endpoint gave it one."""


class Mailbox:
    """FIFO queue of deliveries, bounded by the policy of the actor class."""

    __slots__ = ("_drops_oldest", "_limit", "_queue")

    def __init__(self, policy: MailboxPolicy) -> None:
        self._limit = policy.limit
        self._drops_oldest = policy.when_full is WhenFull.DROP_OLDEST
        self._queue: deque[Delivery] | None = None  # most actors are idle, and a deque is large

    def __len__(self) -> int:
        return 0 if self._queue is None else len(self._queue)

    def put(self, delivery: Delivery) -> Delivery | None:
        """Add ``delivery``; return the one for which there is no room: ``delivery`` itself, or the oldest."""
        queue = self._queue
        if queue is None:
            queue = self._queue = deque()
        if self._limit is not None and len(queue) >= self._limit:
            if not self._drops_oldest:
                return delivery
            queue.append(delivery)
            return queue.popleft()
        queue.append(delivery)
        return None

    def pop(self) -> Delivery | None:
        """Remove and return the oldest delivery, None if there is none."""
        if not self._queue:
            return None
        return self._queue.popleft()

    def clear(self) -> list[Delivery]:
        """Remove and return all deliveries."""
        queue, self._queue = self._queue, None
        return [] if queue is None else list(queue)


CreateTask = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
Handle = Callable[[Delivery, WorkerThread], Awaitable[None]]


class ConcurrentEndpoint:
    """The calls of one concurrent endpoint: begun in order, up to ``limit`` at once."""

    def __init__(self, name: str, limit: int, policy: MailboxPolicy, handle: Handle, create_task: CreateTask) -> None:
        self._limit = limit
        self._handle = handle
        self._create_task = create_task
        self._mailbox = Mailbox(policy)
        self._workers: set[asyncio.Task[None]] = set()
        self._running: dict[Delivery, None] = {}
        self._thread = WorkerThread(name, threads=limit)
        self._is_open = False
        self.on_idle: Callable[[], None] = lambda: None

    @property
    def is_busy(self) -> bool:
        """Whether calls run or wait."""
        return bool(self._workers) or len(self._mailbox) > 0

    def put(self, delivery: Delivery) -> Delivery | None:
        """Begin ``delivery`` as soon as there is a place; return the one for which there is no room, if any."""
        refused = self._mailbox.put(delivery)
        self._work()
        return refused

    def open(self) -> None:
        """Start the waiting calls; the actor is ready."""
        self._is_open = True
        for _ in range(min(len(self._mailbox), self._limit)):
            self._work()

    def clear(self) -> list[Delivery]:
        """Start no more calls, and return the waiting ones."""
        self._is_open = False
        return self._mailbox.clear()

    def runs(self, delivery: Delivery | None) -> bool:
        """Return whether ``delivery`` is being handled here."""
        return delivery in self._running

    def interrupt(self) -> None:
        """Cancel the running calls."""
        for delivery in list(self._running):
            if delivery.execution is not None:
                delivery.execution.interrupt()

    async def wait_idle(self) -> None:
        """Wait until no call runs."""
        while self._workers:
            await asyncio.wait(set(self._workers))

    def close(self) -> None:
        """End the threads."""
        self._thread.close()

    def _work(self) -> None:
        if self._is_open and len(self._workers) < self._limit and len(self._mailbox):
            worker = self._create_task(self._run())
            self._workers.add(worker)
            worker.add_done_callback(self._done)

    async def _run(self) -> None:
        handled = 0
        while (delivery := self._mailbox.pop()) is not None:
            self._running[delivery] = None
            try:
                await self._handle(delivery, self._thread)
            finally:
                self._running.pop(delivery, None)
            handled += 1
            if handled % BURST == 0:
                await asyncio.sleep(0)

    def _done(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        self._work()
        if not self.is_busy:
            self.on_idle()


class ConcurrentEndpoints:
    """All concurrent endpoints of one actor; each queue is made when its first message arrives."""

    def __init__(self, name: str, policy: MailboxPolicy, handle: Handle, create_task: CreateTask) -> None:
        self._name = name
        self._policy = policy
        self._handle = handle
        self._create_task = create_task
        self._endpoints: dict[str, ConcurrentEndpoint] = {}
        self._is_open = False
        self.on_idle: Callable[[], None] = lambda: None
        """Called whenever the last call has ended."""

    @property
    def is_busy(self) -> bool:
        """Whether calls run or wait."""
        return any(endpoint.is_busy for endpoint in self._endpoints.values())

    def put(self, delivery: Delivery) -> Delivery | None:
        """Add ``delivery`` to the queue of its endpoint; see ``ConcurrentEndpoint.put``."""
        endpoint = self._endpoints.get(delivery.endpoint)
        if endpoint is None:
            endpoint = self._endpoints[delivery.endpoint] = self._make(delivery)
        return endpoint.put(delivery)

    def open(self) -> None:
        """Start the waiting calls of every queue; the actor is ready."""
        self._is_open = True
        for endpoint in self._endpoints.values():
            endpoint.open()

    def clear(self) -> list[Delivery]:
        """Start no more calls, and return the waiting ones."""
        self._is_open = False
        return [delivery for endpoint in self._endpoints.values() for delivery in endpoint.clear()]

    def runs(self, delivery: Delivery | None) -> bool:
        """Return whether ``delivery`` is being handled here."""
        return any(endpoint.runs(delivery) for endpoint in self._endpoints.values())

    def interrupt(self) -> None:
        """Cancel the running calls."""
        for endpoint in self._endpoints.values():
            endpoint.interrupt()

    async def wait_idle(self) -> None:
        """Wait until no call runs."""
        for endpoint in self._endpoints.values():
            await endpoint.wait_idle()

    def close(self) -> None:
        """End the threads.  Called when no call runs."""
        for endpoint in self._endpoints.values():
            endpoint.close()

    def _make(self, delivery: Delivery) -> ConcurrentEndpoint:
        spec = delivery.spec
        assert spec is not None
        assert spec.concurrency is not None, "only concurrent endpoints have queues of their own"
        name = f"actor {self._name} {spec.name}"
        endpoint = ConcurrentEndpoint(name, spec.concurrency, self._policy, self._handle, self._create_task)
        endpoint.on_idle = lambda: None if self.is_busy else self.on_idle()
        if self._is_open:
            endpoint.open()
        return endpoint
