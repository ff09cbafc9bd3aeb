"""Start actors: for programs and owners on this rank, and for other ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from asyncpar.errors import UsageError
from asyncpar.runtime import message
from asyncpar.runtime.actor import Actor
from asyncpar.runtime.birth import Birth, Household
from asyncpar.runtime.cell import Cell
from asyncpar.runtime.endpoint import EndpointSpec, describe_constructor, describe_endpoints
from asyncpar.runtime.handler import Answers
from asyncpar.runtime.lookup import find_actor_class
from asyncpar.runtime.place import Place
from asyncpar.runtime.ref import ActorRef, Messenger
from asyncpar.runtime.roster import Roster
from asyncpar.wire.payload import Extension


class Spawner:
    """Makes the cells of one rank.  ``tasks`` is where their tasks are born."""

    def __init__(
        self,
        roster: Roster,
        *,
        rank: int,
        messenger: Messenger,
        extension: Extension,
        tasks: asyncio.TaskGroup,
        answers: Answers,
        on_spawn: Callable[[], None] = lambda: None,
    ) -> None:
        self.household: Household[Cell] | None = None
        """Where the cells live; set once, before the first is made."""
        self._answers = answers
        self._on_spawn = on_spawn
        self._roster = roster
        self._rank = rank
        self._messenger = messenger
        self._extension = extension
        self._tasks = tasks
        self._endpoints: dict[type[Actor], dict[str, EndpointSpec]] = {}

    async def spawn(
        self,
        actor_class: type[Actor],
        create: Callable[[], Actor],
        *,
        name: str | None,
        owner: Cell | None = None,
        place: Place | None = None,
    ) -> ActorRef[Any]:
        """Start an actor and return when its ``on_start`` has.  See ``ActorSystem.spawn``."""
        check_actor_class(actor_class)
        ref = ActorRef(
            self._messenger, name=self._roster.new_name(name, actor_class), rank=self._rank, actor_class=actor_class
        )
        birth: Birth[Cell] = Birth(
            ref=ref,
            actor_class=actor_class,
            create=create,
            endpoints=self.describe(actor_class),
            owner=owner,
            place=place,
        )
        assert self.household is not None
        cell = Cell(birth, answers=self._answers, household=self.household)
        self._roster.add(cell)
        if owner is not None:
            owner.children.append(cell)
        self._on_spawn()
        cell.task = self.create_task(cell.run(), name=f"actor {ref.name} of rank {self._rank}")
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
            actor_class, lambda: actor_class(*args, **kwargs), name=request.name or None, place=request.place
        )

    def create_task(self, work: Coroutine[Any, Any, None], *, name: str | None = None) -> asyncio.Task[None]:
        """Run ``work`` until this rank's system closes."""
        return self._tasks.create_task(work, name=name)

    def describe(self, actor_class: type[Actor]) -> dict[str, EndpointSpec]:
        """Return the endpoints of ``actor_class``, read once."""
        described = self._endpoints.get(actor_class)
        if described is None:
            described = self._endpoints[actor_class] = describe_endpoints(actor_class, self._extension)
        return described


def check_actor_class(actor: object) -> None:
    """Raise ``UsageError`` unless ``actor`` is a subclass of ``Actor``."""
    if not (isinstance(actor, type) and issubclass(actor, Actor)):
        raise UsageError(f"actor class: expected a subclass of Actor, got {actor!r}")
