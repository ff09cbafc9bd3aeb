"""Training in three dimensions: data, tensor and pipeline parallelism, with ZeRO and mixed precision."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import NonFiniteValue, UsageError
from asyncpar.hybrid import checkpointing
from asyncpar.hybrid.analysis import PerformanceAnalysis
from asyncpar.hybrid.assembly import Assembly, GradientScale, assemble
from asyncpar.hybrid.config import HybridConfig
from asyncpar.hybrid.loss_scaling import LossScaler
from asyncpar.hybrid.model import ParallelModel
from asyncpar.hybrid.monitor import Performance3DMonitor
from asyncpar.hybrid.randomness import StepRandomness
from asyncpar.hybrid.step import StepResult, StepRunner, Verdict
from asyncpar.nn.parameter import Array, Parameter
from asyncpar.tensors.process_groups import ProcessGroups
from asyncpar.zero.pieces import StatePiece


class ThreeDParallelismCoordinator:
    """This rank's part in training ``model``; all ranks make one with equal arguments, and call it in the same order.

    ``train_step`` is a whole step; ``backward_pass`` and ``optimizer_step`` are its halves.  Each ends on all ranks
    together: a failure on one raises there what went wrong, and ``StepFailed`` or ``PeerLost`` with its name on the
    others.  The parameters are then as before the step (``StepTorn`` says where they are not), and the next step works.
    """

    def __init__(self, config: HybridConfig, model: ParallelModel, assembly: Assembly, scale: GradientScale) -> None:
        self.config = config
        self.model = model
        self.monitor = Performance3DMonitor(assembly.groups.mapping.global_rank)
        self._assembly = assembly
        self._scaler = LossScaler(config.scaling)
        self._runner = StepRunner(config, model, assembly, scale, self._scaler)
        self._randomness = StepRandomness(assembly.stages)
        self._alarm = assembly.alarm
        self._verdict: Verdict | None = None
        self._has_failed = False
        self.steps = 0
        """Number of steps so far, skipped ones included."""

    @classmethod
    async def create(cls, config: HybridConfig, model: ParallelModel, world: Communicator) -> Self:
        """Build this rank's part.  All ranks of ``world`` call it.

        Raises ``UsageError`` for a model that cannot be spread like that, and, on every rank, where ranks differ in
        configuration or model.
        """
        settings = {**config.settings(), "model": dict(model.identity)}
        groups = await ProcessGroups.create(config.parallelism, world, settings=settings, purpose="hybrid")
        model.check(config.parallelism)
        for group in (groups.world, *groups.names.values()):
            group.timeout = config.parallelism.communication_timeout_ms / 1000
        scale = GradientScale()
        return cls(config, model, await assemble(config, model, groups, scale), scale)

    @property
    def groups(self) -> ProcessGroups:
        """This rank's place, and the groups that it is in."""
        return self._assembly.groups

    @property
    def takes_inputs(self) -> bool:
        """Does this rank hold the first stage?  What others pass as inputs is not looked at."""
        return self._assembly.executor.has_first_stage

    @property
    def takes_targets(self) -> bool:
        """Does this rank hold the last stage?  What others pass as targets is not looked at."""
        return self._assembly.executor.has_last_stage

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with in the next step."""
        return self._scaler.scale

    def parameters(self) -> tuple[Parameter, ...]:
        """Return what this rank holds of the model, in registration order."""
        return self._assembly.parameters

    def pieces(self) -> Sequence[StatePiece]:
        """Return what this rank holds of values and optimizer states, as a checkpoint does."""
        return self._assembly.flow.pieces()

    # -- training ----------------------------------------------------------------------------------------------------

    async def train_step(
        self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None, *, learning_rate: float
    ) -> StepResult:
        """Train on one batch: the micro-batches of this rank's replica.

        Gradients are averaged over all tokens that count, of all micro-batches and replicas.  Raises ``NonFiniteValue``
        on all ranks, with parameters unchanged, where gradients are not finite; in mixed precision the step is skipped
        instead and the loss scale lowered.
        """
        _check_rate(learning_rate)
        began = asyncio.get_running_loop().time()
        async with self._together():
            verdict = await self._runner.backward(inputs, targets)
            if verdict.is_finite:
                await self._runner.update(verdict, learning_rate)
        return self._conclude(verdict, began)

    async def backward_pass(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None) -> float:
        """Do all forward and backward passes of one batch, as the schedule interleaves them, and reduce the gradients.

        Returns the mean loss, on all ranks.
        """
        async with self._together():
            self._verdict = await self._runner.backward(inputs, targets)
        return self._verdict.loss

    async def optimizer_step(self, learning_rate: float) -> StepResult:
        """Move the parameters by the gradients of the last ``backward_pass``; see ``train_step``."""
        _check_rate(learning_rate)
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            raise UsageError("optimizer_step: expected a backward_pass before it, got none since the last step")
        began = asyncio.get_running_loop().time()
        async with self._together():
            if verdict.is_finite:
                await self._runner.update(verdict, learning_rate)
        return self._conclude(verdict, began)

    async def forward_pass(self, inputs: Sequence[Any] | None) -> tuple[Array, ...]:
        """Run micro-batches through the pipeline; return the outputs on ranks with the last stage, () on others.

        Of a transformer they are this rank's part of the logits.
        """
        async with self._together(is_training=False):
            return await self._assembly.executor.run_forward(inputs)

    async def evaluate(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None) -> float:
        """Return the mean loss of one batch, of all replicas' micro-batches together; on all ranks."""
        async with self._together(is_training=False):
            return await self._runner.evaluate(inputs, targets)

    # -- figures -----------------------------------------------------------------------------------------------------

    async def get_performance_stats(self) -> PerformanceAnalysis:
        """Return what the last steps took, over all ranks, and where their bottlenecks are.  All ranks call it."""
        return await self.monitor.analyze_all(self.groups.world)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    async def save(self, folder: Path, *, extra: Mapping[str, Any] | None = None, keep: int | None = None) -> Path:
        """Save a checkpoint that coordinators of any other layout can load, and return its folder.

        ``extra`` is saved with it (JSON values, the same on all ranks), and only the ``keep`` latest are left.
        """
        return await checkpointing.save(
            folder, self._assembly, self.model, self._state(), communicator=self.groups.world, extra=extra, keep=keep
        )

    async def load(self, folder: Path) -> dict[str, Any]:
        """Go on from the latest checkpoint in ``folder`` (or from the one that it is); return its ``extra``.

        Raises ``CheckpointError`` or ``UsageError`` on all ranks, with nothing changed, where that cannot be.
        """
        state, extra = await checkpointing.load(folder, self._assembly, self.model, communicator=self.groups.world)
        self.steps = state.steps
        self._scaler.restore(state.scaler)
        self.monitor.clear()
        return extra

    async def close(self) -> None:
        """Free everything.  Idempotent."""
        await self._alarm.close()
        await self._assembly.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _together(self, *, is_training: bool = True) -> AsyncIterator[None]:
        """Run a block on all ranks, or end it on all of them."""
        has_failed, self._has_failed = self._has_failed, True
        async with self._alarm.watch():
            self._assembly.bridge.resume()
            if has_failed:
                self._verdict = None
                await self._assembly.flow.resume()
            self._assembly.set_training(is_training)
            self._randomness.begin(self.steps)
            yield
        self._has_failed = False

    def _conclude(self, verdict: Verdict, began: float) -> StepResult:
        if not verdict.is_finite and not self._runner.skips:
            raise NonFiniteValue(
                f"gradients: expected a finite global norm at step {self.steps}, got another; parameters are unchanged"
            )
        self._scaler.update(has_overflowed=not verdict.is_finite)
        seconds = asyncio.get_running_loop().time() - began
        self.monitor.record(self._runner.measure(self.steps, seconds, verdict.tokens))
        self.steps += 1
        pipeline = self._runner.pipeline
        assert pipeline is not None, "a backward pass was done"
        return StepResult(
            loss=verdict.loss,
            tokens=verdict.tokens,
            gradient_norm=verdict.gradient_norm,
            is_skipped=not verdict.is_finite,
            seconds=seconds,
            pipeline=pipeline,
        )

    def _state(self) -> checkpointing.RunState:
        return checkpointing.RunState(
            steps=self.steps, updates=self._assembly.flow.step_count, scaler=self._scaler.state()
        )


def _check_rate(learning_rate: float) -> None:
    if not (learning_rate >= 0.0 and np.isfinite(learning_rate)):
        raise UsageError(f"learning_rate: expected a finite number of 0 or more, got {learning_rate}")
