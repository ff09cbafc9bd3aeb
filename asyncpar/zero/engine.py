"""The engine of sharded training: gradients go to their owners, which update, and values go to all ranks.

Theory of operation.  ``ready`` records final gradients during the backward pass, ``reduce`` brings all of them to their
owners, and no value changes before ``step``; in between the caller may inspect norms and agree with other ranks on what
to do.  A step begins with an exchange in which replicas make sure that all of them take the same step and that
gradients are finite; nothing is written before that.  A failure on one replica is one on all: the rank aborts all
collectives that others may be waiting for.  Then ``resume`` brings replicas together again.

Sums are computed by the same reduce-scatter in all stages, so all stages get the same bits.  They equal those of an
all-reduce in the arena (which adds in rank order), and of one by the same ``algorithm`` if that adds all values in one
order, as ``halving`` does; two replicas have only one order.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncpar.agreement.exchanges import compare
from asyncpar.codecs import Values
from asyncpar.collectives.communicator import Communicator, refuse_elastic, step_meter
from asyncpar.core.concurrency.bridge import LoopBridge
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.core.heap import give_back_free_memory
from asyncpar.errors import PeerError, UsageError
from asyncpar.nn.half import stored_dtype
from asyncpar.nn.optimizers import Rule, distinct, restore_skipped, skipped_steps
from asyncpar.nn.parameter import Array, Parameter, check_on_host
from asyncpar.nn.stage import Stage
from asyncpar.zero.buckets import make_means
from asyncpar.zero.config import ZeROConfig
from asyncpar.zero.memory import TransientBytes, ZeROMemoryStats, held_now, kept_in_a_step
from asyncpar.zero.parameter_gatherer import ParameterGatherer, ParameterUnit, ShardedStage
from asyncpar.zero.partition import Partition, make_budget
from asyncpar.zero.recovery import Names, Recovery, torn
from asyncpar.zero.reducer import Reducer
from asyncpar.zero.row_sum import RowSums
from asyncpar.zero.share import StatePiece, describe, pieces_of, restore_pieces
from asyncpar.zero.step_state import EnginePhase, StepState
from asyncpar.zero.stepping import CommitVote, OwnedUpdate, gather_values, global_norm

T = TypeVar("T")


class ZeroEngine:
    """Trains ``parameters`` by ``rule`` over the replicas of ``communicator``, with the settings of ``config``.

    All ranks create it, and await ``prepare``, with the same arguments, and then call the same methods in the same
    order.  A step is ``zero_grad``, backward passes, ``reduce``, then perhaps ``scale``, and ``step``.  Everything is
    called on the event loop except ``ready``, which any thread may call.  ``bridge`` is that of the compute thread; by
    default stage 3 makes its own.  ``row_sums`` computes the sums of buckets in another way than that of ``config``,
    for example host by host.  ``name`` distinguishes engines that share ``communicator``, and from ``prepare`` on
    belongs to one live engine.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        rule: Rule,
        config: ZeROConfig,
        communicator: Communicator,
        *,
        bridge: LoopBridge | None = None,
        name: str = "zero",
        row_sums: RowSums | None = None,
    ) -> None:
        refuse_elastic(communicator, "ZeRO", "sharding")
        self.parameters = distinct(parameters)
        for parameter in self.parameters:
            if not getattr(parameter, "is_released", False):  # those of other modules are never frozen
                check_on_host(parameter.name, parameter.value)
        self.rule = rule
        self.config = config
        self.communicator = communicator
        self.step_count = 0
        self.factor = 1.0
        """The factor of gradients in the next step."""
        self.runs = 1
        """Number of runs of sharded layers that are passed through one by one, like the pieces of a pipeline's rank."""
        self._name = name
        self._names = Names(name)
        self._bridge = bridge
        self._layers: list[ShardedStage] = []
        self._gathered: list[ParameterUnit] = []
        nbytes = sum(parameter.size * stored_dtype(parameter).itemsize for parameter in self.parameters)
        self._bytes_held = TransientBytes(config.most_bytes if config.pin_memory else 0, config.idle_bytes_of(nbytes))
        self._means = make_means(
            self.parameters,
            rule,
            config,
            communicator,
            bytes_held=self._bytes_held,
            key=self._names.key,
            row_sums=row_sums,
        )
        self._budget = make_budget(self.partition, config, self._means.row_sums.extra_bytes)
        self._state = StepState(accumulates=config.stage.shards_gradients)
        self._reducer = Reducer(self._means, window=self._budget.window, meter=step_meter(communicator, name))
        self._recovery = Recovery(self._means, self._reducer, self._state, self._names)

    @property
    def partition(self) -> Partition:
        """The values that each rank owns, and the buckets."""
        return self._means.partition

    # -- before the first step ---------------------------------------------------------------------------------------

    def shard(self, stage: Stage[Any]) -> Stage[Any]:
        """Return ``stage`` with its parameters gathered for each pass and released after it; itself before stage 3.

        Call it for each layer, in the order of the forward pass, before ``prepare``.
        """
        self._state.check_new("shard")
        known = {id(parameter) for parameter in self.parameters}
        for parameter in stage.parameters():
            if id(parameter) not in known:
                raise UsageError(f"stage: expected parameters of this engine, got another one, {parameter.name!r}")
        if not self.config.stage.shards_parameters:
            return stage
        self._layers.append(ShardedStage(stage, len(self._layers)))
        return self._layers[-1]

    def close(self) -> None:
        """Release the name for another engine; this one takes no more steps."""
        self.communicator.release(self._name, self)

    async def prepare(self) -> None:
        """Verify that all replicas hold the same parameters and settings, and keep only what this rank owns.

        Raises ``UsageError`` on every rank, with nothing released, naming the first rank that differs and how.
        """
        self._state.check_new("prepare")
        stage = self.config.stage
        layers = [self._means.places_of(parameter.name for parameter in layer.parameters()) for layer in self._layers]
        lines = [str(self.config), str(self.rule), f"sharded layers {layers}"]
        await off_loop(
            lambda: lines.extend(describe(self.partition.specs, self.parameters)),
            nbytes=sum(map(self.partition.bucket_nbytes, self.partition.buckets)),
        )
        self.communicator.claim(self._name, self)
        try:
            await compare(self.communicator, lines, key=f"{self._names.prefix}/prepare")
        except BaseException:
            self.communicator.release(self._name, self)
            raise
        key = f"{self._names.prefix}/word"
        self._names.prefix += "/" + await self.communicator.broadcast_object(secrets.token_hex(4), key=key, wanted=str)
        if stage.shards_gradients:
            for share in self._means.shares:
                share.parameter.release_grad()
                share.parameter.memory = self._bytes_held.arrays
        if stage.shards_parameters:
            self._recovery.gatherer = gatherer = ParameterGatherer(
                [ParameterUnit(f"layer {index}", members, self._means) for index, members in enumerate(layers)],
                depth=self.config.prefetch_depth,
                most=self._budget.rest,
                bridge=self._bridge or LoopBridge(),
                bytes_held=self._bytes_held,
                runs=self.runs,
            )
            for share in self._means.shares:
                share.part_with_value()
            for layer in self._layers:
                layer.settle(gatherer)
        give_back_free_memory()
        self._state.phase = EnginePhase.OPEN

    # -- gradients ---------------------------------------------------------------------------------------------------

    def ready(self, name: str) -> None:
        """Report that the gradient of the parameter ``name`` is final: pass this as ``on_gradient``.  From any thread.

        Its bucket is reduced as soon as all of it is final.  From stage 2 on the gradient is taken from the parameter:
        later additions belong to the next ``reduce``.
        """
        self._state.check_giving("ready")
        self._reducer.ready(name)

    async def reduce(self) -> None:
        """Bring all gradients to their owners; parameters without gradient count as zeros.

        From stage 2 on it may be called several times in a step, for example after each micro-batch: gradients add up.
        """
        self._state.check_giving("reduce")
        async with self._recovery.all_or_none("reduce"):
            await self._reducer.finish()
        self._state.phase = EnginePhase.REDUCED

    def reduced(self) -> Mapping[str, Array]:
        """Return the flat gradients of the values that this rank updates, by parameter: all of them before stage 1.

        The caller may write to them, to add the values of other tensor-parallel ranks or of the other end of a tie.
        """
        self._state.check_reduced("reduced")
        return {share.parameter.name: share.gradient for share in self._means.shares}

    def squared_norm(self, *, without: Collection[str] = ()) -> float:
        """Return this rank's part of the squared norm of scaled gradients, except parameters ``without``.

        ``nn.optimizers.combined`` adds the parts of all replicas.  The sum has the same bits in all stages.
        """
        self._state.check_reduced("squared_norm")
        return self._means.squared_norm(without) * self.factor**2

    async def global_norm(self, *, without: Collection[str] = ()) -> float:
        """Return the norm of the scaled gradients of all replicas; not finite if one of them is not.

        All ranks call it.  Parameters named in ``without`` are excluded.
        """
        self._state.check_reduced("global_norm")
        async with self._recovery.all_or_none("global_norm"):
            own = await self._read_gradients(lambda: self.squared_norm(without=without))
            return await global_norm(self._means, own)

    def is_finite(self) -> bool:
        """Return whether the gradients that this rank owns are finite."""
        self._state.check_reduced("is_finite")
        return not any(self._means.overflowed())

    def spoiled(self) -> list[str]:
        """Return the parameters whose gradients were not finite on this rank before they were reduced."""
        self._state.check_reduced("spoiled")
        return self._means.names_of(self._means.spoiled())

    def overflowed(self) -> list[str]:
        """Return the parameters whose reduced gradients are not finite in this rank's part."""
        self._state.check_reduced("overflowed")
        return self._means.names_of(self._means.overflowed())

    def scale(self, factor: float) -> None:
        """Multiply gradients by ``factor`` in the next step; half precision loses nothing by it."""
        self._state.check_reduced("scale")
        if not math.isfinite(factor):
            raise UsageError(f"factor: expected a finite number, got {factor}")
        self.factor *= factor

    async def _read_gradients(self, read: Callable[[], T]) -> T:
        """Return the result of ``read``, which reads all gradients, without blocking the loop."""
        found: list[T] = []
        nbytes = sum(share.own_gradient.nbytes for share in self._means.shares)
        await off_loop(lambda: found.append(read()), nbytes=nbytes)
        return found[0]

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self._state.check_sound("zero_grad")
        if not self._reducer.is_idle:
            raise UsageError("zero_grad: gradients are on their way; reduce() or abandon() first")
        self._forget_gradients()

    # -- the step ----------------------------------------------------------------------------------------------------

    async def step(self, learning_rate: float) -> None:
        """Update all parameters once, on all replicas.

        Raises ``NonFiniteValue`` or ``UsageError`` on all of them, with nothing changed, unless they agree on the step
        and all gradients are finite; then gradients are unchanged.  Raises ``StepTorn`` if it fails halfway.
        """
        self._state.check_reduced("step")
        gatherer = self._recovery.gatherer
        if gatherer is not None and gatherer.gathered:
            raise UsageError(f"step: parameters are gathered, {gatherer.gathered[0]!r} for one; release() first")
        async with self._recovery.all_or_none("step"):
            if gatherer is not None:
                await gatherer.forget_prefetched()
            vote = CommitVote(
                self._means,
                step=self.step_count,
                learning_rate=learning_rate,
                factor=self.factor,
                is_finite=await self._read_gradients(self.is_finite),
            )
            objection = await vote.run()
        if objection is not None:
            raise objection
        update = self._begin_update(learning_rate)
        self._state.phase = EnginePhase.STEPPED
        try:
            await update.run()
        except BaseException as error:
            if not update.is_local:
                await self._recovery.break_off(f"step: {str(error) or type(error).__name__}")
            if isinstance(error, PeerError):
                raise torn(self.step_count, error) from error
            raise
        finally:
            self._means.pool.trim(min(self._budget.window, len(self.partition.buckets)))
            self._bytes_held.end_step()

    def _begin_update(self, learning_rate: float) -> OwnedUpdate:
        """Count the step and return the update of values: from here on there is no way back."""
        self.step_count += 1
        self._means.commit_feedback()
        return OwnedUpdate(
            self._means,
            window=self._budget.window,
            step=self.step_count,
            learning_rate=learning_rate,
            factor=self.factor,
        )

    # -- failure -----------------------------------------------------------------------------------------------------

    async def abandon(self, why: str = "it was abandoned") -> None:
        """Abort the step on all replicas, with the reason ``why``.  Does not wait.

        For failures outside the engine, such as in a backward pass; failures inside it notify the others themselves.
        """
        self._state.check_prepared("abandon")
        await self._recovery.break_off(why)

    async def leave(self, why: str) -> None:
        """Abort the step on all replicas, and the next ``resume``, in which this one takes no part.  Does not wait."""
        self._state.check_prepared("leave")
        await self._recovery.break_off(why)
        self._recovery.abort_meeting(0)

    async def catch_up(self, learning_rate: float) -> None:
        """Take, on this rank alone, the step that the other replicas have taken with these gradients.

        For a rank that failed where the others did not: all of them must ``resume`` after it.
        """
        self._state.check_prepared("catch_up")
        await self._recovery.break_off("catch_up() was called")
        await self._begin_update(learning_rate).run_alone()

    async def resume(self, attempt: int = 0) -> None:
        """Bring replicas together after a failure: all of them call it.  Gradients are dropped.

        A torn step is completed.  Raises ``StepTorn`` on all ranks if some took the step and others did not; then they
        must ``restore`` a checkpoint.  If a replica may fail before it reaches ``resume``, all pass the same new number
        as ``attempt`` each time.
        """
        self._state.check_prepared("resume")
        await self._recovery.break_off("resume() was called")
        await self._recovery.meet(self.step_count, attempt)
        await gather_values(self._means)
        self._reducer.start_over()
        self._forget_gradients()

    def _forget_gradients(self) -> None:
        self.factor = 1.0
        self._means.forget_gradients()
        self._state.phase = EnginePhase.OPEN

    # -- parameters, states, memory ----------------------------------------------------------------------------------

    async def gather(self, names: Iterable[str] | None = None) -> None:
        """Stage 3: give the parameters ``names`` (None: all) their whole values until ``release``.

        All ranks pass the same names.
        """
        gatherer = self._check_sharded("gather")
        chosen = self._means.places_of(names)
        async with self._recovery.all_or_none("gather"):
            await compare(self.communicator, [str(chosen)], key=f"{self._means.key()}/gather")
        unit = ParameterUnit("named", chosen, self._means)
        gatherer.check_room(unit)
        async with self._recovery.all_or_none("gather"):
            await gatherer.gather(unit)
        self._gathered.append(unit)

    def release(self) -> None:
        """Stage 3: undo all ``gather``."""
        gatherer = self._check_sharded("release")
        while self._gathered:
            gatherer.release(self._gathered.pop())

    def memory_stats(self) -> ZeROMemoryStats:
        """Return the bytes that this rank currently holds."""
        feedback = self._means.feedback
        return held_now(self._means.shares, self._bytes_held, residuals=0 if feedback is None else feedback.nbytes)

    def memory_needed(self) -> int:
        """Return the most bytes that this rank holds in a step; not all are allocated before the first one.

        Counts whole gradients, which exist until they are reduced, as many buckets as may be in progress, and in stage
        3 the parameters that may be gathered.
        """
        feedback, gatherer = self._means.feedback, self._recovery.gatherer
        residuals = 0 if feedback is None else feedback.nbytes_needed
        gathered = 0 if gatherer is None else gatherer.nbytes_needed
        return kept_in_a_step(self._means.shares, self.config.stage) + self._budget.buffers + residuals + gathered

    def state_pieces(self) -> list[StatePiece]:
        """Return this rank's state for checkpoints, besides ``step_count`` and ``skipped``."""
        self._state.check_sound("state_pieces")
        return pieces_of(share.held for share in self._means.shares)

    def residuals(self) -> dict[str, Values]:
        """Return a copy of this rank's compression residuals, flat, by parameter; for checkpoints.

        Empty without ``gradient_compression`` and ``error_feedback``, and on ranks that have compressed nothing.
        """
        feedback = self._means.feedback
        return {} if feedback is None else feedback.by_name()

    def weights(self) -> dict[str, float]:
        """Return, for each parameter, the weight of a residual in a reduced gradient, all ranks' parts together."""
        op, sums, size = self._means.op, self._means.row_sums, self.partition.size
        return {spec.name: 1.0 / sums.divisor(size, spec.dtype, op) for spec in self.partition.specs}

    def owe(self, lacking: Mapping[str, NDArray[Any]]) -> list[str]:
        """Compensate for ``lacking`` in the next steps, replacing current residuals; all ranks call it, between steps.

        ``lacking`` is the amount by which reduced gradients were too small: flat and whole, by parameter, equal on all
        replicas.  Returns the parameters that cannot be compensated because nothing is compressed with error feedback
        here.
        """
        self._state.check_prepared("owe")
        means, size = self._means, self.partition.size
        if means.feedback is None:
            return [name for name, values in lacking.items() if np.any(values)]
        means.feedback.owe(lacking, lambda dtype: means.row_sums.corrections(size, dtype, means.op))
        return []

    def restore_residuals(self, residuals: Mapping[str, NDArray[Any]]) -> None:
        """Continue with the ``residuals`` of an earlier run of this rank, between steps."""
        self._state.check_prepared("restore_residuals")
        if self._means.feedback is not None:
            self._means.feedback.restore(residuals)

    @property
    def skipped(self) -> dict[str, int]:
        """By parameter, the number of steps in which it was frozen, if any: part of ``step_count``."""
        return skipped_steps(share.range for share in self._means.shares)

    async def restore(
        self,
        arrays: Mapping[tuple[str, str], Array],
        *,
        step_count: int,
        skipped: Mapping[str, int] | None = None,
        attempt: int = 0,
    ) -> None:
        """Continue from ``state_pieces`` of a checkpoint, by (parameter, kind), and ``skipped`` steps; all ranks call
        it.

        Raises ``UsageError``, with nothing written here, unless ``arrays`` are the pieces of this rank.  ``attempt`` is
        the number of the attempt, equal on all ranks, if a restore is retried.
        """
        self._state.check_prepared("restore")
        try:
            if step_count < 0:
                raise UsageError(f"step_count: expected 0 or more, got {step_count}")
            restore_pieces((share.held for share in self._means.shares), arrays)
        except UsageError:
            await self._recovery.break_off("restore")
            self._recovery.abort_meeting(attempt)
            raise
        self.step_count = step_count
        restore_skipped((share.range for share in self._means.shares), skipped or {})
        await self.resume(attempt)

    def _check_sharded(self, what: str) -> ParameterGatherer:
        if not self.config.stage.shards_parameters:
            raise UsageError(f"{what}: expected stage 3, which shards parameters, got {self.config.stage}")
        self._state.check_sound(what)
        assert self._recovery.gatherer is not None, "it is prepared"
        return self._recovery.gatherer
