"""The worlds of an elastic job in one of its processes: the current one, its end, and the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from asyncpar.collectives.communicator import Communicator, step_meter
from asyncpar.core.concurrency.broadcast import Broadcast
from asyncpar.core.observe.steps import StepMeter
from asyncpar.elasticity.arithmetic import ArithmeticComparison, describe_arithmetic
from asyncpar.elasticity.donors import SnapshotShelf
from asyncpar.elasticity.pipe import PipeWorlds
from asyncpar.elasticity.reduction import FlatPool, GradientLayout
from asyncpar.elasticity.state import ElasticState
from asyncpar.elasticity.worlds import LaunchedWorld, Membership, WorldSource
from asyncpar.errors import (
    ActorDown,
    DivergedState,
    LaunchError,
    PeerCancelled,
    PeerError,
    PeerLost,
    StaleGeneration,
    StateLost,
    UsageError,
    WorldChanged,
    WorldRevoked,
)
from asyncpar.hosts.lineage import MemberReport
from asyncpar.hosts.messages import WorldChange
from asyncpar.net.transport.links import LEFT
from asyncpar.node import Node, start_node

if TYPE_CHECKING:
    from typing import Any

    from asyncpar.elasticity.actors import ElasticActors

_AVERAGING: Final = (
    'run the model itself on each of step.portions, then step.add(portion, gradients), step.reduce("mean") and '
    "step.update(optimizer, gradients); local steps are those of job.rounds"
)
_INSTEAD: Final[Mapping[str, str]] = MappingProxyType(
    {
        "averaging": _AVERAGING,
        "replicas": f"make it without one, and {_AVERAGING}",
        "sharding": "use job.state(parameters, optimizer, zero=1), or 2, or 3",
    }
)

MOST_FUTILE: Final = 3
"""A step that fails more often than this while no rank is lost is a fault of the program, and its error is raised."""


class StepUnderWay(Protocol):
    """The step that a change of the world may end: an ``ElasticStep``."""

    number: int
    change: WorldChange | None

    @property
    def is_prepared(self) -> bool: ...
    def interrupt(self) -> None: ...
    async def settle(self, target: int) -> None: ...


class JobWorlds:
    """The worlds of a job: a step works in ``world``, and ``reform`` brings up the next one when that is over.

    ``portions`` and ``seed`` are those of the job; ``source`` provides the worlds.
    """

    def __init__(self, source: WorldSource, *, portions: int, seed: int) -> None:
        self.source = source
        self.portions = portions
        self.seed = seed
        self.arithmetic = describe_arithmetic() if isinstance(source, PipeWorlds | LaunchedWorld) else {}
        """The settings that the bits of numbers depend on in this process; {} where all members are in one process."""
        self.state: ElasticState | None = None
        self.actors: ElasticActors | None = None
        self.node: Node | None = None
        self.membership: Membership | None = None
        self.is_drained = False
        """See ``ElasticJob``."""
        self.shelf = SnapshotShelf()
        self.layout: GradientLayout | None = None
        self.pool = FlatPool()
        self.failed: tuple[int, str] | None = None
        """The step in which the program has failed, and the error; None if it has gone on to another one."""
        self.changes = Broadcast[WorldChange]()
        self.on_last: Callable[[], None] | None = None
        """Called when this process, which asks to leave, is the only one left."""
        self._comparison = ArithmeticComparison()
        self._meter: StepMeter | None = None
        self._revoked: asyncio.Event = asyncio.Event()
        self._revoked_generation = -1
        self._why: BaseException | None = None
        self._step: StepUnderWay | None = None
        self._futile = 0
        self._state_lost: StateLost | None = None
        """Set if parts of the state that the next step would need are lost."""

    @property
    def world(self) -> Communicator:
        """The communicator of the current world."""
        if self.node is None:
            raise UsageError("world: this job has none yet; it comes with the first step")
        return self.node.world

    @property
    def generation(self) -> int:
        """The number of the current world, -1 before the first."""
        return -1 if self.membership is None else self.membership.generation

    @property
    def rank(self) -> int:
        """This process's rank in the current world."""
        return 0 if self.membership is None else self.membership.rank

    @property
    def size(self) -> int:
        """The number of ranks of the current world."""
        return 1 if self.membership is None else self.membership.size

    @property
    def hosts(self) -> Sequence[str]:
        """The name of the host of each rank of the current world."""
        return [] if self.node is None else [member.host for member in self.node.links.world.members]

    @property
    def current_state(self) -> ElasticState:
        """The state of the steps under way."""
        assert self.state is not None
        return self.state

    @property
    def meter(self) -> StepMeter:
        """Records the steps of this rank in the current world."""
        assert self._meter is not None, "there is a world"
        return self._meter

    @property
    def is_revoked(self) -> bool:
        """Whether the current world is over."""
        return self._revoked.is_set()

    @property
    def has_pending(self) -> bool:
        """Whether a change waits for the end of a step."""
        return self.source.has_pending(self.generation)

    def on_revoked(self, generation: int, why: BaseException | None) -> None:
        if generation <= self._revoked_generation:
            return
        self._revoked_generation, self._why = generation, why
        if generation >= self.generation:
            self._revoked.set()  # of a world that is not brought up yet, too
            if self._step is not None and self.membership is not None:
                self._step.interrupt()

    def changed(self, error: BaseException) -> WorldChanged:
        """Return the error to raise for an operation that failed with ``error`` because the world is over."""
        rank = error.rank if isinstance(error, PeerError) else None
        host = error.host if isinstance(error, PeerError) else None
        return WorldChanged(
            f"the world of generation {self.generation} is over: {error}",
            rank=rank,
            host=host,
            cause=str(error),
            generation=self.generation,
        )

    def is_world_over(self, error: BaseException) -> bool:
        """Decide whether ``error``, which is not a group, is due to the end of the current world, not the program."""
        if isinstance(error, WorldChanged):
            return True
        if isinstance(error, DivergedState | ActorDown) or not isinstance(error, PeerError | StaleGeneration):
            return False
        if isinstance(error, PeerLost | PeerCancelled | WorldRevoked):  # or another rank knows of it, and this one soon
            return True
        return self.is_revoked or (self.node is not None and bool(self.node.links.lost))

    def begun(self, step: StepUnderWay) -> None:
        """Note that ``step`` is in its block."""
        if self._step is not None:
            raise UsageError(f"step {step.number}: step {self._step.number} has not ended; one at a time")
        self._step = step

    def ended(self, step: StepUnderWay) -> None:
        """Note that ``step`` has left its block."""
        if self._step is step:
            self._step = None

    def committed(self) -> None:
        """Note a committed step."""
        self._futile = 0
        self.shelf.committed()

    async def hold_lease(self) -> None:
        """Return when a step may be committed.  See ``WorldSource``."""
        await self.source.hold_lease()

    async def ensure_world(self, step: StepUnderWay) -> None:
        """Return when there is a world that is not over, and everything can be undone in it."""
        while True:
            if self.is_revoked:
                await self.reform(step, None)
            if self._state_lost is not None:
                raise self._state_lost
            self.shelf.beginning()
            await self.current_state.begin()
            self.shelf.begun()
            if not self.is_revoked:
                return

    async def reform(self, step: StepUnderWay, error: BaseException | None) -> None:
        """End the current world, settle ``step``, and bring up the next world."""
        self._note_futile(step, error)
        before = self.size
        while True:
            membership = await self._next(step, is_planned=error is None and not self.is_revoked)
            if membership is None:
                self.is_drained = True
                if self.actors is not None:
                    self.actors.end()
                await step.settle(self.current_state.step)
                return
            if membership.lineage.step > self.current_state.step:
                await self.source.hold_lease()
            await step.settle(membership.lineage.step)
            step.change = membership.change
            if membership.change.left or membership.change.is_by_loss or membership.size != before:
                self._futile = 0
            if await self._has_taken(membership):
                return

    async def _next(self, step: StepUnderWay | None, *, is_planned: bool = False) -> Membership | None:
        """Report the state of this process, and return its next world."""
        state = self.current_state
        prepared = await state.prepared_lineage() if step is not None and step.is_prepared else None
        report = MemberReport(
            generation=self.generation, lineage=await state.lineage(), prepared=prepared, suspects=self._suspects()
        )
        await self.stop_node(is_planned=is_planned)
        return await self.source.next_world(report)

    async def is_caught_up(self, membership: Membership) -> bool:
        """Decide whether this newcomer has the state from which the world of ``membership`` goes on."""
        return membership.lineage == await self.current_state.lineage()

    async def bring_up_first(self, membership: Membership) -> None:
        """Bring up the first world, or its successor if it is over before it has begun."""
        while not await self._has_taken(membership):
            following = await self._next(None)
            if following is None:
                self.is_drained = True
                return
            membership = following

    async def _has_taken(self, membership: Membership) -> bool:
        """Bring up a world, and return whether that succeeded: another rank may be lost meanwhile."""
        try:
            await self._take(membership)
        except DivergedState:
            raise
        except (PeerError, StaleGeneration):
            return False
        self.changes.send(membership.change)
        return True

    def _suspects(self) -> tuple[tuple[int, str], ...]:
        if self.node is None:
            return ()
        lost = self.node.links.lost.items()
        return tuple((rank, error.cause or str(error)) for rank, error in lost if error.cause != LEFT)

    def _note_futile(self, step: StepUnderWay, error: BaseException | None) -> None:
        if error is None or step.is_prepared:
            return
        self._futile += 1
        if self._futile > MOST_FUTILE:
            raise LaunchError(
                f"step {step.number}: it failed {self._futile} times, and no rank was lost; the fault is in the "
                f"program, not in the world: {error}"
            ) from error

    async def _take(self, membership: Membership) -> None:
        """Bring up the world of ``membership``.  Raises ``PeerError`` when it is over before it has begun."""
        state = self.current_state
        await self.stop_node()
        lineage = await state.lineage()
        if lineage != membership.lineage:
            raise DivergedState(
                f"rank {membership.rank}: this rank has {lineage}, and generation {membership.generation} goes on from "
                f"{membership.lineage}"
            )
        self.membership = membership
        if self.on_last is not None and membership.size == 1:
            self.on_last()
        if self._revoked_generation < membership.generation:  # it may be revoked before it is brought up
            self._revoked.clear()
        starting = asyncio.ensure_future(self._bring_up(membership))
        ending = asyncio.ensure_future(self._revoked.wait())
        try:
            waited: set[asyncio.Future[Any]] = {starting, ending}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                return
            raise self.changed(self._why or PeerLost("it was revoked while it formed", cause="revoked"))
        finally:
            ending.cancel()
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})

    async def _bring_up(self, membership: Membership) -> None:
        """Start the node of a world and its actors, and get the parts of the state that this rank is to have in it."""
        self.node = await start_node(membership.attach)
        links = self.node.links
        links.refuse_fixed_ranks = partial(refuse_fixed_ranks, generation=links.world.generation)
        self._meter = step_meter(self.node.world, "training")
        if self.arithmetic:
            await self._comparison.compare(self.node, self.arithmetic)
        if self.actors is not None and self.actors.is_used:
            await self.actors.enter_world(self.node, membership.change)
        state = self.current_state
        if state.sharded is not None:
            try:
                await state.sharded.parts.reshard(self.node.world, self.node.membership.hosts, state.step)
            except StateLost as error:  # nothing is needed of ranks that had done all steps, and have left
                self._state_lost = error

    async def stop_node(self, *, is_planned: bool = False, is_last: bool = False) -> None:
        node, self.node = self.node, None
        if node is not None:
            if self.actors is not None:
                await self.actors.leave_world(is_planned=is_planned, is_last=is_last)
            if self.state is not None and self.state.sharded is not None:
                await self.state.sharded.leave_world()
            if self.is_revoked and self._why is not None and not is_last:
                node.links.is_revoked = True  # all were notified: none waits for one that is stopped or cut off
            await node.stop()
            why = self._why if self.is_revoked else None
            node.world.revoke(why or "this rank went on to another world")  # later uses raise StaleGeneration


def refuse_fixed_ranks(what: str, use: str, *, generation: int) -> UsageError:
    """Return the error for ``what``, which requires fixed ranks in world ``generation``, with advice for ``use``."""
    return UsageError(
        f"{what}: expected ranks that stay, got those of generation {generation} of an elastic job, which others "
        f"follow; {_INSTEAD[use]}"
    )
