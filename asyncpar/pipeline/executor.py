"""Runs a pipeline schedule on the ranks of a group.

Theory of operation.  Every rank does its operations in order: computation goes to a compute thread, receptions are
posted before they are needed, and sends continue in the background, so that messages move while layers compute.
Messages have a tag made of their content, so their order does not matter, and no rank waits for the end of a send: the
simulation of the schedule shows that no rank waits forever.

Each run begins with an exchange of the ranks' intentions, hidden behind the first forward passes.  It detects ranks
that do not match before anything is sent, and agrees on the number of the *attempt*: after a failure on any rank all
continue with messages of another group, so that messages of the failed run are not received.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.collectives.communicator import Communicator, recorder_of
from asyncpar.core.config.parallel import MemoryOptimizationStrategy
from asyncpar.errors import UsageError
from asyncpar.nn.parameter import OnGradient
from asyncpar.nn.stage import Stage
from asyncpar.pipeline.alarm import StepAlarm
from asyncpar.pipeline.check import check_schedule
from asyncpar.pipeline.device import DeviceMessages, are_on_devices
from asyncpar.pipeline.errors import principal_of
from asyncpar.pipeline.execution import Compute, Load, LossFunction, PipelineRun, RankStages
from asyncpar.pipeline.mail import RECEIVE_AHEAD, Array, Route, make_tags
from asyncpar.pipeline.offload.manager import MemoryManager
from asyncpar.pipeline.operation import OperationKind, PipelineOp
from asyncpar.pipeline.result import PipelineResult
from asyncpar.pipeline.schedule import Schedule

_OF_INFERENCE = (OperationKind.FORWARD, OperationKind.SEND_ACTIVATION, OperationKind.RECV_ACTIVATION)


class _OpeningMismatch(Exception):  # noqa: N818
    """The openings of ranks do not match, which all ranks know, so none has to be notified."""


class PipelineExecutor:
    """This rank's part of a pipeline.  Create it on all ranks of ``communicator``, in the same order as other groups.

    ``stages`` are the virtual stages that the schedule puts on this rank, by chunk; ``loss`` is called on the rank with
    the last one.  Stages that are ``DeviceStage`` on all ranks pass device arrays to each other, which the communicator
    moves from device to device.  ``memory`` holds activations (default: in memory, counted).  A failure on a rank ends
    the run on all of them with ``ActionFailed``, ``StepFailed`` or ``PeerLost``.  With ``alarm``, whose ranks include
    these, that is left to the block around the runs, which the alarm must watch.  The next run works, on gradients that
    the failed one may have added to: zero them first.

    ``name`` distinguishes executors on one communicator, and belongs to one until it is closed; ranks compare it in
    each run.  Raises ``InvalidSchedule`` for a schedule that cannot be run.

    ``receive_ahead`` is the number of receives posted before their operations begin.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[Stage[Any]],
        *,
        communicator: Communicator,
        compute: Compute,
        loss: LossFunction | None = None,
        memory: MemoryManager | None = None,
        alarm: StepAlarm | None = None,
        receive_ahead: int = RECEIVE_AHEAD,
        name: str = "pipeline",
    ) -> None:
        group = communicator.subgroup(range(communicator.size), name=f"{communicator.name} pipeline")
        assert group is not None, "this rank is in its own group"
        self._group = group  # created before anything can be refused: all ranks must create the same groups
        self._communicator, self._name = communicator, name
        self._alarm = StepAlarm(communicator) if alarm is None else alarm
        self._own_alarm = self._alarm if alarm is None else None
        if communicator.size != schedule.num_stages:
            raise UsageError(
                f"communicator: expected a group of {schedule.num_stages} ranks, as the schedule has, "
                f"got one of {communicator.size}"
            )
        if not set(group.ranks) <= set(self._alarm.ranks):
            raise UsageError(f"alarm: expected one over ranks {group.ranks}, got one over {self._alarm.ranks}")
        if receive_ahead < 1:
            raise UsageError(f"receive_ahead: expected 1 or more, got {receive_ahead}")
        tags = make_tags(schedule)
        check_schedule(schedule)
        self._is_on_device = are_on_devices(stages)
        if self._is_on_device and memory is not None:
            _check_memory(memory)
        self.schedule = schedule
        self._memory = MemoryManager() if memory is None else memory
        self._stages = RankStages(
            rank=group.ranks[group.rank],
            last_stage=schedule.num_virtual_stages - 1,
            stages=tuple(stages),
            compute=compute,
            loss=loss,
            memory=self._memory,
            tags=tags,
            ahead=receive_ahead,
            recorder=recorder_of(group),
            group=group.group,
        )
        self._digest = schedule.digest()
        self._operations = schedule.get_stage_schedule(group.rank)
        self._attempt = 1
        self._runs = (0, 0)
        self._count = 0
        self._is_running = False
        communicator.claim(name, self)

    @property
    def has_first_stage(self) -> bool:
        """Whether this rank takes the inputs."""
        return self.schedule.rank_of(0) == self._group.rank

    @property
    def has_last_stage(self) -> bool:
        """Whether this rank takes the targets, and gets the losses."""
        return self.schedule.rank_of(self._stages.last_stage) == self._group.rank

    async def run(
        self,
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        *,
        on_gradient: OnGradient | None = None,
    ) -> PipelineResult:
        """Run all forward and backward passes, which add to the gradients of the stages' parameters.

        ``inputs`` has one item for each micro-batch, on the rank with the first virtual stage; ``targets`` likewise on
        that with the last one.  Values on other ranks are ignored.  ``on_gradient`` is called, from the compute thread,
        with the name of each parameter when its gradient is final.
        """
        problem = self._problem(inputs, targets, is_training=True)
        load = Load(inputs=inputs, targets=targets, on_gradient=on_gradient, is_training=True)
        began = asyncio.get_running_loop().time()
        execution = await self._execute("run", problem, load, self._operations)
        stats = self._memory.stats
        return PipelineResult(
            losses=tuple(execution.losses[micro_batch] for micro_batch in sorted(execution.losses)),
            peak_in_flight=stats.peak_count,
            peak_bytes=stats.peak_bytes,
            seconds=asyncio.get_running_loop().time() - began,
            seconds_busy=execution.seconds_busy,
            seconds_waiting=execution.seconds_waiting,
            sent=execution.mail.sent.boundaries(),
            received=execution.mail.received.boundaries(),
        )

    async def run_forward(self, inputs: Sequence[Any] | None = None) -> tuple[Array, ...]:
        """Run the forward passes of ``inputs`` only, and return the outputs on the rank with the last virtual stage.

        Other ranks return ().
        """
        problem = self._problem(inputs, None, is_training=False)
        load = Load(inputs=inputs, targets=None, on_gradient=None, is_training=False)
        operations = [operation for operation in self._operations if operation.kind in _OF_INFERENCE]
        execution = await self._execute("run_forward", problem, load, operations)
        return tuple(execution.outputs[micro_batch] for micro_batch in sorted(execution.outputs))

    async def close(self) -> None:
        """Stop receiving failures of other ranks, and free the held activations.  Idempotent."""
        if self._own_alarm is not None:
            await self._own_alarm.close()
        await self._memory.close()
        self._communicator.release(self._name, self)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _problem(self, inputs: Sequence[Any] | None, targets: Sequence[Any] | None, *, is_training: bool) -> str | None:
        """Return why this rank cannot run."""
        held = self.schedule.virtual_stages_of(self._group.rank)
        if len(self._stages.stages) != len(held):
            numbers = ", ".join(map(str, held))
            return f"stages: expected {len(held)} (virtual stages {numbers}), got {len(self._stages.stages)}"
        problem = self._lack("inputs", inputs) if self.has_first_stage else None
        if problem is None and is_training and self.has_last_stage:
            if self._stages.loss is None:
                return "loss: expected a function on the rank with the last virtual stage, got None"
            return self._lack("targets", targets)
        return problem

    def _lack(self, name: str, items: object) -> str | None:
        wanted = self.schedule.num_microbatches
        if items is None:
            return f"{name}: expected {wanted} micro-batches, got none"
        if not isinstance(items, (Sequence, np.ndarray)):
            return f"{name}: expected a sequence of {wanted} micro-batches, got {type(items).__name__}"
        return None if len(items) == wanted else f"{name}: expected {wanted} micro-batches, got {len(items)}"

    async def _execute(
        self, method: str, problem: str | None, load: Load, operations: Sequence[PipelineOp]
    ) -> PipelineRun:
        if self._is_running:
            raise UsageError(f"{method}: expected one run at a time, but one is under way")
        self._count += 1
        execution = PipelineRun(self._stages, load, operations, self._count)
        opening = self._opening(method, problem)
        self._attempt += 1  # unless this one succeeds
        self._is_running = True
        self._memory.start_peak()
        try:
            async with nullcontext() if self._own_alarm is None else self._own_alarm.watch():
                mismatch = await self._try(execution, opening)
            self._attempt -= 1
        finally:
            self._memory.clear()
            self._is_running = False
        if mismatch is not None:
            raise SettingsDiffer(str(mismatch))
        return execution

    def _opening(self, method: str, problem: str | None) -> PipelineOpening:
        return PipelineOpening(
            name=self._name,
            method=method,
            schedule=self.schedule.name,
            micro_batches=self.schedule.num_microbatches,
            digest=self._digest,
            attempt=self._attempt,
            problem=problem,
            is_on_device=self._is_on_device,
        )

    async def _try(self, execution: PipelineRun, opening: PipelineOpening) -> _OpeningMismatch | None:
        """Run it; return, instead of raising, a mismatch that all ranks know."""
        topic = self._next_topic()

        async def agree() -> Route:
            openings = await self._alarm.exchange(topic, asdict(opening), self._group.ranks)
            return self._messages_of([PipelineOpening(**one) for one in openings])

        try:
            if opening.problem is not None:
                await agree()
            else:
                await execution.run(agree)
        except _OpeningMismatch as found:
            return found
        except BaseExceptionGroup as group:
            failure = principal_of(group.subgroup(_OpeningMismatch) or group)
        else:
            return None
        if isinstance(failure, _OpeningMismatch):
            return failure
        raise failure

    def _next_topic(self) -> str:
        """Return the common name of this run on all ranks: its number among this executor's in the running block."""
        number, runs = self._runs
        runs = runs + 1 if number == self._alarm.block else 1
        self._runs = (self._alarm.block, runs)
        return f"run {runs} of pipeline {self._group.group:x}"

    def _messages_of(self, openings: Sequence[PipelineOpening]) -> Route:
        """Return the group for the messages of this run."""
        mismatch = find_mismatch(openings, self._group.ranks)
        if mismatch is not None:
            raise _OpeningMismatch(mismatch)
        agreed = max(opening.attempt for opening in openings)
        self._attempt = agreed + 1
        group = self._subgroup(f"attempt {agreed}")
        return DeviceMessages(group, self._subgroup(f"headers {agreed}")) if self._is_on_device else group

    def _subgroup(self, key: str) -> Communicator:
        group = self._group.subgroup(range(self._group.size), name=self._group.name, key=key)
        assert group is not None, "this rank is in its own group"
        return group


def _check_memory(memory: MemoryManager) -> None:
    """Raise ``UsageError`` for a manager that would move activations, which must stay on their device."""
    if memory.strategy is MemoryOptimizationStrategy.EXTREME or memory.limit is not None:
        raise UsageError(
            "memory: expected no limit and a strategy other than extreme with stages on devices, whose activations are "
            "neither counted nor moved; recompute instead"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOpening:
    """The run that one rank begins with the executor ``name``; ``problem`` is the reason why it cannot.

    ``is_on_device``: activations are device arrays.

    ``attempt`` is larger than that of earlier runs if the last one failed here, since its messages may be in flight.
    """

    name: str
    method: str
    schedule: str
    micro_batches: int
    digest: str
    attempt: int
    problem: str | None
    is_on_device: bool

    @property
    def plan(self) -> str:
        """A description of the settings that must be equal on all ranks."""
        what = f"{self.method} of {self.schedule}, {self.micro_batches} micro-batches"
        return f"{what} (digest {self.digest}) by {self.name!r}"


def find_mismatch(openings: Sequence[PipelineOpening], ranks: Sequence[int]) -> str | None:
    """Return a mismatch; None if everything matches.  ``ranks`` are the numbers to use in the message."""
    plans = [opening.plan for opening in openings]
    common, _ = Counter(plans).most_common(1)[0]
    different = [f"rank {rank} has {plan}" for rank, plan in zip(ranks, plans, strict=True) if plan != common]
    if different:
        others = [str(rank) for rank, plan in zip(ranks, plans, strict=True) if plan == common]
        who = "rank" if len(others) == 1 else "ranks"
        return (
            f"schedule: expected the same on all ranks, but {'; '.join(different)}; {who} {', '.join(others)}: {common}"
        )
    there = [str(rank) for rank, one in zip(ranks, openings, strict=True) if one.is_on_device]
    if there and len(there) < len(ranks):
        here = [str(rank) for rank, one in zip(ranks, openings, strict=True) if not one.is_on_device]
        return (
            f"stages: expected all on devices, or none, but those of ranks {', '.join(there)} are, and those of ranks "
            f"{', '.join(here)} are on the host"
        )
    problems = [f"rank {rank}: {one.problem}" for rank, one in zip(ranks, openings, strict=True) if one.problem]
    return "; ".join(problems) or None
