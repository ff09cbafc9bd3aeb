"""What a cell is made of, and where it lives.  Both speak of cells (``C``) without knowing them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from asyncpar.runtime.actor import Actor
from asyncpar.runtime.down import Down
from asyncpar.runtime.endpoint import EndpointSpec
from asyncpar.runtime.groups import Groups
from asyncpar.runtime.place import Place
from asyncpar.runtime.ref import ActorRef
from asyncpar.runtime.watches import Watch

C = TypeVar("C")
C_contra = TypeVar("C_contra", contravariant=True)


class Household(Protocol[C_contra]):
    """What a cell asks of the system it lives in, and tells it."""

    groups: Groups

    def ended(self, cell: C_contra) -> None:
        """The cell handles nothing more."""
        ...

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` beside the cell's own task."""
        ...

    async def spawn_child(
        self, cell: C_contra, actor: type[Actor], args: tuple[Any, ...], kwargs: dict[str, Any], *, name: str | None
    ) -> ActorRef[Any]:
        """Start an actor that ``cell`` owns.  Raises as ``ActorSystem.spawn``."""
        ...

    def watch(self, ref: ActorRef[Any], hear: Callable[[Down], None], among: set[Watch]) -> Watch:
        """Watch ``ref`` for the cell; until it ends, the watch is ``among`` those."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth(Generic[C]):
    """What a cell is made of.  ``create`` makes the actor; ``owner`` hears how it ends."""

    ref: ActorRef[Any]
    actor_class: type[Actor]
    create: Callable[[], Actor]
    endpoints: Mapping[str, EndpointSpec]
    owner: C | None = None
    place: Place | None = None
