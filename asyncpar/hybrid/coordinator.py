"""Training in three dimensions: data, tensor and pipeline parallelism, with ZeRO and mixed precision."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from asyncpar.checkpoint import Wanted
from asyncpar.collectives.communicator import Communicator, step_meter
from asyncpar.core.config.parallel import ThreeDParallelismConfig
from asyncpar.core.config.placement import is_frozen
from asyncpar.core.observe.records import EventState
from asyncpar.core.observe.steps import StepMeter
from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.hybrid.analysis import PerformanceAnalysis
from asyncpar.hybrid.assembly import Assembly, GradientScale, agree_on_groups, assemble
from asyncpar.hybrid.config import HybridConfig
from asyncpar.hybrid.loss_scaling import LossScaler
from asyncpar.hybrid.model import ParallelModel
from asyncpar.hybrid.monitor import Performance3DMonitor
from asyncpar.hybrid.recovery import Intent, RankStatus, RecoveryPlan, plan_recovery
from asyncpar.hybrid.step import StepRandomness, StepResult, StepRunner, StepVerdict
from asyncpar.nn.parameter import Array, Parameter
from asyncpar.tensors.process_groups import ProcessGroups
from asyncpar.zero.checkpointing import carry_over, load_flow, save_flow, wanted_by
from asyncpar.zero.errors import StepTorn
from asyncpar.zero.lacking import gather_lacking, take_over
from asyncpar.zero.share import StatePiece

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Session:
    """The parts that train by one configuration."""

    config: HybridConfig
    assembly: Assembly
    scaler: LossScaler
    runner: StepRunner
    randomness: StepRandomness
    meeting: Communicator
    meter: StepMeter
    wanted: list[Wanted]
    release: Callable[[], None]

    @classmethod
    async def open(
        cls, config: HybridConfig, model: ParallelModel, world: Communicator, *, name: str = "hybrid"
    ) -> _Session:
        """Build this rank's parts.  All ranks of ``world`` call it; see ``ThreeDParallelismCoordinator.create``."""
        scale = GradientScale()  # lives as long as the session
        world.claim(name, scale, kind=ThreeDParallelismCoordinator.__name__)
        release = partial(world.release, name, scale)
        try:
            groups = await agree_on_groups(config, model, world, name=name)
            assembly = await assemble(config, model, groups, scale)
        except BaseException:
            release()
            raise
        meeting = groups.world.subgroup(range(groups.world.size), name="meeting of coordinators")
        assert meeting is not None, "this rank is in its own group"
        scaler = LossScaler(config.scaling)
        return cls(
            config=config,
            assembly=assembly,
            scaler=scaler,
            runner=StepRunner(config, model, assembly, scale, scaler),
            randomness=StepRandomness(assembly.stages),
            meeting=meeting,
            meter=step_meter(groups.world, "training"),
            wanted=wanted_by(assembly.flow),
            release=release,
        )

    async def close(self) -> None:
        """Free everything.  Idempotent."""
        await self.assembly.alarm.close()
        await self.assembly.close()
        self.release()


class ThreeDParallelismCoordinator:
    """This rank's part in training ``model``; all ranks create one with equal arguments, and call it in the same order.

    ``train_step`` is a whole step; ``backward_pass`` and ``optimizer_step`` are its halves.  Each ends on all ranks
    together: a failure on one raises its error there, and ``StepFailed`` or ``PeerLost`` with its name on the others.
    The next call works, on unchanged parameters, unless it raises ``StepTaken`` on all ranks: then the step was taken,
    and the call after that works.  After ``StepTorn`` a checkpoint must be loaded.
    """

    def __init__(self, model: ParallelModel, session: _Session) -> None:
        self.model = model
        self.monitor = Performance3DMonitor(session.assembly.groups.mapping.global_rank)
        self._begin(session)
        self.steps = 0
        """Number of steps so far, including skipped ones."""

    def _begin(self, session: _Session) -> None:
        """Train with ``session`` from the next step on."""
        self._session = session
        self._verdict: StepVerdict | None = None
        self._seconds_before = 0.0
        self._last_norm = self._last_rate = 0.0
        self._has_failed = self._was_taken = self._is_torn = False

    @classmethod
    async def create(
        cls, config: HybridConfig, model: ParallelModel, world: Communicator, *, name: str = "hybrid"
    ) -> Self:
        """Build this rank's part.  All ranks of ``world`` call it.

        ``name`` distinguishes coordinators in one world, and belongs to one until it is closed.  Raises ``UsageError``
        for a model that cannot be distributed like that, and, on every rank, if ranks differ in configuration or model.
        """
        return cls(model, await _Session.open(config, model, world, name=name))

    @property
    def config(self) -> HybridConfig:
        """The configuration of the next step."""
        return self._session.config

    @property
    def groups(self) -> ProcessGroups:
        """This rank's place, and the groups that it is in."""
        return self._session.assembly.groups

    @property
    def takes_inputs(self) -> bool:
        """Whether this rank holds the first stage.  Other ranks ignore their inputs."""
        return self._session.assembly.executor.has_first_stage

    @property
    def takes_targets(self) -> bool:
        """Whether this rank holds the last stage.  Other ranks ignore their targets."""
        return self._session.assembly.executor.has_last_stage

    @property
    def loss_scale(self) -> float:
        """The factor of losses in the next step."""
        return self._session.scaler.scale

    def parameters(self) -> tuple[Parameter, ...]:
        """Return this rank's parameters, in registration order."""
        return self._session.assembly.parameters

    def pieces(self) -> Sequence[StatePiece]:
        """Return this rank's values and optimizer states, as in a checkpoint."""
        return self._session.assembly.flow.pieces()

    # -- training ----------------------------------------------------------------------------------------------------

    async def train_step(
        self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None, *, learning_rate: float
    ) -> StepResult:
        """Train on one batch: the micro-batches of this rank's replica.

        Gradients are averaged over all tokens that count, of all micro-batches and replicas.  If gradients are not
        finite, raises ``NonFiniteValue`` on all ranks, with parameters unchanged, naming the ranks where that began; in
        mixed precision the step is skipped instead and the loss scale lowered.
        """
        with self._metered():
            async with self._together(Intent.TRAIN_STEP, learning_rate):
                began = asyncio.get_running_loop().time()
                verdict = await self._session.runner.backward(inputs, targets)
                await self._take(verdict, learning_rate)
        return self._conclude(verdict, began)

    async def backward_pass(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None) -> float:
        """Run all forward and backward passes of one batch, interleaved by the schedule, and reduce the gradients.

        Returns the mean loss, on all ranks.
        """
        with self._metered():
            async with self._together(Intent.BACKWARD_PASS):
                self._verdict = None
                began = asyncio.get_running_loop().time()
                verdict = await self._session.runner.backward(inputs, targets)
                self._verdict = verdict
        self._seconds_before = asyncio.get_running_loop().time() - began
        return verdict.loss

    async def optimizer_step(self, learning_rate: float) -> StepResult:
        """Update the parameters with the gradients of the last ``backward_pass``; see ``train_step``."""
        async with self._together(Intent.OPTIMIZER_STEP, learning_rate):
            began = asyncio.get_running_loop().time() - self._seconds_before  # a step is both halves
            verdict, self._verdict = self._verdict, None
            if verdict is None:
                raise UsageError("optimizer_step: expected a backward_pass that succeeded before it, got none")
            await self._take(verdict, learning_rate)
        return self._conclude(verdict, began)

    async def forward_pass(self, inputs: Sequence[Any] | None) -> tuple[Array, ...]:
        """Run micro-batches through the pipeline; return the outputs on ranks with the last stage, () on others.

        Of a transformer they are this rank's part of the logits.
        """
        async with self._together(Intent.FORWARD_PASS):
            return await self._session.assembly.executor.run_forward(inputs)

    async def evaluate(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None) -> float:
        """Return the mean loss of one batch, of all replicas' micro-batches together; on all ranks."""
        async with self._together(Intent.EVALUATE):
            return await self._session.runner.evaluate(inputs, targets)

    # -- figures -----------------------------------------------------------------------------------------------------

    async def get_performance_stats(self) -> PerformanceAnalysis:
        """Return the times of the last steps over all ranks, and their bottlenecks.  All ranks call it."""
        return await self.monitor.analyze_all(self.groups.world)

    # -- settings ----------------------------------------------------------------------------------------------------

    async def update_config(self, config: HybridConfig | ThreeDParallelismConfig) -> None:
        """Train with ``config`` from the next step on, with the current parameters, states and steps.

        Call it between steps, on all ranks.  With a ``ThreeDParallelismConfig`` the other settings stay.  Everything
        may change except the placement of parameters and states: sizes and order of the axes, layers of stages, the
        stage of ZeRO, states that the rule has not had.  Such a change, settings that do not fit model or world, and
        differences between ranks raise ``UsageError`` on every rank, with nothing changed.  Memory temporarily holds
        both.  Gradients that no ``optimizer_step`` has used are dropped.  Compression residuals are summed up and
        redistributed if gradients are reduced in another way than before; those that cannot be are named in a logged
        warning.
        """
        if isinstance(config, ThreeDParallelismConfig):
            config = replace(self.config, parallelism=config)
        await self._settle(Intent.SAVE)
        world = self.groups.world
        apart = world.subgroup(range(world.size), name="update of the configuration", has_own_timeout=True)
        assert apart is not None, "this rank is one of its ranks"
        before, session = self._session, await _Session.open(config, self.model, apart)
        frozen = {parameter.name for parameter in self.parameters() if is_frozen(parameter)}
        for parameter in session.assembly.parameters:
            parameter.requires_grad = parameter.name not in frozen
        try:
            mine, flow = before.assembly.flow, session.assembly.flow
            arrays = await carry_over(mine.pieces(), flow.pieces(), apart)
            await flow.restore(arrays, mine.step_count, mine.skipped, session.runner.attempt)
            state = mine.reduction_state()
            if before.assembly.layout == session.assembly.layout:
                flow.restore_reduction(state)
            else:
                take_over(flow, await gather_lacking(state, mine.parameters, session.assembly.groups), lost=state.lost)
        except BaseException:
            await session.close()
            raise
        if config.scaling == before.config.scaling:
            session.scaler.restore(before.scaler.state())
        await before.close()
        self._begin(session)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def save(self, folder: Path, *, extra: Mapping[str, Any] | None = None, keep: int | None = None) -> Path:
        """Save a checkpoint that coordinators of any other layout can load, and return its folder.

        Compression residuals and the order of buckets are part of it: in the same layout training continues with the
        same bits.  In another one residuals are summed up and redistributed; those that cannot be are named in a logged
        warning.  ``extra`` is saved with it (JSON values, the same on all ranks), and only the ``keep`` latest
        checkpoints are kept.
        """
        await self._settle(Intent.SAVE)
        flow = self._session.assembly.flow
        return await save_flow(
            folder,
            flow,
            step=self.steps,
            run={"steps": self.steps, "updates": flow.step_count, "scaler": self._session.scaler.state()},
            layout=self._session.assembly.layout,
            model=self.model.identity,
            communicator=self.groups.world,
            extra=extra,
            keep=keep,
        )

    async def load(self, folder: Path) -> dict[str, Any]:
        """Continue from the latest checkpoint in ``folder`` (or from the checkpoint ``folder`` itself); return its
        ``extra``.

        Raises ``CheckpointError`` or ``UsageError`` on all ranks, with nothing changed, if that is impossible.
        """
        await self._settle(Intent.LOAD)
        self._has_failed = True
        assembly, identity = self._session.assembly, self.model.identity
        loaded = await load_flow(
            folder,
            self._session.wanted,
            assembly.flow.parameters,
            layout=assembly.layout,
            model=identity,
            communicator=self.groups.world,
        )
        self._is_torn = True
        await assembly.flow.restore(loaded.arrays, loaded.run["updates"], loaded.skipped, self._session.runner.attempt)
        loaded.restore_reduction(assembly.flow)
        self.steps = loaded.run["steps"]
        self._session.scaler.restore(loaded.run["scaler"])
        self._verdict, self._was_taken = None, False
        self._session.runner.is_ready = False
        self._has_failed = self._is_torn = False
        self.monitor.clear()
        return loaded.extra

    async def close(self) -> None:
        """Free everything.  Idempotent."""
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _metered(self) -> Iterator[None]:
        """Record a step: the rank's own time in it is its compute time."""
        self._session.meter.begin(self.steps + 1)
        try:
            yield
            self._session.meter.add(self._session.runner.seconds_computing)
        except BaseException:
            self._session.meter.end(EventState.FAILED)
            raise
        self._session.meter.end()

    @asynccontextmanager
    async def _together(self, intent: Intent, rate: float = 0.0) -> AsyncIterator[None]:
        """Run a block on all ranks, or end it on all of them."""
        status, steps, self._has_failed = self._status(intent, rate), self.steps, True
        meeting = self._session.meeting.all_gather(status.row())
        try:
            async with self._session.assembly.alarm.watch():
                self._session.assembly.bridge.resume()
                plan = plan_recovery([RankStatus.of_row(row) for row in await meeting])
                await self._carry_out(plan, intent)
                if plan.error is None:
                    self._session.assembly.set_training(intent.trains)
                    self._session.randomness.begin(self.steps)
                    yield
        except BaseException:
            self._was_taken |= self.steps > steps
            raise
        finally:
            meeting.close()  # others are notified if it was not awaited
        self._has_failed = False
        if plan.error is not None:
            raise plan.error

    async def _settle(self, intent: Intent) -> None:
        """Recover on all ranks from an earlier failure."""
        async with self._together(intent):
            pass

    def _status(self, intent: Intent, rate: float) -> RankStatus:
        return RankStatus(
            intent=intent,
            rate=rate,
            attempt=self._session.runner.attempt,
            steps=self.steps,
            last_norm=self._last_norm,
            last_rate=self._last_rate,
            has_failed=self._has_failed,
            was_taken=self._was_taken,
            is_ready=self._session.runner.is_ready,
            is_torn=self._is_torn,
        )

    async def _carry_out(self, plan: RecoveryPlan, intent: Intent) -> None:
        """Carry out ``plan`` on this rank."""
        self._session.runner.attempt = plan.attempt
        if plan.must_resume:
            self._verdict = None
            self._session.assembly.slices.renew(plan.attempt)
        if plan.must_resume and intent is not Intent.LOAD and not isinstance(plan.error, StepTorn):
            ahead = plan.ahead
            if self.steps < ahead.steps:
                await self._take_late(ahead)
            await self._session.assembly.flow.resume(plan.attempt)
        self._was_taken = plan.was_taken

    async def _take(self, verdict: StepVerdict, rate: float) -> None:
        """Take the step, or skip it; even after a failure, ``steps`` shows whether it was taken."""
        if verdict.is_finite:
            updates = self._session.assembly.flow.step_count
            try:
                await self._session.runner.update(verdict.gradient_norm, rate)
            finally:
                if self._session.assembly.flow.step_count > updates:
                    self._note(verdict.gradient_norm, rate)
        elif self._session.runner.skips:
            self._note(verdict.gradient_norm, rate)

    async def _take_late(self, ahead: RankStatus) -> None:
        """Take the step that other ranks have taken."""
        try:
            if math.isfinite(ahead.last_norm):
                await self._session.runner.catch_up(ahead.last_norm, ahead.last_rate)
        finally:
            self._note(ahead.last_norm, ahead.last_rate)

    def _note(self, norm: float, rate: float) -> None:
        """Count a step that was taken, or skipped because it was not finite."""
        self._session.scaler.update(has_overflowed=not math.isfinite(norm))
        self._last_norm, self._last_rate = norm, rate
        self._session.runner.is_ready = False
        self.steps += 1

    def _conclude(self, verdict: StepVerdict, began: float) -> StepResult:
        if not verdict.is_finite and not self._session.runner.skips:
            raise NonFiniteValue(
                f"gradients: expected a finite global norm at step {self.steps}, got another; parameters are "
                f"unchanged; {verdict.why}"
            )
        if not verdict.is_finite:
            _log.info("step %d is skipped: %s", self.steps - 1, verdict.why)
        seconds = asyncio.get_running_loop().time() - began
        self.monitor.record(self._session.runner.measure(self.steps - 1, seconds, verdict.tokens))
        return self._session.runner.result(verdict, seconds)
