"""Start the actors of one rank, and report their ends to watchers and owners."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.runtime.callee import Callee
from asyncpar.actors.runtime.cell import ActorSpec, Cell, Services
from asyncpar.actors.runtime.ending import DownReason
from asyncpar.actors.runtime.endpoint import EndpointCatalog, describe_constructor
from asyncpar.actors.runtime.failure import begin_in_user_code, describe_error
from asyncpar.actors.runtime.groups import Groups
from asyncpar.actors.runtime.message import MeshPlace
from asyncpar.actors.runtime.outbound import Outbound
from asyncpar.actors.runtime.ref import ActorRef, Messenger
from asyncpar.actors.runtime.registry import ActorRegistry, find_actor_class
from asyncpar.actors.runtime.watches import Watches, decode_down
from asyncpar.errors import UsageError
from asyncpar.net.wire.payload import Extension

_LOG = logging.getLogger(__name__)

PATIENCE: Final = 5.0
"""Seconds after which a node that closes says for which actor it waits."""

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
    ) -> ActorRef[Any]:
        """Start an actor and return when its ``on_start`` has.  See ``ActorSystem.spawn``."""
        check_actor_class(actor_class)
        rank, own_name = self._registry.rank, self._registry.new_name(name, actor_class)
        ref: ActorRef[Any] = ActorRef(self._messenger, name=own_name, rank=rank, actor_class=actor_class)
        endpoints = self._endpoints[actor_class]
        spec = ActorSpec(ref=ref, actor_class=actor_class, create=create, endpoints=endpoints, owner=owner, place=place)
        cell = Cell(spec, services=self._services)
        self._registry.add(cell)
        if owner is not None:
            owner.children.append(cell)
        self._on_spawn()
        cell.task = self._tasks.create_task(cell.run(), name=f"actor {own_name} of rank {rank}")
        try:
            await cell.started
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
            self._outbound.say(rank, message.Downed(watch.watch, reason))
        else:
            cell.watchers.add((rank, watch.watch))
            self._watched[rank, watch.watch] = cell

    def unwatched(self, rank: int, number: int) -> None:
        """Remove a watch of ``rank``."""
        cell = self._watched.pop((rank, number), None)
        if cell is not None:
            cell.watchers.discard((rank, number))

    def peer_lost(self, rank: int) -> None:
        """Remove all watches of a lost rank."""
        for watcher, number in [watch for watch in self._watched if watch[0] == rank]:
            self.unwatched(watcher, number)

    async def close(self) -> None:
        """End every actor, newest first and owners before their children, cancelling what it does."""
        self._registry.is_closing = True
        while self._registry.cells:
            cell = next(reversed(self._registry.cells.values()))
            while cell.owner is not None and self._registry.cells.get(cell.owner.name) is cell.owner:
                cell = cell.owner  # which knows in which order to end its children
            cell.is_dismissed = True
            cell.close()
            while not await cell.wait_ended(PATIENCE):
                _LOG.warning("rank %d: the node waits for actor %r: %s", cell.ref.rank, cell.name, _UNENDING)

    # -- ends --------------------------------------------------------------------------------------------------------

    def ended(self, cell: Cell) -> None:
        """Forget ``cell``, which handles nothing more, and tell its watchers and its owner."""
        self._registry.remove(cell)
        self._callee.settle(cell.name)
        details = () if cell.ending.error is None else describe_error(cell.ending.error)
        for rank, number in list(cell.watchers):  # a listener may add or remove watches
            self._watched.pop((rank, number), None)
            self._outbound.say(rank, message.Downed(number, cell.ending.reason, *details))
        self._tell_owner(cell, message.Downed(0, cell.ending.reason, *details))
        self._log_unheard(cell)

    def _log_unheard(self, cell: Cell) -> None:
        """Log errors that are reported to no one else: unheard failures of children, and what ``on_stop`` raised."""
        for down in cell.unheard:
            if down.error is not None:
                text = "rank %d: actor %r failed, and %r ended before it heard of that"
                _LOG.error(text, cell.ref.rank, down.ref.name, cell.ref, exc_info=down.error)
        if cell.ending.stop_error is not None and not cell.listeners:
            text = "rank %d: on_stop of actor %r raised"
            begin_in_user_code(cell.ending.stop_error)
            _LOG.error(text, cell.ref.rank, cell.name, exc_info=cell.ending.stop_error)

    def _tell_owner(self, cell: Cell, downed: message.Downed) -> None:
        """Notify the owner of an end that it did not cause; without an owner, log the failure."""
        owner = cell.owner
        if owner is not None:
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
