"""One step of 3D-parallel training, and random numbers that depend on its number only."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Collection, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.config.placement import is_frozen
from asyncpar.core.tables import bytes_text, html_table, seconds_text, text_table
from asyncpar.errors import UsageError
from asyncpar.hybrid.analysis import StepMeasure
from asyncpar.hybrid.assembly import Assembly, GradientScale
from asyncpar.hybrid.config import HybridConfig, Precision
from asyncpar.hybrid.loss_scaling import LossScaler
from asyncpar.hybrid.model import ParallelModel
from asyncpar.hybrid.watch import FiniteReport, find_origins
from asyncpar.nn.optimizers import clip_factor, combined
from asyncpar.nn.parameter import Parameter
from asyncpar.nn.stage import Stage
from asyncpar.pipeline.result import PipelineResult

_DRAWS_PER_STEP = 1 << 64


class StepRandomness:
    """Sets the generators of ``stages`` to a separate position at the beginning of each step.

    So a run that continues from a checkpoint draws the same random numbers, without any state in it.
    """

    def __init__(self, stages: Sequence[Stage[Any]]) -> None:
        self._generators = [generator for stage in stages for generator in stage.generators()]
        for generator in self._generators:
            if not isinstance(generator.bit_generator, np.random.PCG64):
                raise UsageError(
                    f"generators: expected PCG64, as of numpy.random.default_rng, got {generator.bit_generator}"
                )
        self._initial: list[Any] = [generator.bit_generator.state for generator in self._generators]

    def begin(self, step: int) -> None:
        """Begin ``step``, counted from 0."""
        for generator, initial in zip(self._generators, self._initial, strict=True):
            source = generator.bit_generator
            assert isinstance(source, np.random.PCG64), "looked at in the beginning"
            source.state = initial
            source.advance(step * _DRAWS_PER_STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a step; the same on all ranks but for ``pipeline`` and ``seconds``.

    ``loss`` is the mean over the ``tokens`` that count, of all replicas; ``gradient_norm`` the global norm before
    clipping, not finite in a step that ``is_skipped``; then ``why`` names the ranks and arrays in which that began.
    """

    loss: float
    tokens: int
    gradient_norm: float
    is_skipped: bool
    seconds: float
    pipeline: PipelineResult
    why: str = ""

    def __str__(self) -> str:
        """Return a table of the figures, with units, rounded."""
        return text_table(self._rows(), left=1)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Return the same table for notebooks."""
        return html_table(self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        return [
            ("step", "skipped" if self.is_skipped else "taken"),
            *([("why", self.why)] if self.why else []),
            ("loss", f"{self.loss:.4g}"),
            ("tokens", f"{self.tokens:,}"),
            ("gradient norm", f"{self.gradient_norm:.3g}"),
            ("time", seconds_text(self.seconds)),
            ("this rank computed", seconds_text(self.pipeline.seconds_busy)),
            ("this rank waited for messages", seconds_text(self.pipeline.seconds_waiting)),
            ("this rank sent to other stages", bytes_text(self.pipeline.bytes_sent)),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """The loss and the norm of gradients of a step over all ranks."""

    loss: float
    tokens: int
    gradient_norm: float
    why: str = ""
    """The origin of NaN or infinity; empty if all is finite."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.gradient_norm)


class StepRunner:
    """Runs the halves of a step on this rank; the alarm of the coordinator ends them together on all ranks."""

    def __init__(
        self, config: HybridConfig, model: ParallelModel, assembly: Assembly, scale: GradientScale, scaler: LossScaler
    ) -> None:
        self._config = config
        self._model = model
        self._assembly = assembly
        self._scale = scale
        self._scaler = scaler
        self._not_counted = _counted_elsewhere(assembly)
        self.pipeline: PipelineResult | None = None
        self.attempt = 0
        """Part of all names by which collectives meet; see ``recovery``."""
        self.is_ready = False
        """Whether the gradients of a step that is not taken yet are reduced."""
        self._is_clipped = False
        self._held = 0
        """Bytes of the flow after the passes."""
        self._clock = asyncio.get_running_loop().time
        self._communicating = 0.0
        self._sliced = 0.0

    async def backward(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None) -> StepVerdict:
        """Compute gradients and reduce them; return the common verdict of all ranks."""
        assembly, flow = self._assembly, self._assembly.flow
        if assembly.executor.has_first_stage:
            _check_rows("inputs", inputs, self._config.parallelism.micro_batch_size)
        if assembly.executor.has_last_stage:
            _check_rows("targets", targets, self._config.parallelism.micro_batch_size)
        self._sliced = assembly.slices.seconds_waiting
        assembly.watch.begin()
        self._communicating = 0.0
        self.is_ready = self._is_clipped = False
        flow.zero_grad()
        tokens = await self._count_tokens(targets)
        self._scale.value = assembly.groups.dp.size * self._scaler.scale / tokens
        began = self._clock()
        async with flow.reducing() as on_gradient:
            assembly.memory.limit = max(1, assembly.memory_limit - flow.nbytes_needed)
            self.pipeline = await assembly.executor.run(inputs, targets, on_gradient=on_gradient)
            self._held = flow.nbytes
            ended = self._clock()
            self._communicating += ended - began - self.pipeline.seconds
        self._communicating += self._clock() - ended
        flow.scale(1.0 / self._scaler.scale)
        self.is_ready = True
        return await self._judge(tokens, self.pipeline)

    async def update(self, norm: float, learning_rate: float) -> None:
        """Clip gradients, and update the parameters."""
        self._clip(norm)
        await self._assembly.flow.step(learning_rate)

    async def catch_up(self, norm: float, learning_rate: float) -> None:
        """Do the work of ``update`` if others have done so and this rank could not."""
        self._clip(norm)
        await self._assembly.flow.catch_up(learning_rate)

    async def evaluate(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None) -> float:
        """Return the mean loss of one batch, without gradients."""
        assembly = self._assembly
        outputs = await assembly.executor.run_forward(inputs)
        own = np.zeros(2)
        for output, target in zip(outputs, targets or (), strict=bool(outputs)):
            loss, _ = await assembly.worker.run(assembly.loss, output, target)
            own += (loss, self._model.count(target)) if self._reports else 0.0
        rows = await assembly.groups.world.all_gather(own, key=self._name("evaluation"))
        return math.fsum(rows[:, 0]) / max(1.0, math.fsum(rows[:, 1]))

    def _clip(self, norm: float) -> None:
        clip = self._config.clip_norm
        if clip is not None and not self._is_clipped:
            self._assembly.flow.scale(clip_factor(norm, clip))
            self._is_clipped = True

    def measure(self, step: int, seconds: float, tokens: int) -> StepMeasure:
        """Return the figures of the step just done."""
        assembly, pipeline = self._assembly, self.pipeline
        assert pipeline is not None, "a step was done"
        return StepMeasure(
            step=step,
            seconds=seconds,
            compute_seconds=self.seconds_computing,
            communication_seconds=max(0.0, self._communicating),
            pipeline_wait_seconds=pipeline.seconds_waiting,
            tensor_parallel_seconds=assembly.slices.seconds_waiting - self._sliced,
            memory_used=max(self._held, assembly.flow.nbytes) + pipeline.peak_bytes,
            memory_limit=assembly.memory_limit,
            tokens=tokens,
        )

    def result(self, verdict: StepVerdict, seconds: float) -> StepResult:
        """Return the result of the step just done."""
        assert self.pipeline is not None, "a step was done"
        return StepResult(
            loss=verdict.loss,
            tokens=verdict.tokens,
            gradient_norm=verdict.gradient_norm,
            is_skipped=not verdict.is_finite,
            seconds=seconds,
            pipeline=self.pipeline,
            why=verdict.why,
        )

    @property
    def seconds_computing(self) -> float:
        """Compute time of this rank in the last passes, without waits for others."""
        assert self.pipeline is not None, "passes were done"
        return max(0.0, self.pipeline.seconds_busy - (self._assembly.slices.seconds_waiting - self._sliced))

    async def _count_tokens(self, targets: Sequence[Any] | None) -> int:
        """Return the number of tokens that count in the whole batch.  One rank of each replica reports it."""
        own = np.zeros(1, np.int64)
        if self._reports and targets is not None:
            own[0] = sum(self._model.count(target) for target in targets)
        began = self._clock()
        total = int((await self._assembly.groups.world.all_reduce(own, key=self._name("tokens")))[0])
        self._communicating += self._clock() - began
        if total < 1:
            raise UsageError("targets: expected at least one that counts in the whole batch, got none")
        return total

    async def _judge(self, tokens: int, pipeline: PipelineResult) -> StepVerdict:
        loss = math.fsum(pipeline.losses) if self._reports else 0.0
        squared = await self._assembly.worker.run(self._assembly.flow.squared_norm, self._not_counted)
        frozen = FrozenSet.of(self._assembly.parameters)
        own = np.array([loss, squared, *frozen.checksums])
        began = self._clock()
        rows = await self._assembly.groups.world.all_gather(own, key=self._name("verdict"))
        self._communicating += self._clock() - began
        if not self._is_frozen_alike(rows[:, 2:]):
            await self._refuse_frozen(frozen)
        verdict = StepVerdict(
            loss=math.fsum(rows[:, 0]) / tokens, tokens=tokens, gradient_norm=math.sqrt(self._squared_norm(rows[:, 1]))
        )
        if verdict.is_finite:
            return verdict
        return replace(verdict, why=await self._find_origins())

    def _is_frozen_alike(self, checksums: NDArray[np.float64]) -> bool:
        """Return whether the ranks of a stage have frozen the same parameters, and both ends of the pipeline ties."""
        config = self._config.parallelism
        stages = config.rank_order().blocks(("tp", "dp"))
        order, ends = config.rank_order(), config.end_stages
        tied = [checksums[rank, 1] for rank in range(len(checksums)) if order.coordinates(rank)["pp"] in ends]
        return len(set(tied)) <= 1 and all(len(set(checksums[list(ranks), 0].tolist())) == 1 for ranks in stages)

    async def _refuse_frozen(self, own: FrozenSet) -> None:
        """Raise ``UsageError``, with the same text on all ranks, naming the parameters that are frozen on each."""
        world = self._assembly.groups.world
        gathered = await world.all_gather_object(list(own.names), key=self._name("frozen"), wanted=list[str])
        found = (
            f"rank {rank}: {', '.join(names) or 'none'}" for rank, names in zip(world.ranks, gathered, strict=True)
        )
        raise UsageError(
            "requires_grad: expected the same parameters to be frozen on all ranks of a stage, and tied ones on both "
            f"stages, but frozen are, on {'; on '.join(found)}"
        )

    async def _find_origins(self) -> str:
        """Return where the step ceased to be finite, in a text equal on all ranks."""
        assembly = self._assembly
        world, flow = assembly.groups.world, assembly.flow
        report = FiniteReport(
            rank=world.ranks[world.rank],
            slices=assembly.groups.tp.ranks,
            sighting=assembly.watch.sighting,
            spoiled=list(flow.spoiled),
            overflowed=list(flow.overflowed),
        )
        reports = await world.all_gather_object(report, key=self._name("origins"), wanted=FiniteReport)
        return find_origins(reports)

    def _squared_norm(self, parts: NDArray[np.float64]) -> float:
        """Add up the squares of all slices of all stages, each the sum over its replicas where they hold shards."""
        if not np.isfinite(parts).all():
            return math.inf
        groups = self._config.parallelism.rank_order().groups("dp")
        kept = len(groups[0]) if self._assembly.flow.is_sharded else 1
        return combined(combined(parts[list(ranks[:kept])].tolist()) for ranks in groups)

    def _name(self, what: str) -> str:
        return f"hybrid/{self.attempt}/{what}"

    @property
    def _reports(self) -> bool:
        """Whether this rank has the losses of its replica, and reports for its slices."""
        return self._assembly.executor.has_last_stage and self._assembly.groups.mapping.is_tp_head()

    @property
    def skips(self) -> bool:
        """Whether non-finite steps are skipped rather than refused."""
        return self._config.storage_precision is not Precision.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSet:
    """The parameters that are frozen on a rank, and the names of the tied ones."""

    names: tuple[str, ...]
    ties: tuple[str, ...]

    @classmethod
    def of(cls, parameters: Iterable[Parameter]) -> FrozenSet:
        """Return the frozen ones of ``parameters``."""
        frozen = [parameter for parameter in parameters if is_frozen(parameter)]
        ties = sorted(one.placement.tied for one in frozen if one.placement.tied is not None)
        return cls(names=tuple(one.name for one in frozen), ties=tuple(ties))

    @property
    def checksums(self) -> tuple[float, float]:
        """Numbers that are equal for equal names and ties."""
        names, ties = (zlib.crc32("\n".join(one).encode()) for one in (self.names, self.ties))
        return float(names), float(ties)


def _check_rows(name: str, micro_batches: Sequence[Any] | None, expected: int) -> None:
    """Raise ``UsageError`` for a micro-batch with another number of rows; 1 accepts all."""
    for number, micro_batch in enumerate(micro_batches or ()):
        rows = len(micro_batch) if isinstance(micro_batch, Sized) else expected
        if expected not in (1, rows):
            raise UsageError(
                f"{name}: expected micro-batches of micro_batch_size = {expected} rows, got {rows} in number {number}"
            )


def _counted_elsewhere(assembly: Assembly) -> Collection[str]:
    """Return the parameters whose gradients other ranks have, too, and count."""
    mapping = assembly.groups.mapping
    has_first = mapping.pp_rank == mapping.config.end_stages[0]
    return {
        parameter.name
        for parameter in assembly.parameters
        if (parameter.placement.replicated is not None and not mapping.is_tp_head())
        or (parameter.placement.tied is not None and not has_first)
    }
