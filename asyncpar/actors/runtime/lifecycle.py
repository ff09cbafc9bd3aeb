"""Start and end of one rank's actors, also on request of other ranks, and reports of ends to watchers and owners."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Final

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.runtime.callee import Callee
from asyncpar.actors.runtime.calls import CURRENT
from asyncpar.actors.runtime.cell import ActorSpec, Cell, Services
from asyncpar.actors.runtime.ending import DownReason
from asyncpar.actors.runtime.endpoint import EndpointCatalog, describe_constructor
from asyncpar.actors.runtime.executor import EndpointGuard
from asyncpar.actors.runtime.failure import begin_in_user_code, describe_error, describe_failure, error_text
from asyncpar.actors.runtime.groups import Groups
from asyncpar.actors.runtime.message import MeshPlace
from asyncpar.actors.runtime.outbound import Outbound
from asyncpar.actors.runtime.ref import ActorRef, Messenger
from asyncpar.actors.runtime.registry import ActorRegistry, find_actor_class
from asyncpar.actors.runtime.watches import Watches, decode_down
from asyncpar.core.concurrency.worker import ENDS_PROGRAM
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.net.transport.links import MAX_MESSAGE_BYTES
from asyncpar.net.wire.payload import Extension, PayloadEncoder

_LOG = logging.getLogger(__name__)

PATIENCE: Final = 5.0
"""Seconds after which a closing node logs the actor for which it waits."""

_MOST_STARTED: Final = 1000

_UNENDING: Final = (
    "it was cancelled and has not ended; a plain def endpoint has to return by itself, and no code may swallow "
    "CancelledError"
)


class Lifecycle:
    """Starts the actors of one rank, and reports their ends: to watchers, to owners, otherwise to the log."""

    def __init__(
        self,
        registry: ActorRegistry,
        endpoints: EndpointCatalog,
        *,
        messenger: Messenger,
        extension: Extension,
        tasks: asyncio.TaskGroup,
        callee: Callee,
        watches: Watches,
        outbound: Outbound,
        on_spawn: Callable[[], None],
    ) -> None:
        self.groups = Groups()
        self._registry = registry
        self._messenger = messenger
        self._extension = extension
        self._tasks = tasks
        self._callee = callee
        self._outbound = outbound
        self._on_spawn = on_spawn
        self._services = Services(
            callee=callee, groups=self.groups, tasks=tasks, watches=watches, spawn=self.spawn, ended=self.ended
        )
        self._endpoints = endpoints
        self._watched: dict[tuple[int, int], Cell] = {}

    # -- starting --------------------------------------------------------------------------------------------------

    async def spawn(
        self,
        actor_class: type[Actor],
        create: Callable[[], Actor],
        name: str | None,
        owner: Cell | None = None,
        place: MeshPlace | None = None,
        guard: EndpointGuard | None = None,
    ) -> ActorRef[Any]:
        """Start an actor and return when its ``on_start`` has ended.  See ``ActorSystem.spawn``."""
        check_actor_class(actor_class)
        rank, own_name = self._registry.rank, self._registry.new_name(name, actor_class)
        ref: ActorRef[Any] = ActorRef(self._messenger, name=own_name, rank=rank, actor_class=actor_class)
        endpoints = self._endpoints[actor_class]
        spec = ActorSpec(
            ref=ref,
            actor_class=actor_class,
            create=create,
            endpoints=endpoints,
            owner=owner,
            place=place,
            guard=guard,
        )
        cell = Cell(spec, services=self._services)
        self._registry.add(cell)
        if owner is not None:
            owner.children = owner.children or []
            owner.children.append(cell)
        self._on_spawn()
        started = cell.started
        assert started is not None, "it has not begun"
        cell.task = self._tasks.create_task(cell.run(), name=own_name)  # a name of its own takes 80 bytes
        try:
            await started
        except asyncio.CancelledError:
            if cell.has_served:
                cell.stop()
            else:
                cell.kill()
            raise
        return ref

    async def spawn_for(self, request: message.Spawn, payload: memoryview) -> ActorRef[Any]:
        """Start the actor that another rank asked for.  Raises ``UsageError`` if the request is wrong."""
        actor_class = find_actor_class(request.actor_class)
        constructor = describe_constructor(actor_class, self._extension)
        args, kwargs = constructor.bind(request.arguments, request.keywords, payload)
        return await self.spawn(
            actor_class, lambda: actor_class(*args, **kwargs), request.name or None, place=request.place
        )

    # -- watchers --------------------------------------------------------------------------------------------------

    def watched(self, rank: int, watch: message.WatchMessage) -> None:
        """Register a watch of ``rank``; answer at once if the actor does not exist."""
        cell = self._registry.cells.get(watch.actor)
        if cell is None:
            reason = DownReason.CLOSED if self._registry.is_closing else DownReason.MISSING
            self._outbound.send_message(rank, message.Downed(watch.watch, reason))
        else:
            cell.watchers = cell.watchers or set()
            cell.watchers.add((rank, watch.watch))
            self._watched[rank, watch.watch] = cell

    def unwatched(self, rank: int, number: int) -> None:
        """Remove a watch of ``rank``."""
        cell = self._watched.pop((rank, number), None)
        if cell is not None and cell.watchers:
            cell.watchers.discard((rank, number))

    def peer_lost(self, rank: int) -> None:
        """Remove all watches of a lost rank."""
        for watcher, number in [watch for watch in self._watched if watch[0] == rank]:
            self.unwatched(watcher, number)

    async def retire(self, names: Collection[str], *, within: float, handles_waiting: bool) -> None:
        """End the actors called ``names`` like ``Cell.retire``; wait for their ends, at most ``within`` seconds."""
        self._registry.is_closing = True
        cells = [self._registry.cells[name] for name in names if name in self._registry.cells]
        for cell in cells:
            cell.retire(handles_waiting=handles_waiting)
        tasks = [cell.task for cell in cells if cell.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=within)

    async def close(self) -> None:
        """End every actor, newest first and owners before their children, cancelling their work."""
        self._registry.is_closing = True
        while self._registry.cells:
            cell = next(reversed(self._registry.cells.values()))
            while cell.owner is not None and self._registry.cells.get(cell.owner.name) is cell.owner:
                cell = cell.owner  # it knows the order in which to end its children
            cell.is_dismissed = True
            cell.close()
            while not await cell.wait_ended(PATIENCE):
                _LOG.warning("rank %d: the node waits for actor %r: %s", cell.ref.rank, cell.name, _UNENDING)

    # -- ends --------------------------------------------------------------------------------------------------------

    def ended(self, cell: Cell) -> None:
        """Remove ``cell``, which handles nothing more, and notify its watchers and its owner."""
        self._registry.remove(cell)
        self._callee.settle(cell.name)
        details = () if cell.ending.error is None else describe_error(cell.ending.error)
        for rank, number in list(cell.watchers or ()):  # a listener may add or remove watches
            self._watched.pop((rank, number), None)
            self._outbound.send_message(rank, message.Downed(number, cell.ending.reason, *details))
        self._notify_owner(cell, message.Downed(0, cell.ending.reason, *details))
        self._log_unreported(cell)

    def _log_unreported(self, cell: Cell) -> None:
        """Log errors of which nobody else is notified: pending failures of children, and the error of ``on_stop``."""
        for down in cell.unreported:
            if down.error is not None:
                text = "rank %d: actor %r failed, and %r ended before it was notified"
                _LOG.error(text, cell.ref.rank, down.ref.name, cell.ref, exc_info=down.error)
        if cell.ending.stop_error is not None and not cell.listeners:
            text = "rank %d: on_stop of actor %r raised"
            begin_in_user_code(cell.ending.stop_error)
            _LOG.error(text, cell.ref.rank, cell.name, exc_info=cell.ending.stop_error)

    def _notify_owner(self, cell: Cell, downed: message.Downed) -> None:
        """Notify the owner of an end that it did not cause; without an owner, log the failure."""
        owner = cell.owner
        if owner is not None:
            assert owner.children is not None, "it has this one"
            owner.children.remove(cell)
        if not cell.has_served:
            return  # the spawn raises the error
        if owner is not None and not owner.is_finishing and not cell.is_dismissed:
            owner.notify("on_child_down", decode_down(cell.ref, downed))
        elif cell.ending.error is not None:
            _LOG.error("rank %d: actor %r failed", cell.ref.rank, cell.name, exc_info=cell.ending.error)


def check_actor_class(actor: object) -> None:
    """Raise ``UsageError`` unless ``actor`` is a subclass of ``Actor``."""
    if not (isinstance(actor, type) and issubclass(actor, Actor)):
        raise UsageError(f"actor class: expected a subclass of Actor, got {actor!r}")


class Requests:
    """Serves requests, each in a task of its own, and answers each once unless its sender has gone."""

    def __init__(
        self, registry: ActorRegistry, lifecycle: Lifecycle, *, tasks: asyncio.TaskGroup, outbound: Outbound
    ) -> None:
        self._registry = registry
        self._lifecycle = lifecycle
        self._tasks = tasks
        self._outbound = outbound
        self._serving: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._started: OrderedDict[tuple[int, int], weakref.ref[Cell]] = OrderedDict()
        """The actors that were started last: a cancellation may cross the answer."""
        self._is_closed = False

    @property
    def serving(self) -> int:
        """Number of requests that have arrived and are not answered yet."""
        return len(self._serving)

    def spawn(self, sender: int, request: message.Spawn, payload: memoryview) -> None:
        """Start an actor for ``sender``."""
        self._serve(sender, request.call, self._spawn(sender, request, payload))

    def end(self, sender: int, request: message.EndMessage) -> None:
        """End an actor for ``sender``."""
        self._serve(sender, request.call, self.end_actor(request.actor, is_kill=request.is_kill))

    def cancel(self, rank: int, call: int) -> None:
        """Cancel a request; an actor that it has started is stopped."""
        task = self._serving.pop((rank, call), None)
        if task is not None and task.cancel():
            return
        started = self._started.pop((rank, call), None)
        cell = None if started is None else started()
        if cell is not None:
            cell.stop()

    def peer_lost(self, rank: int) -> None:
        """Cancel the requests of a lost rank."""
        for sender, call in [place for place in self._serving if place[0] == rank]:
            self.cancel(sender, call)

    def close(self) -> None:
        """Answer nothing more, and refuse new requests."""
        self._is_closed = True
        for task in self._serving.values():
            task.cancel()

    async def end_actor(self, name: str, *, is_kill: bool) -> None:
        """End an actor of this rank and return when it has ended.  Killing one that has already ended does nothing.

        Raises ``UsageError`` if there is none, and the exception of its ``on_stop``.
        """
        cell = self._registry.cells.get(name)
        if cell is None:
            gone = self._registry.exit_reason(name)
            if is_kill and gone:
                return
            raise UsageError(
                f"ref: there is no actor {name!r} on rank {self._registry.rank}"
                + (f" any more: {gone}" if gone else "")
            )
        if cell.is_waiting_for():
            raise UsageError(
                f"ref: {cell.ref!r} cannot wait for its own end, nor a child for its owner's; use self.stop_self()"
            )
        if is_kill:
            cell.kill()
        else:
            cell.stop()
        await cell.wait_stopped()

    def _serve(self, sender: int, call: int, work: Coroutine[Any, Any, object]) -> None:
        place = (sender, call)
        if place in self._serving:
            work.close()
            raise ProtocolError(f"actor message: rank {sender} sent request {call} twice")
        if self._is_closed:
            work.close()
            self._outbound.send_message(sender, message.FailureMessage(call, message.CLOSED, "the node was closed"))
            return
        task = self._tasks.create_task(self._answer(sender, call, work))
        self._serving[place] = task

        def over(_: asyncio.Task[None]) -> None:
            self._serving.pop(place, None)
            work.close()  # it never began if the task was cancelled before its first step

        task.add_done_callback(over)

    async def _answer(self, sender: int, call: int, work: Coroutine[Any, Any, object]) -> None:
        CURRENT.set(None)  # the task copied the context in which the link was opened
        try:
            value = await work
        except UsageError as error:
            self._outbound.send_message(sender, message.FailureMessage(call, message.USAGE, error_text(error)))
        except asyncio.CancelledError:
            work.close()
            if self._is_closed:
                self._outbound.send_message(sender, message.FailureMessage(call, message.CLOSED, "the node was closed"))
        except ENDS_PROGRAM:
            raise
        except BaseException as error:  # noqa: BLE001  # user code; the caller gets the error
            self._outbound.send_message(sender, describe_failure(call, error))
        else:
            encoder = PayloadEncoder(limit=MAX_MESSAGE_BYTES)
            reply = message.Reply(call, encoder.part(value, what="the answer"))
            self._outbound.send_quietly(sender, encoder.finish(reply, what="the answer"))

    async def _spawn(self, sender: int, request: message.Spawn, payload: memoryview) -> str:
        ref = await self._lifecycle.spawn_for(request, payload)
        cell = self._registry.cells.get(ref.name)
        if cell is not None:
            self._started[sender, request.call] = weakref.ref(cell)
            if len(self._started) > _MOST_STARTED:
                self._started.popitem(last=False)
        return ref.name
