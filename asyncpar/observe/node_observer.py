"""Observation of a node by its own program: its summary, and its events as they end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from asyncpar.core.observe.recorder import Recorder
from asyncpar.core.observe.records import EventState, parse_image
from asyncpar.errors import UsageError
from asyncpar.observe.image import Event, read_image
from asyncpar.observe.summary import RankSummary

if TYPE_CHECKING:
    from asyncpar.actors.runtime.system import ActorSystem
    from asyncpar.collectives.shared_memory.group import ArenaHost
    from asyncpar.net.transport.links import Links

_LEAST_SECONDS: Final = 0.01


class NodeObserver:
    """View of one node: ``node.observe``.  Each of several nodes of a process has its own.

    Use it on the node's loop.
    """

    def __init__(self, links: Links, actors: ActorSystem, arena: ArenaHost | None, is_stopping: asyncio.Event) -> None:
        self._links = links
        self._actors = actors
        self._arena = arena
        self._is_stopping = is_stopping

    def status(self) -> RankSummary:
        """Return the node's current state: pending operations and their awaited ranks, calls of actors, links, figures.

        It is the summary that `asyncpar status` shows of a rank.  It costs about a millisecond.  The event loop is
        never ``blocked`` in it, as the caller runs; in virtual time there are no figures of the process, and ``time``
        is the loop's.
        """
        from asyncpar.observe.rank_view import NodeParts, summarize_node  # only on demand

        return summarize_node(NodeParts(self._links, self._actors, self._arena, asyncio.get_running_loop()))

    def events(self, *, every: float = 0.5) -> EventStream:
        """Iterate over the events of this node that end after this call, in the order of their ends, until it stops.

        ``async for event in node.observe.events():`` yields operations, messages, spans, calls of actors and endpoints.
        They are read at intervals of ``every`` seconds of the loop's time.  A ring holds the last 4,096: if there are
        more in that time, some are missing, and the stream counts them as ``lost``.  Raises ``UsageError`` for less
        than 0.01 s.
        """
        if every < _LEAST_SECONDS:
            raise UsageError(f"every: expected at least {_LEAST_SECONDS:g} s, got {every:g}")
        return EventStream(EndedEvents(self._links.recorder), every, self._is_stopping)


class EventStream(AsyncIterator[Event]):
    """Events of one node as they end, for one ``async for``; it ends when the node has stopped."""

    def __init__(self, ended: EndedEvents, every: float, is_stopping: asyncio.Event) -> None:
        self._ended = ended
        self._every = every
        self._is_stopping = is_stopping
        self._is_over = False
        self._waiting: deque[Event] = deque()

    @property
    def lost(self) -> int:
        """Number of events missing so far: others took their places in the ring before they were read."""
        return self._ended.lost

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._waiting:
            if self._is_over:
                raise StopAsyncIteration
            with suppress(TimeoutError):
                async with asyncio.timeout(self._every):
                    await self._is_stopping.wait()
            self._is_over = self._is_stopping.is_set()
            self._waiting.extend(self._ended.take())
        return self._waiting.popleft()


class EndedEvents:
    """Events that have ended since the last inspection of a ring, of which only new content is read."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.lost = 0
        """Number of events that were overwritten between two inspections."""
        self._begun = self._passed_over = 0
        self._pending: frozenset[int] = frozenset()
        self._inspect()

    def take(self) -> list[Event]:
        """Return the events that have ended since the last call, in the order of their ends."""
        before, pending, passed_over = self._begun, self._pending, self._passed_over
        image = self._inspect()
        since = min({before, *(pending - self._pending)})
        if since >= self._begun:
            return []
        events = read_image(image, latest=self._begun - since).events
        found = {event.ticket for event in events if event.ticket >= before or event.ticket in pending}
        begun = self._begun - before - (self._passed_over - passed_over)
        self.lost += max(0, begun + len(pending) - len(found))
        new = [event for event in events if event.is_over and event.ticket in found]
        return sorted(new, key=lambda event: (event.ended or 0.0, event.ticket))

    def _inspect(self) -> bytes:
        image = self._recorder.snapshot()
        raw = parse_image(image, latest=1)
        self._begun = raw.begun
        self._passed_over = self._recorder.passed_over
        self._pending = frozenset(record.ticket for record in raw.records if record.state < EventState.COMPLETED)
        return image
