"""An elastic job from the view of one of its processes: its state, its steps, and the current world."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from asyncpar.actors.supervision.policy import Backoff
from asyncpar.bootstrap import attach_alone, find_world
from asyncpar.collectives.communicator import Communicator, step_meter
from asyncpar.core.concurrency.broadcast import Broadcast
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.core.config.checks import check_count
from asyncpar.core.config.environment import ELASTIC_PIPE
from asyncpar.core.config.names import CodecName
from asyncpar.core.observe.steps import StepMeter
from asyncpar.core.signals import TERMINATION
from asyncpar.elasticity.arithmetic import ArithmeticComparison, describe_arithmetic
from asyncpar.elasticity.donors import SnapshotShelf, StepUpdate
from asyncpar.elasticity.fixed_ranks import refuse_fixed_ranks
from asyncpar.elasticity.healing import Healing
from asyncpar.elasticity.memory import populate
from asyncpar.elasticity.pipe import PipeWorlds
from asyncpar.elasticity.pipe_socket import SocketPipe
from asyncpar.elasticity.portions import MOST_PORTIONS
from asyncpar.elasticity.reduction import FlatPool, GradientLayout
from asyncpar.elasticity.rounds import ElasticRound, RoundContents, RoundPlan
from asyncpar.elasticity.sharded import Sharding
from asyncpar.elasticity.state import ElasticState
from asyncpar.elasticity.state_inputs import Parameters
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.step_owner import MOST_FUTILE
from asyncpar.elasticity.worlds import LaunchedWorld, LoneWorld, Membership, WorldSource
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
from asyncpar.net.membership.lineage import MemberReport
from asyncpar.net.membership.world_messages import WorldChange
from asyncpar.net.transport.links import LEFT
from asyncpar.net.transport.serving import Serving
from asyncpar.nn.optimizers import Optimizer
from asyncpar.nn.stage import Stage
from asyncpar.node import Node, start_node
from asyncpar.parallel.local.outer import OuterConfig

if TYPE_CHECKING:
    from asyncpar.elasticity.actors import ElasticActors

_HEAL_AGAIN = Backoff(initial=0.05, maximum=2.0)
"""The delay before asking for donors again: the director notices late that they are lost, or that all are done."""

HEALINGS = 24
"""Attempts of a newcomer to find donors, within some 40 s, before it gives up.

They last longer than a leader waits for the last hosts that have the state.
"""


class ElasticJob:
    """One process of an elastic job.  Made by ``asyncpar.elastic``; use as ``async with``.

    ``portions`` is the number of parts of every global batch, whatever the world; with ``seed`` it determines all
    numbers.

    ``source`` provides the worlds, for tests; by default it is the launcher's.
    """

    def __init__(self, *, portions: int, seed: int = 0, source: WorldSource | None = None) -> None:
        self.portions = check_count("portions", portions)
        if portions > MOST_PORTIONS:
            raise UsageError(f"portions: expected at most {MOST_PORTIONS}, got {portions}")
        self.seed = check_count("seed", seed, least=0)
        self._source: WorldSource = _default_source() if source is None else source
        self.arithmetic = describe_arithmetic() if isinstance(self._source, PipeWorlds | LaunchedWorld) else {}
        """The settings that the bits of numbers depend on in this process; {} where all members are in one process."""
        self._comparison = ArithmeticComparison()
        self._state: ElasticState | None = None
        self._node: Node | None = None
        self._meter: StepMeter | None = None
        self._membership: Membership | None = None
        self._revoked: asyncio.Event = asyncio.Event()
        self._revoked_generation = -1
        self._why: BaseException | None = None
        self._step: ElasticStep | None = None
        self._futile = 0
        self._state_lost: StateLost | None = None
        """Set if parts of the state that the next step would need are lost."""
        self.is_drained = False
        """Whether this process is not a member at the end.

        It was asked to leave, so ``steps`` ends early, or the job was complete before its state was known to be
        equal to that of the others.
        """
        self._refused: Callable[[], None] | None = None
        """Ends this process, which asks to leave, if no other one goes on."""
        self.shelf = SnapshotShelf()
        self.layout: GradientLayout | None = None
        self.pool = FlatPool()
        self._actors: ElasticActors | None = None
        self.failed: tuple[int, str] | None = None
        """The step in which the program has failed, and the error; None if it has gone on to another one."""
        self._changes = Broadcast[WorldChange]()

    async def __aenter__(self) -> Self:
        self._source.on_revoked(self._on_revoked)
        if (termination := TERMINATION.get()) is not None:
            termination.ask_first(self.ask_to_leave)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if (termination := TERMINATION.get()) is not None:
            termination.ask_first(None)
        try:
            if self._state is not None:
                await self._state.close()
            await self.shelf.close("the job has ended there")
        finally:
            await self._source.leave(self._failure(error))
            await self._stop_node(is_last=True)
            self._changes.close()

    def _failure(self, error: BaseException | None) -> tuple[int | None, str] | None:
        """Return the failed step, None outside a step, and the error of the program; None if the program is done.

        A program that a signal or a cancellation ends is not done: its state may be lost with it.
        """
        if error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
            return None
        how = f"{type(error).__name__}: {error}".removesuffix(": ")
        return self.failed if self.failed and isinstance(error, Exception) else (None, how)

    # -- the program's interface ---------------------------------------------------------------------------------------

    def state(
        self,
        parameters: Parameters,
        optimizer: Optimizer | Sequence[Optimizer] = (),
        *,
        rng: np.random.Generator | None = None,
        zero: int = 0,
        codec: CodecName | None = None,
        residual_codec: CodecName | None = None,
        outer: OuterConfig | None = None,
        pipeline: Sequence[Stage[Any]] | None = None,
        **extra: Any,
    ) -> ElasticState:
        """Return the state of the run: committed with each step, compared, and sent to newcomers.

        ``parameters`` are ``Parameter`` objects, or arrays by name; ``extra`` are values by name: plain data, arrays,
        numpy Generators, and objects with ``state()`` and ``restore()`` or ``state_dict()`` and ``load_state_dict()``.
        ``zero`` shards the optimizer over the ranks by portion: its states (1), gradients as well (2), parameters as
        well (3).  ``codec`` encodes the gradients of each portion; its error is kept by portion and added to the
        portion's next gradients, as float32 or, for less traffic to the mirror, in ``residual_codec``.  With ``outer``
        it is a state for ``rounds``.  ``rng`` is a generator of the program, which is part of the state.  ``pipeline``
        are the stages of a model, of which each rank has some: see ``step.run_pipeline``; ``parameters`` and
        ``optimizer`` are those of all stages.  All ranks must make the same state.

        Raises ``UsageError`` naming a value that cannot be compared with that of the other ranks, and
        ``SnapshotTooLarge`` when there is no memory for second buffers.
        """
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        sharding = Sharding(
            portions=self.portions,
            zero=zero,
            codec=codec,
            residual_codec=residual_codec,
            outer=outer,
            pipeline=pipeline,
            seed=self.seed,
        )
        return ElasticState(parameters, optimizers, rng, extra, sharding=sharding)

    async def steps(self, state: ElasticState, *, until: int) -> AsyncGenerator[ElasticStep, None]:
        """Yield the steps from here to ``until``; after a fault the same number is repeated.

        Use each as ``async with step``, once, before the next is requested.  A newcomer first gets the state of the
        others, and the steps that it has missed meanwhile as replays.
        """
        if state.sharded is not None and state.sharded.workers is not None:
            raise UsageError("steps: this state has workers, which were asked for by outer=; use rounds")
        async with aclosing(self._all_steps(state, until)) as steps:
            async for step in steps:
                yield step

    async def rounds(
        self, state: ElasticState, *, steps: int, quorum: float = 1.0, grace: float = 1.0, until: int
    ) -> AsyncGenerator[ElasticRound, None]:
        """Yield the rounds of DiLoCo from here to ``until``; each trains portions independently for ``steps`` steps.

        ``state`` was made with ``outer=``, the rate and momentum of the outer optimizer.  The outer step is made when
        all portions are done, or ``grace`` seconds after a ``quorum`` of them is: later ones are dropped.  Use each as
        ``async with round``.  With a quorum of 1 the bits are the same in every world.
        """
        plan = RoundPlan(steps=steps, quorum=quorum, grace=grace)
        workers = None if state.sharded is None else state.sharded.workers
        if workers is None:
            raise UsageError("rounds: expected a state with workers: job.state(..., outer=OuterConfig())")
        contents, is_known = RoundContents(-1), False
        async with aclosing(self._all_steps(state, until)) as all_steps:
            async for step in all_steps:
                if contents.number != step.number:
                    contents = RoundContents(step.number, is_known=is_known)
                is_known |= not step.is_replay
                yield ElasticRound(self, workers, plan, contents, step)

    async def _all_steps(self, state: ElasticState, until: int) -> AsyncGenerator[ElasticStep, None]:
        check_count("until", until, least=0)
        if self._state is not None and self._state is not state:
            raise UsageError("steps: expected the state of the earlier steps of this job, got another")
        is_new, self._state = self._state is None, state
        if is_new:
            async with aclosing(self._enter(state, until)) as steps:
                async for step in steps:
                    yield step
        while state.step < until and not self.is_drained:
            step = ElasticStep(self, state.step)
            yield step
            step.check_used()

    @property
    def actors(self) -> ElasticActors:
        """The actors of the job, which outlive worlds: see ``ElasticActors.declare``."""
        if self._actors is None:
            from asyncpar.elasticity.actors import ElasticActors  # needed only with actors

            self._actors = ElasticActors(self.changed, self.is_world_over)
        return self._actors

    def ask_to_leave(self, refused: Callable[[], None]) -> bool:
        """Ask the agent to let this process leave at the end of a step, as the first SIGTERM does under ``ap.run``.

        Returns False if there is no agent.  ``refused`` is called if it may not leave: it is to end anyway, or no other
        rank would go on.
        """
        if not isinstance(self._source, PipeWorlds) or not self._source.ask_to_leave(refused):
            return False
        self._refused = refused
        return True

    def watch_world(self) -> AsyncIterator[WorldChange]:
        """Iterate over the worlds that this process enters after this call: who joined and left, and why.

        Every watcher gets every change; the iteration ends with the job.
        """
        return self._changes.listen()

    @property
    def world(self) -> Communicator:
        """The communicator of the current world."""
        if self._node is None:
            raise UsageError("world: this job has none yet; it comes with the first step")
        return self._node.world

    @property
    def generation(self) -> int:
        return -1 if self._membership is None else self._membership.generation

    @property
    def rank(self) -> int:
        """This process's rank in the current world."""
        return 0 if self._membership is None else self._membership.rank

    @property
    def size(self) -> int:
        """The number of ranks of the current world."""
        return 1 if self._membership is None else self._membership.size

    @property
    def hosts(self) -> Sequence[str]:
        """The name of the host of each rank of the current world."""
        return [] if self._node is None else [member.host for member in self._node.links.world.members]

    # -- coming in -----------------------------------------------------------------------------------------------------

    async def _enter(self, state: ElasticState, until: int) -> AsyncGenerator[ElasticStep, None]:
        """Join; a newcomer is healed first, and runs the steps that it has missed."""
        donors = await self._source.donors()
        self.is_drained = donors is None
        if donors is None:
            return
        if not donors:
            self.shelf.attach(state)
            await self._bring_up_first(await self._source.join(await state.lineage(), self.shelf, is_healed=False))
            return
        self._node = await start_node(attach_alone(Serving(), None))
        for attempt in range(HEALINGS):
            healing = Healing(donors, state)
            try:
                await self._unless_refused(healing.fetch())
                missed = self._catch_up(healing, state, until, size=len(donors) + 1)
                async with aclosing(missed) as steps:
                    async for step in steps:
                        yield step
                return
            except PeerLost as error:
                if self._membership is not None or attempt == HEALINGS - 1:
                    raise
                self.shelf.detach()
                await self._source.withdraw()
                await asyncio.sleep(_HEAL_AGAIN.delay(attempt + 1, draw=0.0))
                donors = await self._source.donors()
                self.is_drained = donors is None
                if donors is None:
                    return
                if not donors:
                    raise LaunchError(f"healing: no member is left that can give the state: {error}") from error
            finally:
                await healing.close()

    async def _unless_refused(self, work: Awaitable[None]) -> None:
        """Await ``work``; if it finds that this process would not be the same training, report that."""
        try:
            await work
        except (DivergedState, UsageError) as error:
            self._source.refused(str(error))
            raise

    async def _catch_up(
        self, healing: Healing, state: ElasticState, until: int, *, size: int
    ) -> AsyncGenerator[ElasticStep, None]:
        """Run the steps that this newcomer has missed, until it is a member, or there are no more steps.

        It asks to join when it has caught up, so the others need not wait for it, or when it no longer gets nearer:
        then they have to.  Before that it has run a step, and proved that it comes to the others' state: otherwise no
        world is changed for it, and ``DivergedState`` is raised.  ``size`` is that of the world to come.
        """
        self.shelf.attach(state)
        first = state.step
        joining: asyncio.Future[Membership] | None = None
        coming = asyncio.ensure_future(healing.update(state.step))
        others: list[asyncio.Future[Any]] = []
        try:
            while state.step < until:
                if joining is None and state.step > first and not await healing.is_catching_up():
                    await self._unless_refused(healing.prove(await state.lineage()))
                    join = self._source.join(await state.lineage(), self.shelf, is_healed=True)
                    joining = asyncio.ensure_future(join)
                    others.append(joining)
                update = await _unless_done(coming, joining)
                if update is None:
                    assert joining is not None
                    membership = joining.result()
                    if not await self._is_caught_up(membership):  # they repeat a step that was repeated here
                        raise PeerLost("healing: the others have not committed the last step", cause="an aborted step")
                    others.append(asyncio.ensure_future(healing.close()))  # donors need not keep updates any more
                    await self._bring_up_first(membership)
                    return
                coming = asyncio.ensure_future(healing.update(state.step + 1))  # while this one is repeated
                if update.flats and not self.pool.has_memory:
                    others.append(asyncio.ensure_future(self._take_memory(update, size)))
                step = ElasticStep(self, state.step, update)
                yield step
                step.check_used()
                if joining is not None:
                    self._source.progress(await state.lineage())
            try:
                await self._unless_refused(healing.prove(await state.lineage()))
            except PeerLost:  # the others are done, and none can compare the state of this process any more
                self.is_drained = True
        finally:
            for task in (coming, *others):
                task.cancel()
            await asyncio.gather(coming, *others, return_exceptions=True)

    async def _take_memory(self, update: StepUpdate, size: int) -> None:
        """Take the memory that the first step in a world of ``size`` ranks needs, so the others need not wait."""
        portions = -(-self.portions // size)
        count = portions.bit_length() + 2  # sums of its portions, and two arrays for those of all
        arrays = self.pool.reserve(GradientLayout.described(update.layout), count)
        await off_loop(partial(populate, arrays), nbytes=sum(array.nbytes for array in arrays))

    # -- worlds --------------------------------------------------------------------------------------------------------

    @property
    def current_state(self) -> ElasticState:
        """The state of the steps under way."""
        assert self._state is not None
        return self._state

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
        return self._source.has_pending(self.generation)

    def _on_revoked(self, generation: int, why: BaseException | None) -> None:
        if generation <= self._revoked_generation:
            return
        self._revoked_generation, self._why = generation, why
        if generation >= self.generation:
            self._revoked.set()  # of a world that is not brought up yet, too
            if self._step is not None and self._membership is not None:
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
        return self.is_revoked or (self._node is not None and bool(self._node.links.lost))

    def begun(self, step: ElasticStep) -> None:
        """Note that ``step`` is in its block."""
        if self._step is not None:
            raise UsageError(f"step {step.number}: step {self._step.number} has not ended; one at a time")
        self._step = step

    def ended(self, step: ElasticStep) -> None:
        """Note that ``step`` has left its block."""
        if self._step is step:
            self._step = None

    def committed(self) -> None:
        """Note a committed step."""
        self._futile = 0
        self.shelf.committed()

    async def hold_lease(self) -> None:
        """Return when a step may be committed.  See ``WorldSource``."""
        await self._source.hold_lease()

    async def ensure_world(self, step: ElasticStep) -> None:
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

    async def reform(self, step: ElasticStep, error: BaseException | None) -> None:
        """End the current world, settle ``step``, and bring up the next world."""
        self._note_futile(step, error)
        before = self.size
        while True:
            membership = await self._next(step, is_planned=error is None and not self.is_revoked)
            if membership is None:
                self.is_drained = True
                if self._actors is not None:
                    self._actors.end()
                await step.settle(self.current_state.step)
                return
            if membership.lineage.step > self.current_state.step:
                await self._source.hold_lease()
            await step.settle(membership.lineage.step)
            step.change = membership.change
            if membership.change.left or membership.change.is_by_loss or membership.size != before:
                self._futile = 0
            if await self._has_taken(membership):
                return

    async def _next(self, step: ElasticStep | None, *, is_planned: bool = False) -> Membership | None:
        """Report the state of this process, and return its next world."""
        state = self.current_state
        prepared = await state.prepared_lineage() if step is not None and step.is_prepared else None
        report = MemberReport(
            generation=self.generation, lineage=await state.lineage(), prepared=prepared, suspects=self._suspects()
        )
        await self._stop_node(is_planned=is_planned)
        return await self._source.next_world(report)

    async def _is_caught_up(self, membership: Membership) -> bool:
        """Decide whether this newcomer has the state from which the world of ``membership`` goes on."""
        return membership.lineage == await self.current_state.lineage()

    async def _bring_up_first(self, membership: Membership) -> None:
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
        self._changes.send(membership.change)
        return True

    def _suspects(self) -> tuple[tuple[int, str], ...]:
        if self._node is None:
            return ()
        lost = self._node.links.lost.items()
        return tuple((rank, error.cause or str(error)) for rank, error in lost if error.cause != LEFT)

    def _note_futile(self, step: ElasticStep, error: BaseException | None) -> None:
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
        await self._stop_node()
        lineage = await state.lineage()
        if lineage != membership.lineage:
            raise DivergedState(
                f"rank {membership.rank}: this rank has {lineage}, and generation {membership.generation} goes on from "
                f"{membership.lineage}"
            )
        self._membership = membership
        if self._refused is not None and membership.size == 1:
            self._refused()
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
        self._node = await start_node(membership.attach)
        links = self._node.links
        links.refuse_fixed_ranks = partial(refuse_fixed_ranks, generation=links.world.generation)
        self._meter = step_meter(self._node.world, "training")
        if self.arithmetic:
            await self._comparison.compare(self._node, self.arithmetic)
        if self._actors is not None and self._actors.is_used:
            await self._actors.enter_world(self._node, membership.change)
        state = self.current_state
        if state.sharded is not None:
            try:
                await state.sharded.parts.reshard(self._node.world, self._node.membership.hosts, state.step)
            except StateLost as error:  # nothing is needed of ranks that had done all steps, and have left
                self._state_lost = error

    async def _stop_node(self, *, is_planned: bool = False, is_last: bool = False) -> None:
        node, self._node = self._node, None
        if node is not None:
            if self._actors is not None:
                await self._actors.leave_world(is_planned=is_planned, is_last=is_last)
            if self._state is not None and self._state.sharded is not None:
                await self._state.sharded.leave_world()
            if self.is_revoked and self._why is not None and not is_last:
                node.links.is_revoked = True  # all were notified: none waits for one that is stopped or cut off
            await node.stop()
            why = self._why if self.is_revoked else None
            node.world.revoke(why or "this rank went on to another world")  # later uses raise StaleGeneration


def elastic(*, portions: int, seed: int = 0, source: WorldSource | None = None) -> ElasticJob:
    """Return an elastic job: ``async with ap.elastic(portions=16) as job``.

    Every global batch has ``portions`` parts, over which sums have the same bits in every world: choose a power of two
    and at least as many as there will ever be ranks.  ``seed`` is that of ``step.rng``.  ``source`` provides the
    worlds; by default it is the launcher of this process; without one there is a world of one.
    """
    return ElasticJob(portions=portions, seed=seed, source=source)


def _default_source() -> WorldSource:
    if os.environ.get(ELASTIC_PIPE):
        return PipeWorlds(SocketPipe(os.environ))
    found = find_world(os.environ)
    return LoneWorld() if found is None else LaunchedWorld(found)


async def _unless_done(
    coming: asyncio.Future[StepUpdate], joining: asyncio.Future[Membership] | None
) -> StepUpdate | None:
    """Return the result of ``coming``; None if ``joining``, which may fail, is done first."""
    waited: set[asyncio.Future[Any]] = {coming, *(() if joining is None else (joining,))}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    return None if joining is not None and joining.done() else coming.result()
