"""One step of an elastic job: the work of a program in ``async with step``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.core.config.placement import is_frozen
from asyncpar.core.observe.records import EventState
from asyncpar.core.observe.steps import StepMeter
from asyncpar.elasticity.donors import StepUpdate
from asyncpar.elasticity.gradients import by_parameter
from asyncpar.elasticity.interruption import Interruption, program_errors
from asyncpar.elasticity.job_worlds import JobWorlds
from asyncpar.elasticity.lineage import describe_divergence, describe_frozen
from asyncpar.elasticity.portions import Portions
from asyncpar.elasticity.reduction import Array, GradientLayout, Gradients, PortionSum
from asyncpar.elasticity.samples import portion_rng
from asyncpar.elasticity.sharded_optimizer import ShardedGradients
from asyncpar.elasticity.sharded_step import ShardedStep
from asyncpar.elasticity.step_machine import StepMachine, StepPhase, Vote, decode_vote, encode_vote
from asyncpar.errors import DivergedState, NonFiniteValue, PeerError, StaleGeneration, UsageError
from asyncpar.hosts.lineage import Lineage
from asyncpar.hosts.messages import WorldChange
from asyncpar.nn.optimizers import Optimizer
from asyncpar.nn.parameter import Parameter

if TYPE_CHECKING:
    from asyncpar.elasticity.pipeline import OfPortion
    from asyncpar.pipeline.execution import LossFunction

Reduced: TypeAlias = "dict[str, Array] | list[Array] | ShardedGradients"


class ElasticStep:
    """Step ``number`` of a run, in the current world: use as ``async with step``.

    When the block ends, the step is committed on all ranks or on none; ``is_committed`` shows which.  If the world
    changed, the block ends early (with ``WorldChanged``, or its task is cancelled for a moment), the next world is
    there when ``async with`` is left, ``change`` describes it, and an aborted step is repeated with the same number.
    ``is_replay``: this rank is a newcomer and repeats a step that the others have committed; it has no portions, and
    is in a world of its own.
    """

    def __init__(self, job: JobWorlds, number: int, replay: StepUpdate | None = None) -> None:
        self.number = number
        self.change: WorldChange | None = None
        """The change of the world that ended this step, or followed it; None if there was none."""
        self.began_in = -1
        """The generation of the world in which the block was entered."""
        self.loss = 0.0
        """The sum of the portions' losses, once it is reduced."""
        self.is_replay = replay is not None
        self._job = job
        self._replay = replay
        self._machine = StepMachine(number)
        self._portions = Portions(job.portions, 1)
        self._interruption = Interruption()
        self._sum: PortionSum | None = None
        self._flats: list[Array] = []
        self._vote: Vote | None = None
        self._sharded: ShardedStep | None = None
        self._meter: StepMeter | None = None
        """The meter of the world in which the block was entered; a replay has none."""

    # -- the program's interface ---------------------------------------------------------------------------------------

    @property
    def is_committed(self) -> bool:
        return self._machine.phase is StepPhase.COMMITTED

    @property
    def world(self) -> Communicator:
        """The communicator of all ranks of the current world.  Kept beyond its world, it raises ``StaleGeneration``."""
        return self._job.world

    @property
    def generation(self) -> int:
        """The number of the current world."""
        return self._job.generation

    @property
    def portions(self) -> range:
        """The portions of this rank in this step."""
        if self.is_replay:
            return range(0)
        if self._sharded is not None and self._sharded.has_pipeline:
            return self._sharded.pipeline.places(self._job.size).portions_of(self._job.rank)
        return self._portions.of(self._job.rank)

    def rng(self, portion: int) -> np.random.Generator:
        """Return the random stream of ``portion`` in this step: the same on every rank and in every repetition."""
        return portion_rng(self._job.seed, self.number, portion)

    def add(self, portion: int, gradients: Gradients, *, loss: float = 0.0) -> None:
        """Add the gradients of one of this rank's portions, which may be reused at once, and its loss.

        ``gradients`` are arrays, in order or by name, of the same shapes for every portion.  Raises ``UsageError`` for
        a portion that does not belong to this rank, or was added before.
        """
        loss = float(loss)
        self._refuse_pipeline("add")
        self._machine.require_addable(portion)
        assert self._sum is not None
        packed = self._sum.pack(gradients if self._sharded is None else self._sharded.in_order(gradients))
        self._sum.encode(portion, packed)
        self._machine.record_added(portion)  # after everything that may be refused, so it can be added again
        self._sum.add(portion, packed, loss)

    async def reduce(self, op: str = "sum") -> Any:
        """Return the sum (or mean) over all portions, with the same bits in every world; it is valid within the step.

        The result has the form in which the gradients were added: a dict or a list of arrays.  If gradients are sharded
        (a state with ``zero`` of 2 or 3) it is this rank's part of them, for ``update``.

        Raises ``WorldChanged`` when the world is over, and ``UsageError`` if a portion of this rank is missing.
        """
        if op not in ("sum", "mean"):
            raise UsageError(f"op: expected sum or mean, got {op!r}")
        self._refuse_pipeline("reduce")
        self._machine.reduce()
        is_mean = op == "mean"
        layout = await self._reduce_replayed() if self.is_replay else await self._reduce_together(is_mean=is_mean)
        is_whole = self._sharded is None or not self._sharded.has_parts_of_gradients
        if not self.is_replay:
            await self._keep(layout if is_whole else GradientLayout([]), self._flats if is_whole else [])
        self._machine.reduced()
        if not is_whole:
            return ShardedGradients(self._flats[0] if self._flats else layout.empty)
        return layout.views(self._flats)

    async def run_pipeline(
        self, inputs: OfPortion, targets: OfPortion, loss: LossFunction, *, op: str = "sum"
    ) -> ShardedGradients:
        """Run the portions through the pipeline, and return the sum (or mean) of gradients of this rank's stages.

        For a state with ``pipeline=``, in place of ``add`` and ``reduce``.  ``inputs(portion)`` is called on the rank
        of the first stage, ``targets(portion)`` on that of the last, where ``loss(output, target)`` returns a number
        and its gradient.  Raises as ``reduce`` does, and ``ActionFailed`` for errors of a stage.
        """
        if op not in ("sum", "mean"):
            raise UsageError(f"op: expected sum or mean, got {op!r}")
        sharded = self._expect_sharded("run_pipeline")
        assert sharded.pipeline is not None
        self._machine.reduce()
        with self._waiting():
            flat, self.loss = await sharded.run_pipeline(inputs, targets, loss, is_mean=op == "mean")
        if self._meter is not None:
            self._meter.add(sharded.pipeline.seconds_busy)
        if not self.is_replay:
            await self._keep(GradientLayout([]), [])
        self._machine.reduced()
        return ShardedGradients(flat)

    def _refuse_pipeline(self, call: str) -> None:
        if self._sharded is not None and self._sharded.has_pipeline:
            raise UsageError(f"step {self.number}: {call} is not for a state with pipeline=; use step.run_pipeline")

    async def _keep(self, layout: GradientLayout, flats: list[Array]) -> None:
        """Publish this step's reduced gradients to newcomers, if there are any."""
        if not self._job.shelf.reduced(layout):
            return
        update = await self._job.shelf.copy(self.number, layout, flats, self.loss)
        if self._sharded is not None:
            self._sharded.keep(update)
        elif update is not None:
            self._job.shelf.keep(update)

    async def _reduce_replayed(self) -> GradientLayout:
        assert self._replay is not None
        layout = GradientLayout.described(self._replay.layout)
        self._flats = list(self._replay.flats)
        self.loss = self._replay.loss
        return layout

    async def _reduce_together(self, *, is_mean: bool) -> GradientLayout:
        assert self._sum is not None
        bounds = None if self._sharded is None else self._sharded.bounds(self._portions)
        try:
            with self._waiting():
                self._flats, self.loss = await self._sum.total(self._job.world, is_mean=is_mean, bounds=bounds)
        except (PeerError, StaleGeneration) as error:
            raise self._job.changed(error) from error
        assert self._sum.layout is not None
        self._job.layout = self._sum.layout
        return self._sum.layout

    async def update(
        self, optimizer: Optimizer, gradients: Reduced, *, learning_rate: float, clip_norm: float | None = None
    ) -> None:
        """Make the step of ``optimizer``, one of the state, with ``gradients``; visible to others once committed.

        ``gradients`` are by name, or in the order of the optimizer's parameters; with ``clip_norm`` they are scaled to
        a global norm of at most that.  Raises ``NonFiniteValue``, with nothing changed, for gradients that are not
        finite.  Frozen parameters stay unchanged: their gradients do not count, and may be left out by name.
        """
        self._machine.check_update()
        if self._sharded is not None and self._sharded.takes(optimizer):
            await self._sharded.update(gradients, learning_rate=learning_rate, clip_norm=clip_norm)
            return
        given = by_parameter(optimizer, gradients)
        await self._job.current_state.open(optimizer)
        trained = [
            (parameter, gradient, parameter.grad)
            for parameter, gradient in zip(optimizer.parameters, given, strict=True)
            if not is_frozen(parameter)
        ]
        try:
            for parameter, gradient, _ in trained:
                parameter.grad = gradient
            nbytes = sum(gradient.nbytes for gradient in given)
            await off_loop(lambda: _clip_and_step(optimizer, clip_norm, learning_rate), nbytes=nbytes)
        except NonFiniteValue:
            self._job.current_state.withdraw(optimizer)
            raise
        finally:
            for parameter, _, own in trained:
                parameter.grad = own

    async def gather(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Give ``parameters`` (default: all) of a state with ``zero=3`` their latest values until ``release``.

        All ranks call it with the same parameters, and equally often: around the loop over portions, not in it.  A
        newcomer that repeats a step gets none.
        """
        await self._expect_sharded("gather").gather(parameters)

    def release(self, parameters: Iterable[Parameter] | None = None) -> None:
        """Free the values that ``gather`` has fetched; the end of the block does so, too."""
        self._expect_sharded("release").release(parameters)

    def _waiting(self) -> AbstractContextManager[None]:
        """Return a block in which this rank waits for others."""
        return nullcontext() if self._meter is None else self._meter.waiting()

    def _expect_sharded(self, call: str) -> ShardedStep:
        if self._sharded is None:
            raise UsageError(f"step {self.number}: {call} is for job.state(..., zero=3) or pipeline=")
        return self._sharded

    # -- the block -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        state = self._job.current_state
        self._job.failed = None  # the program has gone on after it
        if state.sharded is not None:
            self._sharded = ShardedStep(self._job, state.sharded, self.number, self._replay)
        if self.is_replay:
            await state.begin()
            self._machine.begin_replay()
        else:
            await self._job.ensure_world(self)
            self._portions = Portions(self._job.portions, self._job.size)
            if self._sharded is not None and self._sharded.has_pipeline:
                self._machine.begin_replay()  # its portions go through the pipeline
            else:
                sums = self._machine.begin(self._portions, self._job.rank)
                codec = None if self._sharded is None else self._sharded.codec
                self._sum = PortionSum(self._portions, sums, self._job.layout, self._job.pool, codec)
            self.began_in = self._job.generation
        self._job.begun(self)
        self._interruption.begin()
        if not self.is_replay:
            self._meter = self._job.meter
            self._meter.begin(self.number)
            self._meter.works()
        return self

    def check_used(self) -> None:
        """Raise ``UsageError`` unless the step was used as ``async with step``."""
        if not self._machine.is_over:
            raise UsageError(
                f"step {self.number}: use it, `async with step:`, before the next one; it is {self._machine.phase}"
            )

    def interrupt(self) -> None:
        """End the block where it waits: the world is over."""
        self._interruption.interrupt()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            found = error
            if error is None:
                try:
                    await self._prepare_and_vote()
                except (Exception, asyncio.CancelledError) as failure:  # noqa: BLE001  # judged as if of the block
                    found = failure
            was_interrupted = self._interruption.end()
            if found is None:
                self._record(EventState.COMPLETED)
                await self._finish()
                return False
            own = program_errors(found, self._job.is_world_over, is_interrupted=was_interrupted)
            if own is None:
                self._record(EventState.CANCELLED)
                await self._job.reform(self, found)
                return True
            self._record(EventState.FAILED if isinstance(own, Exception) else EventState.CANCELLED)
            self._job.failed = self.number, f"{type(own).__name__}: {own}"
            self._machine.abort()
            await self._job.current_state.abort()
            if own is not found:  # its context is what it was taken from
                raise own from own.__cause__
            if own is not error:
                raise own
            return False
        finally:
            self._job.ended(self)
            if self._sum is not None:
                self._sum.release()

    def _record(self, state: EventState) -> None:
        if self._meter is not None:
            self._meter.end(state)

    async def _prepare_and_vote(self) -> None:
        if self._sharded is not None:
            self._machine.check_prepare()
            await self._sharded.exchange()
        self._machine.prepare()
        self._job.current_state.prepare()
        if not self.is_replay:
            self._vote = await self._vote_with_all()
            await self._job.current_state.wait_for_sums()
            await self._job.hold_lease()  # last: this process may have been stopped until now

    async def _vote_with_all(self) -> Vote:
        lineage = await self._job.current_state.lineage()
        is_pending = self._job.has_pending
        word = np.array([encode_vote(lineage, is_pending=is_pending)], np.uint64)
        if self._job.size > 1:
            try:
                with self._waiting():
                    await self._job.world.all_reduce(word, "band")
            except (PeerError, StaleGeneration) as error:
                raise self._job.changed(error) from error
        vote = decode_vote(int(word[0]))
        if not vote.agrees:
            self._interruption.forbid()  # all ranks know, and end; that others are gone first is no change of the world
            own = [lineage.step, lineage.digest, self._job.current_state.frozen]
            try:
                gathered = await self._job.world.all_gather_object(own)
            except (PeerError, StaleGeneration) as error:  # others know already, and have ended: so does this rank
                raise DivergedState(
                    f"step {self.number}: the ranks differ in state after step {lineage.step - 1}; the ranks "
                    f"that ended before this one name those that differ: {error}"
                ) from error
            found = [Lineage(step, digest) for step, digest, _ in gathered]
            frozen = describe_frozen([names for _, _, names in gathered])
            raise DivergedState(f"step {self.number}: {describe_divergence(found, self._job.hosts)}{frozen}")
        return vote

    async def _finish(self) -> None:
        await self.commit()
        if self._vote is not None and self._vote.is_pending:
            await self._job.reform(self, None)

    async def commit(self) -> None:
        """Commit: all ranks have voted, or all survivors had."""
        await self._job.current_state.commit()
        self._machine.commit()
        self._job.committed()

    async def settle(self, target: int) -> None:
        """Commit or abort the step under way: the world is over, and ``target`` steps are committed."""
        if self._machine.is_over or self._machine.phase is StepPhase.NEW:
            return
        if target > self.number:
            if self._machine.phase is not StepPhase.PREPARED:
                raise DivergedState(
                    f"step {self.number}: the others have committed it, and this rank is {self._machine.phase}"
                )
            await self.commit()
            return
        self._machine.abort()
        await self._job.current_state.abort()

    @property
    def is_prepared(self) -> bool:
        return self._machine.phase is StepPhase.PREPARED

    def __repr__(self) -> str:
        return f"ElasticStep({self.number}, {self._machine.phase}, generation {self.generation})"


def _clip_and_step(optimizer: Optimizer, clip_norm: float | None, learning_rate: float) -> None:
    if clip_norm is not None:
        optimizer.clip(clip_norm)
    optimizer.step(learning_rate)
