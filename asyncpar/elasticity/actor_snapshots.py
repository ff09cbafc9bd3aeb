"""Snapshots of the actors of an elastic job, in the memory of the ranks that run them, and of their mirrors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.elasticity.actor_places import ActorPlacement
from asyncpar.node import Node

SNAPSHOTS: Final = "asyncpar/snapshots"
"""The name of the actor on each rank that keeps snapshots of other ranks' actors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSnapshot:
    """The ``version``-th saved state of an actor."""

    version: int
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorFailures:
    """The failures of an actor: seconds since each restart, failures in a row, and whether it stays down."""

    ages: tuple[float, ...] = ()
    in_a_row: int = 0
    has_given_up: bool = False


AdoptFailures = Callable[[str, ActorFailures], None]


class _Shelf(Actor):
    """Sends and receives the snapshots of one rank."""

    def __init__(self, kept: dict[str, ActorSnapshot], adopt: AdoptFailures) -> None:
        self._kept = kept
        self._adopt = adopt

    @endpoint
    async def note(self, name: str, failures: ActorFailures) -> None:
        """Record how often an actor of another rank has failed."""
        self._adopt(name, failures)

    @endpoint
    async def put(self, name: str, version: int, content: bytes) -> None:
        """Keep a snapshot, unless there is a newer one."""
        if name not in self._kept or self._kept[name].version < version:
            self._kept[name] = ActorSnapshot(version=version, content=bytes(content))

    @endpoint
    async def get(self, name: str) -> tuple[int, bytes] | None:
        """Return the snapshot of the actor ``name``."""
        kept = self._kept.get(name)
        return None if kept is None else (kept.version, kept.content)


class ActorSnapshots:
    """The snapshots that this rank keeps, over all its worlds."""

    def __init__(self) -> None:
        self._kept: dict[str, ActorSnapshot] = {}
        self._node: Node | None = None
        self._placements: Mapping[str, ActorPlacement] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def version(self, name: str) -> int:
        """Return the version of the local snapshot of the actor ``name``, 0 if there is none."""
        kept = self._kept.get(name)
        return 0 if kept is None else kept.version

    def content(self, name: str) -> bytes | None:
        """Return the local snapshot of the actor ``name``."""
        kept = self._kept.get(name)
        return None if kept is None else kept.content

    async def open(self, node: Node, adopt: AdoptFailures) -> None:
        """Exchange snapshots, and records of failures of actors, with other ranks of the world of ``node``."""
        await node.actor_system.spawn(_Shelf, self._kept, adopt, name=SNAPSHOTS)

    def place(self, node: Node, placements: Mapping[str, ActorPlacement]) -> None:
        """Use the places of the actors in the world of ``node`` from now on."""
        self._node, self._placements = node, placements

    def close(self) -> None:
        """Stop sending to other ranks: the world is over."""
        self._node = None

    async def save(self, name: str, content: bytes) -> None:
        """Keep a new snapshot, and return when the mirrors have it; between two worlds, at once.

        Raises ``PeerError`` when a mirror is lost: the next world has other mirrors, which get this rank's snapshot.
        """
        self._kept[name] = ActorSnapshot(version=self.version(name) + 1, content=content)
        await self.mirror(name)

    async def fetch(self, name: str) -> None:
        """Get the newest snapshot of the actor ``name`` in this world, from the rank that has it."""
        node, placement = self._node, self._placements[name]
        if node is None or placement.source is None or placement.source == node.rank:
            return
        found = await node.ref(SNAPSHOTS, placement.source, actor_class=_Shelf).get(name)
        if found is not None:
            self._kept[name] = ActorSnapshot(version=found[0], content=found[1])

    async def mirror(self, name: str) -> None:
        """Return when the mirrors of the actor ``name`` have its snapshot."""
        node, placement, kept = self._node, self._placements.get(name), self._kept.get(name)
        if node is None or placement is None or kept is None:
            return
        for rank in placement.mirrors:
            await node.ref(SNAPSHOTS, rank, actor_class=_Shelf).put(name, kept.version, kept.content)

    async def note(self, name: str, failures: ActorFailures) -> None:
        """Return when the mirrors know how often the actor ``name`` has failed."""
        node, placement = self._node, self._placements.get(name)
        if node is None or placement is None:
            return
        for rank in placement.mirrors:
            await node.ref(SNAPSHOTS, rank, actor_class=_Shelf).note(name, failures)

    async def renew(self, name: str) -> None:
        """Send the snapshot of the actor ``name``, if this rank has the newest, to its current mirrors."""
        node, placement = self._node, self._placements[name]
        if node is not None and node.rank == (placement.source if placement.rank is None else placement.rank):
            await self.mirror(name)
