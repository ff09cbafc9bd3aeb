"""Calls to all actors of a mesh: all values together, or each as it arrives.

``Notices`` notifies the actors that still work of failures of others; ``CallCounter`` counts asks in flight per rank.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeAlias, TypeVar

from asyncpar.actors.meshes.shape import Coordinates, MeshShape
from asyncpar.actors.meshes.values import MeshValues, mesh_error
from asyncpar.actors.runtime.ref import ActorRef, Messenger, Told
from asyncpar.errors import AsyncparError

R = TypeVar("R")

_END: Final = object()


class _Outcomes(Generic[R]):
    """Results and failures of the calls of one round."""

    def __init__(self, notices: Notices) -> None:
        self.found: dict[int, R] = {}
        self.failures: dict[int, Exception] = {}
        self._notices = notices

    async def follow(self, rank: int, call: Coroutine[Any, Any, R]) -> None:
        """Run ``call`` and record its result or failure."""
        try:
            self.found[rank] = await call
        except Exception as error:  # noqa: BLE001  # from an actor on this rank it may be the error of ``on_stop``
            self.failures[rank] = error
        self._notices.answered(rank, self.failures.get(rank))

    def values(self, what: str, shape: MeshShape) -> MeshValues[R]:
        """Return the values if all calls have succeeded; else raise ``MeshError``."""
        if self.failures:
            raise mesh_error(what, shape, self.failures, self.found)
        return MeshValues(shape, self.found)


async def collect(
    what: str, shape: MeshShape, calls: Mapping[int, Coroutine[Any, Any, R]], notices: Notices
) -> MeshValues[R]:
    """Run the ``calls``, one for each rank, at once, and return their values when all have ended.

    If some fail, the others go on, and ``MeshError`` is raised at the end.  Cancelling this cancels all.
    """
    with notices:
        outcomes = _Outcomes[R](notices)
        async with asyncio.TaskGroup() as tasks:
            for rank, call in calls.items():
                tasks.create_task(outcomes.follow(rank, call))
    return outcomes.values(what, shape)


async def results(
    what: str, shape: MeshShape, calls: Mapping[int, Coroutine[Any, Any, R]], notices: Notices
) -> AsyncGenerator[tuple[Coordinates, R], None]:
    """Yield the value of each call with its place, first come first; then raise ``MeshError`` if some have failed."""
    with notices:
        outcomes = _Outcomes[R](notices)
        async with Arrivals[None]() as arrivals:
            for rank, call in calls.items():
                arrivals.begin(rank, outcomes.follow(rank, call))
            while arrivals:
                rank, task = await arrivals.take()
                task.result()
                if rank in outcomes.found:
                    yield shape.coordinates(rank), outcomes.found[rank]
    outcomes.values(what, shape)


async def items(
    what: str, shape: MeshShape, streams: Mapping[int, AsyncGenerator[R, None]], notices: Notices
) -> AsyncGenerator[tuple[Coordinates, R], None]:
    """Yield the items of all ``streams`` with their places, first come first, those of one stream in its order.

    A stream that fails does not end the others; ``MeshError`` is raised when all have ended.  All are closed at the
    end.
    """
    failures: dict[int, Exception] = {}
    with notices:
        try:
            async with Arrivals[Any]() as arrivals:
                for rank, stream in streams.items():
                    arrivals.begin(rank, _next_of(stream))
                while arrivals:
                    rank, task = await arrivals.take()
                    try:
                        item = task.result()
                    except AsyncparError as error:
                        failures[rank], item = error, _END
                    if item is _END:
                        notices.answered(rank, failures.get(rank))
                    else:
                        yield shape.coordinates(rank), item
                        arrivals.begin(rank, _next_of(streams[rank]))
        finally:
            for stream in streams.values():
                await stream.aclose()
    if failures:
        raise mesh_error(what, shape, failures, {})


async def _next_of(stream: AsyncGenerator[R, None]) -> R | object:
    return await anext(stream, _END)


T = TypeVar("T")


class Arrivals(Generic[T]):
    """The work of several ranks, in tasks; its ``async with`` cancels unfinished ones at its end.

    Unlike a task group it may be left in the middle, like an async generator whose reader has seen enough.
    """

    def __init__(self) -> None:
        self._ranks: dict[asyncio.Task[T], int] = {}
        self._done: asyncio.Queue[asyncio.Task[T]] = asyncio.Queue()

    def __len__(self) -> int:
        """Number of tasks not taken yet."""
        return len(self._ranks)

    def begin(self, rank: int, work: Coroutine[Any, Any, T]) -> None:
        """Run ``work`` for ``rank``."""
        task = asyncio.create_task(work)
        self._ranks[task] = rank
        task.add_done_callback(self._done.put_nowait)

    async def take(self) -> tuple[int, asyncio.Task[T]]:
        """Wait for the next task that has ended; return its rank and the task."""
        task = await self._done.get()
        return self._ranks.pop(task), task

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        tasks = list(self._ranks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)


INTERVAL: Final = 0.5
"""Seconds from the first failure to the first notice, and from each notice to the next."""

GiveUp: TypeAlias = Callable[[int, str], None]
"""Ends the collectives of the round's actors; called with the rank that is the cause, and the reason."""


class Notices:
    """Gives up the collectives of a failed round, as long as some actors still work, and once at the end.

    Those may wait for a rank that has failed; other work goes on.  The first notice comes after ``INTERVAL``, because
    most ranks detect the failure themselves, with a better error.  Use it in a ``with`` statement.
    """

    def __init__(self, rank: int, ranks: Iterable[int], give_up: GiveUp) -> None:
        """``rank`` is the calling one, ``ranks`` are those that are called."""
        self._rank = rank
        self._waiting = set(ranks)
        self._give_up = give_up
        self._failure: tuple[int, str] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def answered(self, rank: int, failure: Exception | None = None) -> None:
        """Record that ``rank`` has answered or failed."""
        self._waiting.discard(rank)
        if failure is not None and self._failure is None:
            lines = str(failure).splitlines() or [type(failure).__name__]
            self._failure = rank, f"rank {rank} failed: {lines[0]}"
            self._arm()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL, self._remind)

    def _remind(self) -> None:
        assert self._failure is not None
        if self._waiting:
            self._give_up(*self._failure)
            self._arm()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if error is not None and self._waiting and self._failure is None:
            self._failure = self._rank, f"rank {self._rank} cancelled the call"
        if self._failure is not None:
            self._give_up(*self._failure)


class CallCounter(Messenger):
    """Passes the messages of a mesh's references to ``messenger`` and counts the pending asks, by rank."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._asks: Counter[int] = Counter()

    @property
    def is_closed(self) -> bool:
        return self._messenger.is_closed

    def waiting(self, rank: int) -> int:
        """Return the number of asks that wait for the actor on ``rank``."""
        return self._asks[rank]

    def ask(
        self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Coroutine[Any, Any, Any]:
        return self.counted(ref.rank, self._messenger.ask(ref, endpoint, arguments, keywords))

    def tell(self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Told:
        return self._messenger.tell(ref, endpoint, arguments, keywords)

    def stream(
        self, ref: ActorRef[Any], endpoint: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        return self._messenger.stream(ref, endpoint, arguments, keywords)

    async def counted(self, rank: int, ask: Coroutine[Any, Any, R]) -> R:
        """Return the result of ``ask`` to the actor on ``rank``."""
        self._asks[rank] += 1
        try:
            return await ask
        finally:
            self._asks[rank] -= 1
