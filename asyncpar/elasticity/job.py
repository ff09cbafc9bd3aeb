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
from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.core.config.checks import check_count
from asyncpar.core.config.environment import ELASTIC_PIPE
from asyncpar.core.config.names import CodecName
from asyncpar.core.signals import TERMINATION
from asyncpar.elasticity.donors import StepUpdate
from asyncpar.elasticity.healing import Healing
from asyncpar.elasticity.job_worlds import JobWorlds
from asyncpar.elasticity.memory import populate
from asyncpar.elasticity.pipe import PipeWorlds
from asyncpar.elasticity.pipe_socket import SocketPipe
from asyncpar.elasticity.portions import MOST_PORTIONS
from asyncpar.elasticity.reduction import GradientLayout
from asyncpar.elasticity.rounds import ElasticRound, RoundContents, RoundPlan
from asyncpar.elasticity.sharded import Sharding
from asyncpar.elasticity.state import ElasticState
from asyncpar.elasticity.state_inputs import Parameters
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.worlds import LaunchedWorld, LoneWorld, Membership, WorldSource
from asyncpar.errors import (
    DivergedState,
    LaunchError,
    PeerLost,
    UsageError,
)
from asyncpar.hosts.messages import WorldChange
from asyncpar.net.transport.serving import Serving
from asyncpar.nn.optimizers import Optimizer
from asyncpar.nn.stage import Stage
from asyncpar.node import start_node
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
        check_count("portions", portions)
        if portions > MOST_PORTIONS:
            raise UsageError(f"portions: expected at most {MOST_PORTIONS}, got {portions}")
        check_count("seed", seed, least=0)
        self._worlds = JobWorlds(_default_source() if source is None else source, portions=portions, seed=seed)

    async def __aenter__(self) -> Self:
        self._worlds.source.on_revoked(self._worlds.on_revoked)
        if (termination := TERMINATION.get()) is not None:
            termination.ask_first(self.ask_to_leave)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if (termination := TERMINATION.get()) is not None:
            termination.ask_first(None)
        worlds = self._worlds
        try:
            if worlds.state is not None:
                await worlds.state.close()
            await worlds.shelf.close("the job has ended there")
        finally:
            await worlds.source.leave(self._failure(error))
            await worlds.stop_node(is_last=True)
            worlds.changes.close()

    def _failure(self, error: BaseException | None) -> tuple[int | None, str] | None:
        """Return the failed step, None outside a step, and the error of the program; None if the program is done.

        A program that a signal or a cancellation ends is not done: its state may be lost with it.
        """
        if error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
            return None
        how = f"{type(error).__name__}: {error}".removesuffix(": ")
        failed = self._worlds.failed
        return failed if failed and isinstance(error, Exception) else (None, how)

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
                yield ElasticRound(self._worlds, workers, plan, contents, step)

    async def _all_steps(self, state: ElasticState, until: int) -> AsyncGenerator[ElasticStep, None]:
        check_count("until", until, least=0)
        known = self._worlds.state
        if known is not None and known is not state:
            raise UsageError("steps: expected the state of the earlier steps of this job, got another")
        self._worlds.state = state
        if known is None:
            async with aclosing(self._enter(state, until)) as steps:
                async for step in steps:
                    yield step
        while state.step < until and not self.is_drained:
            step = ElasticStep(self._worlds, state.step)
            yield step
            step.check_used()

    @property
    def actors(self) -> ElasticActors:
        """The actors of the job, which outlive worlds: see ``ElasticActors.declare``."""
        worlds = self._worlds
        if worlds.actors is None:
            from asyncpar.elasticity.actors import ElasticActors  # needed only with actors

            worlds.actors = ElasticActors(worlds.changed, worlds.is_world_over)
        return worlds.actors

    def ask_to_leave(self, refused: Callable[[], None]) -> bool:
        """Ask the agent to let this process leave at the end of a step, as the first SIGTERM does under ``ap.run``.

        Returns False if there is no agent.  ``refused`` is called if it may not leave: it is to end anyway, or no other
        rank would go on.
        """
        source = self._worlds.source
        if not isinstance(source, PipeWorlds) or not source.ask_to_leave(refused):
            return False
        self._worlds.on_last = refused
        return True

    def watch_world(self) -> AsyncIterator[WorldChange]:
        """Iterate over the worlds that this process enters after this call: who joined and left, and why.

        Every watcher gets every change; the iteration ends with the job.
        """
        return self._worlds.changes.listen()

    @property
    def is_drained(self) -> bool:
        """Whether this process is not a member at the end.

        It was asked to leave, so ``steps`` ends early, or the job was complete before its state was known to be
        equal to that of the others.
        """
        return self._worlds.is_drained

    @property
    def portions(self) -> int:
        """The number of parts of every global batch."""
        return self._worlds.portions

    @property
    def seed(self) -> int:
        """The seed of ``step.rng``."""
        return self._worlds.seed

    @property
    def arithmetic(self) -> dict[str, str]:
        """The settings that the bits of numbers depend on in this process, which may be added to before the first step.

        {} where all members are in one process.
        """
        return self._worlds.arithmetic

    @property
    def world(self) -> Communicator:
        """The communicator of the current world."""
        return self._worlds.world

    @property
    def generation(self) -> int:
        """The number of the current world, -1 before the first."""
        return self._worlds.generation

    @property
    def rank(self) -> int:
        """This process's rank in the current world."""
        return self._worlds.rank

    @property
    def size(self) -> int:
        """The number of ranks of the current world."""
        return self._worlds.size

    @property
    def hosts(self) -> Sequence[str]:
        """The name of the host of each rank of the current world."""
        return self._worlds.hosts

    # -- coming in -----------------------------------------------------------------------------------------------------

    async def _enter(self, state: ElasticState, until: int) -> AsyncGenerator[ElasticStep, None]:
        """Join; a newcomer is healed first, and runs the steps that it has missed."""
        worlds = self._worlds
        donors = await worlds.source.donors()
        worlds.is_drained = donors is None
        if donors is None:
            return
        if not donors:
            worlds.shelf.attach(state)
            await worlds.bring_up_first(await worlds.source.join(await state.lineage(), worlds.shelf, is_healed=False))
            return
        worlds.node = await start_node(attach_alone(Serving(), None))
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
                if worlds.membership is not None or attempt == HEALINGS - 1:
                    raise
                worlds.shelf.detach()
                await worlds.source.withdraw()
                await asyncio.sleep(_HEAL_AGAIN.delay(attempt + 1, draw=0.0))
                donors = await worlds.source.donors()
                worlds.is_drained = donors is None
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
            self._worlds.source.refused(str(error))
            raise

    async def _catch_up(
        self, healing: Healing, state: ElasticState, until: int, *, size: int
    ) -> AsyncGenerator[ElasticStep, None]:
        """Run the steps that this newcomer has missed, until it is a member, or there are no more steps.

        It asks to join when it has caught up, so the others need not wait for it, or when it no longer gets nearer:
        then they have to.  Before that it has run a step, and proved that it comes to the others' state: otherwise no
        world is changed for it, and ``DivergedState`` is raised.  ``size`` is that of the world to come.
        """
        worlds = self._worlds
        worlds.shelf.attach(state)
        first = state.step
        joining: asyncio.Future[Membership] | None = None
        coming = asyncio.ensure_future(healing.update(state.step))
        others: list[asyncio.Future[Any]] = []
        try:
            while state.step < until:
                if joining is None and state.step > first and not await healing.is_catching_up():
                    await self._unless_refused(healing.prove(await state.lineage()))
                    join = worlds.source.join(await state.lineage(), worlds.shelf, is_healed=True)
                    joining = asyncio.ensure_future(join)
                    others.append(joining)
                update = await _unless_done(coming, joining)
                if update is None:
                    assert joining is not None
                    membership = joining.result()
                    if not await worlds.is_caught_up(membership):  # they repeat a step that was repeated here
                        raise PeerLost("healing: the others have not committed the last step", cause="an aborted step")
                    others.append(asyncio.ensure_future(healing.close()))  # donors need not keep updates any more
                    await worlds.bring_up_first(membership)
                    return
                coming = asyncio.ensure_future(healing.update(state.step + 1))  # while this one is repeated
                if update.flats and not worlds.pool.has_memory:
                    others.append(asyncio.ensure_future(self._take_memory(update, size)))
                step = ElasticStep(worlds, state.step, update)
                yield step
                step.check_used()
                if joining is not None:
                    worlds.source.progress(await state.lineage())
            try:
                await self._unless_refused(healing.prove(await state.lineage()))
            except PeerLost:  # the others are done, and none can compare the state of this process any more
                worlds.is_drained = True
        finally:
            for task in (coming, *others):
                task.cancel()
            await asyncio.gather(coming, *others, return_exceptions=True)

    async def _take_memory(self, update: StepUpdate, size: int) -> None:
        """Take the memory that the first step in a world of ``size`` ranks needs, so the others need not wait."""
        worlds = self._worlds
        portions = -(-worlds.portions // size)
        count = portions.bit_length() + 2  # sums of its portions, and two arrays for those of all
        arrays = worlds.pool.reserve(GradientLayout.described(update.layout), count)
        await off_loop(partial(populate, arrays), nbytes=sum(array.nbytes for array in arrays))


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
