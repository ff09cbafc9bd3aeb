"""The actors of an elastic job on this rank: their starts, saves, failures and restarts, over all its worlds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final

from asyncpar.actors.runtime.ending import Down, DownReason
from asyncpar.actors.supervision import events
from asyncpar.actors.supervision.machine import PastRestarts
from asyncpar.elasticity.actor_places import ActorPlacement
from asyncpar.elasticity.actor_refs import ElasticRef
from asyncpar.elasticity.actor_snapshots import ActorFailures, ActorSnapshots
from asyncpar.elasticity.elastic_actor import ActorPlan, LivingActor, WorldChanges
from asyncpar.elasticity.plain import decode_plain
from asyncpar.errors import ActorDown, PeerError, StaleGeneration
from asyncpar.hosts.messages import WorldChange
from asyncpar.node import Node

GRACE: Final = 0.5
"""Seconds that an actor has to finish the running endpoint when its world is over."""

_LOG: Final = logging.getLogger(__name__)


class ActorLives:
    """Starts the actors that this rank runs in a world, and restarts those that fail."""

    def __init__(
        self, plans: Mapping[str, ActorPlan], find: Callable[[str], ElasticRef], changes: WorldChanges
    ) -> None:
        self.snapshots = ActorSnapshots()
        self.living: dict[str, LivingActor] = {}
        self._plans = plans
        self._find = find
        self._changes = changes
        self._placements: Mapping[str, ActorPlacement] = {}
        self._node: Node | None = None
        """The node of the current world, unless that is about to end: then ends of its actors are not failures."""
        self._opened = asyncio.Event()
        self._restarts: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []

    async def enter(self, node: Node, placements: Mapping[str, ActorPlacement], change: WorldChange) -> None:
        """Start the actors of ``placements``; ``on_world`` is the first call that each runs once the world is open.

        Raises the errors of constructors, ``restore`` and ``on_start``.
        """
        self._node, self._placements, self._opened = node, placements, asyncio.Event()
        self.snapshots.place(node, placements)
        for placement in placements.values():
            await self._take_place(node, placement, change)

    def open(self) -> None:
        """Let ``on_world`` run, and messages after it: all actors of the world have started."""
        self._opened.set()

    async def leave(self, *, is_planned: bool, is_last: bool) -> None:
        """End this rank's actors in the current world; those that run a call have ``GRACE`` seconds.

        Waiting messages are handled within that time if the end ``is_planned``, and are otherwise refused at once.
        """
        node, self._node = self._node, None
        if node is None:
            return
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        for restart in self._restarts:
            restart.cancel()
        for living in self.living.values():
            living.is_carried = not is_last
        self._opened.set()
        await node.actor_system.retire(list(self.living), within=GRACE, handles_waiting=is_planned)

    async def _take_place(self, node: Node, placement: ActorPlacement, change: WorldChange) -> None:
        """Start the actor of ``placement`` if it is this rank's; forget it if it lives elsewhere."""
        plan, name = self._plans[placement.name], placement.name
        if placement.rank != node.rank:
            self.living.pop(name, None)
            plan.machine = None
            return
        living = self.living.get(name)
        is_new = living is None
        if living is None:
            await self.snapshots.fetch(name)
            living = self._make(plan, node)
        living.is_carried = False
        if is_new or plan.machine is None:
            plan.make_machine().handle(events.StartAll(), now=_now())
        await self._start(node, living)
        if is_new and plan.machine is not None:
            plan.machine.handle(events.ChildStarted(name), now=_now())
        living.instance._require_context().run_soon(partial(self._announce_world, node, living, self._opened, change))

    async def _announce_world(
        self, node: Node, living: LivingActor, opened: asyncio.Event, change: WorldChange
    ) -> None:
        await opened.wait()
        if node is not self._node:
            return
        living.begin()
        try:
            await living.instance.on_world(change)
        except BaseException as error:
            own, is_fault = living.judge(error, is_alone=True)
            if own is error and (is_fault or isinstance(error, asyncio.CancelledError)):
                raise
            if is_fault:
                raise own from own.__cause__  # otherwise the next world runs its own on_world
        else:
            living.before = None

    def _make(self, plan: ActorPlan, node: Node) -> LivingActor:
        """Construct an actor, with the state of its last snapshot if there is one."""
        instance = plan.create()
        content = self.snapshots.content(plan.declared.name)
        if content is not None:
            instance.restore(decode_plain(content))
        instance._home = LivingActor(
            plan=plan,
            instance=instance,
            snapshots=self.snapshots,
            find=self._find,
            changes=self._changes,
            lives_since=node.membership.generation,
        )
        return instance._home

    async def _start(self, node: Node, living: LivingActor) -> None:
        plan = living.plan
        place = None if plan.mesh is None else plan.mesh.place_in(self._placements, node)
        ref = await node.actor_system.adopt(living.instance, name=living.name, place=place, guard=living)
        self.living[living.name] = living
        node.actor_system.watch(ref, partial(self._ended, node, living))

    # -- restarts of all worlds ----------------------------------------------------------------------------------------

    def failures(self) -> dict[str, ActorFailures]:
        """Return this rank's record of how often actors have failed."""
        known = {name: self._failures_of(plan) for name, plan in self._plans.items()}
        return {name: failures for name, failures in known.items() if failures.ages or failures.has_given_up}

    def adopt_failures(self, name: str, failures: ActorFailures) -> None:
        """Adopt the record of how often the actor ``name`` has failed on other ranks."""
        plan, now = self._plans[name], _now()
        plan.has_given_up = plan.has_given_up or failures.has_given_up
        plan.past = PastRestarts(times=tuple(now - age for age in failures.ages), failures=failures.in_a_row)

    def _failures_of(self, plan: ActorPlan) -> ActorFailures:
        past, now = plan.past if plan.machine is None else plan.machine.past, _now()
        ages = tuple(now - time for time in past.times)
        return ActorFailures(ages=ages, in_a_row=past.failures, has_given_up=plan.has_given_up)

    async def _share_failures(self, plan: ActorPlan) -> None:
        try:
            await self.snapshots.note(plan.declared.name, self._failures_of(plan))
        except (PeerError, StaleGeneration) as error:  # the next world begins with an exchange of failures
            _LOG.info("actor %r: its mirror is not notified of its failure: %s", plan.declared.name, error)

    # -- failures ------------------------------------------------------------------------------------------------------

    def _ended(self, node: Node, living: LivingActor, down: Down) -> None:
        """Restart an actor that has failed, unless its world is over."""
        if node is not self._node or self.living.get(living.name) is not living:
            return
        del self.living[living.name]
        if down.reason is DownReason.CLOSED:
            return
        failure = down.error or ActorDown(f"actor {living.name!r} was {down.reason}", rank=node.rank)
        self._obey(node, living.plan, events.ChildEnded(living.name, failure))

    def _obey(self, node: Node, plan: ActorPlan, event: events.Event) -> None:
        assert plan.machine is not None
        for command in plan.machine.handle(event, now=_now()):
            match command:
                case events.StartCommand():
                    self._begin(self._restart(node, plan))
                case events.WaitCommand(until):
                    loop = asyncio.get_running_loop()
                    self._timers.append(loop.call_at(until, self._obey, node, plan, events.BackoffElapsed()))
                case events.GiveUp(_, _, failure):
                    plan.has_given_up = True
                    self._begin(self._share_failures(plan))
                    text = "rank %d: actor %r has failed too often, and is not started again"
                    _LOG.error(text, node.rank, plan.declared.name, exc_info=failure)
                case _:
                    pass

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _restart(self, node: Node, plan: ActorPlan) -> None:
        name = plan.declared.name
        await self._share_failures(plan)
        try:
            await self._start(node, self._make(plan, node))
        except Exception as error:  # noqa: BLE001  # user code; the machine decides what follows
            if node is self._node:
                _LOG.warning("rank %d: actor %r did not start again", node.rank, name, exc_info=error)
                self._obey(node, plan, events.ChildStartFailed(name, error))
        else:
            if node is self._node:
                self._obey(node, plan, events.ChildStarted(name))


def _now() -> float:
    return asyncio.get_running_loop().time()
