"""The base class of actors that outlive the world, and the record of one over all worlds."""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.runtime.calls import CURRENT
from asyncpar.actors.supervision.machine import PastRestarts, SupervisorMachine
from asyncpar.actors.supervision.policy import Backoff, Intensity, Restart, Strategy
from asyncpar.elasticity.actor_places import DeclaredActor
from asyncpar.elasticity.actor_refs import ElasticMesh, ElasticRef
from asyncpar.elasticity.actor_snapshots import ActorSnapshots
from asyncpar.elasticity.interruption import program_errors
from asyncpar.elasticity.plain import decode_plain, encode_plain
from asyncpar.errors import PeerError, StaleGeneration, UsageError, WorldChanged
from asyncpar.hosts.messages import WorldChange

_LOG: Final = logging.getLogger(__name__)


class ElasticActor(Actor):
    """Base of actors that outlive the world: declare them with ``job.actors.declare``.

    A subclass that has state overrides ``state`` and ``restore``, and awaits ``save`` wherever other ranks are to get
    its current state, or is declared with ``save_every``: when this rank is lost, the actor goes on elsewhere from the
    state saved last.

    A call that is cut in the middle, by the end of the world or by its caller, or that fails because of the end of the
    world, changes nothing: the actor is restored to the state before it, or to the one that the call itself has saved.
    Endpoints with ``concurrency`` run beside others, and are not undone.
    """

    _home: LivingActor | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not inspect.iscoroutinefunction(cls.on_world):
            raise UsageError(f"on_world: expected async def, {cls.__qualname__}.on_world is none")
        for name in ("state", "restore"):
            if inspect.iscoroutinefunction(getattr(cls, name)):
                raise UsageError(f"{name}: expected def, {cls.__qualname__}.{name} is async")

    def state(self) -> object:
        """Return the state from which the actor is to go on elsewhere: plain data, see ``ElasticJob.state``."""
        return None

    def restore(self, state: Any) -> None:
        """Restore ``state``: of an earlier life, between constructor and ``on_start``, or from before a cut call."""

    async def on_world(self, change: WorldChange) -> None:
        """Run in each world, before its first message; ``group`` is the one of that world.

        Messages wait for it, as for every hook; those to concurrent endpoints do not.
        """

    async def save(self) -> None:
        """Return when the mirrors have the current ``state()``; on the only rank, at once.

        An endpoint that saves before it returns gives no answer that could be forgotten.  Raises ``PeerError`` when a
        mirror is lost: the next world has the state nevertheless if this actor lives on.
        """
        await self._require_home().save()

    def named(self, name: str) -> ElasticRef:
        """Return the reference to another actor of the job, by its name."""
        return self._require_home().find(name)

    async def _begin(self) -> None:
        if self._home is None or self._home.has_begun:
            return
        await self.on_start()
        self._home.has_begun = True

    async def _conclude(self) -> None:
        if self._home is None or not self._home.is_carried:
            await self.on_stop()

    def _require_home(self) -> LivingActor:
        if self._home is None:
            raise UsageError(f"{type(self).__qualname__}: expected one that job.actors.declare has started")
        return self._home


@dataclass(slots=True, kw_only=True)
class ActorPlan:
    """The declaration of an actor: how to make it, and how often it may fail."""

    declared: DeclaredActor
    actor_class: type[ElasticActor]
    create: Callable[[], ElasticActor]
    intensity: Intensity
    backoff: Backoff
    save_every: int | None = None
    mesh: ElasticMesh[Any] | None = None
    machine: SupervisorMachine | None = None
    """Decides about restarts, on the rank that runs the actor."""
    past: PastRestarts = field(default_factory=PastRestarts)
    """The restarts before this world, on any rank."""
    has_given_up: bool = False
    """Whether it has failed too often."""

    def make_machine(self) -> SupervisorMachine:
        """Return the machine for an actor that is about to start; it counts earlier restarts as well."""
        self.machine = SupervisorMachine(
            {self.declared.name: Restart.PERMANENT},
            strategy=Strategy.ONE_FOR_ONE,
            intensity=self.intensity,
            backoff=self.backoff,
            draw=random.random,
            past=self.past,
        )
        return self.machine


class WorldChanges(Protocol):
    """Functions that recognize errors of the end of a world, and make them."""

    def is_end_of_world(self, error: BaseException) -> bool: ...
    def changed(self, error: BaseException) -> WorldChanged: ...


@dataclass(slots=True, kw_only=True)
class LivingActor:
    """An actor that lives on this rank, over all its worlds."""

    plan: ActorPlan
    instance: ElasticActor
    snapshots: ActorSnapshots
    find: Callable[[str], ElasticRef]
    lives_since: int
    changes: WorldChanges
    before: bytes | None = None
    """The state before the call under way, or the one that the call itself has saved; None between calls."""
    has_begun: bool = False
    is_carried: bool = False
    """Whether it goes on in the next world, here or elsewhere; then the end of this one is not the end of the actor."""
    unsaved: int = 0
    """Messages since the last snapshot."""
    saving: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return self.plan.declared.name

    async def save(self) -> None:
        """Save the current state here and on other ranks; a call that was cut saves nothing more."""
        delivery = CURRENT.get()
        if delivery is not None and delivery.execution is not None and delivery.execution.is_interrupted:
            raise asyncio.CancelledError(f"actor {self.name!r}: {delivery.title} was cut, and saves nothing more")
        content = self._content()
        if self.before is not None:
            self.before = content
        await self._keep(content)

    async def hand_over(self) -> None:
        """Save the last state that is not in the middle of a call on other ranks."""
        await self._keep(self._content() if self.before is None else self.before)

    async def _keep(self, content: bytes) -> None:
        self.unsaved = 0
        async with self.saving:  # the mirrors get them in order
            await self.snapshots.save(self.name, content)

    def _content(self) -> bytes:
        return encode_plain(self.instance.state(), f"state of actor {self.name}")

    # -- the calls of endpoints that run alone ---------------------------------------------------------------------

    def begin(self) -> None:
        """Record the state before a call, if the actor has any."""
        if type(self.instance).state is not ElasticActor.state:
            self.before = self._content()

    def judge(self, error: BaseException, *, is_alone: bool) -> tuple[BaseException, bool]:
        """Return the error of a call, and whether the program is at fault; undo the call if it is not."""
        own = program_errors(error, self.changes.is_end_of_world)
        is_cut = isinstance(error, asyncio.CancelledError)
        before, self.before = self.before, (None if is_alone else self.before)
        if is_alone and before is not None and (own is None or is_cut):
            self.instance.restore(decode_plain(before))
        if own is not None:
            return own, not is_cut
        _LOG.info("actor %r: a call has ended with the world: %s", self.name, error)
        return (self.changes.changed(error) if isinstance(error, BaseExceptionGroup) else error), False

    async def finish(self) -> None:
        """Save if enough messages have been handled.  Raises only for an ask, which is then not answered."""
        delivery = CURRENT.get()
        if delivery is None or delivery.spec is None or delivery.spec.concurrency is None:
            self.before = None  # it is done, whatever follows
        self.unsaved += 1
        if self.plan.save_every is None or self.unsaved < self.plan.save_every:
            return
        try:
            await self.save()
        except (PeerError, StaleGeneration) as error:
            if delivery is not None and delivery.call is not None:
                raise
            _LOG.info("actor %r: its state is not saved elsewhere before the next world: %s", self.name, error)
