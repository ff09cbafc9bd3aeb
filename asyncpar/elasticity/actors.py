"""Actors of an elastic job: they outlive worlds, and start again elsewhere, from a snapshot, when their rank is lost.

Theory of operation.  A world is a node of its own, with its own actor system, so every world starts the actors anew
around the objects of the last one: an actor that lives keeps its object, runs ``on_world`` before its first message,
and neither ``on_start`` nor ``on_stop``.  ``actor_places.py`` decides which rank runs which actor, ``actor_lives.py``
runs them.

Calls are not carried over.  When a world ends, messages that wait in a mailbox are refused at once, running calls have
half a second to end and to be answered, and callers without an answer get ``WorldChanged``: the call was done once or
not at all (one that is cut is undone, see ``LivingActor.judge``), and is never done twice.  Only the program knows
whether it may be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, Final, TypeVar, cast

from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.runtime.lifecycle import check_actor_class
from asyncpar.actors.runtime.registry import check_name, class_path
from asyncpar.actors.supervision.policy import Backoff, Intensity
from asyncpar.core.config.checks import check_count
from asyncpar.elasticity.actor_lives import ActorLives
from asyncpar.elasticity.actor_places import ActorPlacement, DeclaredActor, HeldActor, RankActors, place_actors
from asyncpar.elasticity.actor_refs import ElasticMesh, ElasticRef, JobActors
from asyncpar.elasticity.actor_snapshots import SNAPSHOTS, ActorFailures
from asyncpar.elasticity.elastic_actor import ActorPlan, ElasticActor
from asyncpar.errors import OperationMismatch, PeerError, StaleGeneration, UsageError, WorldChanged
from asyncpar.hosts.messages import WorldChange
from asyncpar.node import Node

A = TypeVar("A", bound=Actor)

KEY: Final = "asyncpar/actors"
HANDOVER: Final = 5.0
"""Seconds for which ranks wait for each other's last snapshots before a change without a loss."""

_LOG: Final = logging.getLogger(__name__)


class ElasticActors(JobActors):
    """The actors of an elastic job: ``job.actors``.  All ranks declare the same, before their first step."""

    def __init__(
        self, changed: Callable[[BaseException], WorldChanged], is_over: Callable[[BaseException], bool]
    ) -> None:
        """``changed`` makes the error of calls that the end of a world has ended; ``is_over`` recognizes that cause."""
        super().__init__(changed, is_over)
        self._identity = secrets.token_hex(8)
        self._plans: dict[str, ActorPlan] = {}
        self._lives = ActorLives(self._plans, self.ref, self)
        self._meshes: dict[str, ElasticMesh[Any]] = {}
        self._is_sealed = False
        self._node: Node | None = None

    # -- declaring -----------------------------------------------------------------------------------------------------

    def declare(
        self,
        name: str,
        actor: type[A],
        *args: Any,
        intensity: Intensity | None = None,
        backoff: Backoff | None = None,
        mirrors: int = 1,
        save_every: int | None = None,
        **kwargs: Any,
    ) -> A:
        """Declare one actor ``name`` of the class ``actor``, on some rank of the job, and return a reference to it.

        The reference finds the actor wherever it lives, in every world.  When its rank is lost, the actor starts again
        on another one; when it fails, on the same one, as often as ``intensity`` allows in all worlds together, after
        ``backoff``; then it is down for the rest of the job.  It goes on from its last snapshot; without one it begins
        anew, with the same arguments.  ``mirrors`` other ranks keep snapshots, on different hosts if there are: that
        many ranks may be lost at once besides the actor's own.  With ``save_every=n`` the actor saves after every n
        messages, before the last of them is answered: with 1, no answer is forgotten.

        Raises ``UsageError`` for a class that is not an ``ElasticActor``, a name that is taken, or after the first
        step.
        """
        declared = DeclaredActor(name=name, class_path=_path(actor), mirrors=check_count("mirrors", mirrors, least=0))
        plan = self._plan(declared, actor, lambda: actor(*args, **kwargs), intensity, backoff)
        self._add(replace(plan, save_every=_check_every(save_every)))
        return cast(A, self.ref(name))

    def declare_mesh(
        self,
        name: str,
        actor: type[A],
        *args: Any,
        places: int,
        intensity: Intensity | None = None,
        backoff: Backoff | None = None,
        mirrors: int = 1,
        save_every: int | None = None,
        **kwargs: Any,
    ) -> ElasticMesh[A]:
        """Declare an actor at each of ``places`` places, all on different ranks, and return their mesh.

        Places for which there is no rank are holes; newcomers fill them.  The actor at place 2 is called ``name[2]``.
        The other arguments are those of ``declare``.
        """
        check_count("places", places)
        check_count("mirrors", mirrors, least=0)
        mesh = ElasticMesh[A](self, name, actor, places)
        for place in range(places):
            own = mesh.name_of(place)
            declared = DeclaredActor(name=own, class_path=_path(actor), spread=name, mirrors=mirrors)
            plan = self._plan(declared, actor, lambda: actor(*args, **kwargs), intensity, backoff)
            self._add(replace(plan, save_every=_check_every(save_every), mesh=mesh))
        self._meshes[name] = mesh
        return mesh

    def ref(self, name: str) -> ElasticRef:
        """Return the reference to the actor ``name``.  Raises ``UsageError`` if none was declared."""
        if name not in self._plans:
            known = ", ".join(sorted(self._plans)) or "none"
            raise UsageError(f"actor: expected a declared one ({known}), got {name!r}")
        return ElasticRef(self, name, self._plans[name].actor_class)

    @property
    def is_used(self) -> bool:
        """Whether any were declared."""
        return bool(self._plans)

    def _plan(
        self,
        declared: DeclaredActor,
        actor: type[Any],
        create: Callable[[], Any],
        intensity: Intensity | None,
        backoff: Backoff | None,
    ) -> ActorPlan:
        return ActorPlan(
            declared=declared,
            actor_class=actor,
            create=create,
            intensity=intensity or Intensity(),
            backoff=backoff or Backoff(),
        )

    def _add(self, plan: ActorPlan) -> None:
        name = check_name(plan.declared.name)
        if name in self._plans or name == SNAPSHOTS:
            raise UsageError(f"actor: the name {name!r} is taken")
        if self._is_sealed:
            raise UsageError(f"actor {name!r}: declare all actors before the first step")
        self._plans[name] = plan

    # -- worlds --------------------------------------------------------------------------------------------------------

    async def enter_world(self, node: Node, change: WorldChange) -> None:
        """Start this rank's actors in the world of ``node``; return when all ranks have.  Collective.

        Raises ``PeerError`` when the world is over before that, and the errors of constructors, ``restore`` and
        ``on_start``: those are faults of the program.
        """
        self._is_sealed = True
        self._node = node
        await self._lives.snapshots.open(node, self._lives.adopt_failures)
        ranks = await self._exchange(node)
        self.placements = self._place(ranks, node)
        await self._lives.enter(node, self.placements, change)
        await node.world.barrier(key=KEY)
        for name in self.placements:
            await self._lives.snapshots.renew(name)
        for mesh in self._meshes.values():
            mesh.arrange(self.placements, node)
        await node.world.barrier(key=KEY)
        self._lives.open()
        self.open(node.actor_system)

    async def leave_world(self, *, is_planned: bool, is_last: bool) -> None:
        """End this world's actors.  ``is_planned``: no rank is lost, and all leave; then the last states are saved.

        ``is_last``: this rank enters no further world.
        """
        node, self._node = self._node, None
        if node is None:
            return
        self.close()
        try:
            await self._lives.leave(is_planned=is_planned, is_last=is_last)
            if is_planned and self._plans:
                await self._hand_over(node)
        finally:
            self._lives.snapshots.close()

    def end(self) -> None:
        """Forget the actors of this rank, which enters no further world: they live elsewhere now."""
        super().end()
        self._lives.living.clear()

    def _place(self, ranks: list[RankActors], node: Node) -> dict[str, ActorPlacement]:
        """Return the places of all actors; those that have failed too often have none."""
        declared = [plan.declared for plan in self._plans.values() if not plan.has_given_up]
        placed = place_actors(declared, ranks, node.membership.hosts)
        down = ActorPlacement(name="", rank=None, has_given_up=True)
        return {name: placed.get(name) or replace(down, name=name) for name in self._plans}

    async def _exchange(self, node: Node) -> list[RankActors]:
        """Announce this rank's actors and snapshots.  Raises ``OperationMismatch`` if declarations differ."""
        plans, living, snapshots = self._plans.values(), self._lives.living, self._lives.snapshots
        mine = [
            [plan.declared.name, plan.declared.class_path, plan.declared.spread, plan.declared.mirrors]
            for plan in plans
        ]
        names = dict.fromkeys([*self._plans, *snapshots])
        held = [[name, snapshots.version(name), living[name].lives_since if name in living else -1] for name in names]
        failures = {name: asdict(known) for name, known in self._lives.failures().items()}
        gathered = await node.world.all_gather_object([self._identity, mine, held, failures], key=KEY)
        for rank, (_, declared, _, _) in enumerate(gathered):
            if declared != mine:
                raise OperationMismatch(
                    f"actors: rank {node.rank} has declared {[row[0] for row in mine]}, and rank {rank} "
                    f"{[row[0] for row in declared]}; declare the same on all ranks, in one order"
                )
        self._adopt_failures([failures for *_, failures in gathered])
        return [
            RankActors(
                identity=identity,
                held=tuple(HeldActor(name=name, version=version, lives_since=since) for name, version, since in rows),
            )
            for identity, _, rows, _ in gathered
        ]

    def _adopt_failures(self, gathered: list[dict[str, dict[str, Any]]]) -> None:
        """Adopt the records of failures of actors: for each, that of the rank which saw the last failure."""
        known: dict[str, list[ActorFailures]] = {}
        for one in gathered:
            for name, fields in one.items():
                failures = ActorFailures(**{**fields, "ages": tuple(fields["ages"])})
                known.setdefault(name, []).append(failures)
        for name, each in known.items():
            self._lives.adopt_failures(
                name, min(each, key=lambda failures: failures.ages[-1] if failures.ages else math.inf)
            )

    async def _hand_over(self, node: Node) -> None:
        """Save all states once more, and wait for the others, so a rank that leaves loses nothing."""
        try:
            async with asyncio.timeout(HANDOVER):
                for living in self._lives.living.values():
                    await living.hand_over()
                await node.world.barrier(key=KEY)
        except (PeerError, StaleGeneration, TimeoutError) as error:
            _LOG.info("rank %d: the last states of actors are not saved: %s", node.rank, error)


def _path(actor: type[Any]) -> str:
    check_actor_class(actor)
    if not issubclass(actor, ElasticActor):
        raise UsageError(f"actor: expected a subclass of ElasticActor, got {actor.__qualname__}")
    return class_path(actor)


def _check_every(save_every: int | None) -> int | None:
    return None if save_every is None else check_count("save_every", save_every)
