"""One run of a pipeline on one rank: its operations in order, while messages move in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, TypeVarTuple

from asyncpar.core.concurrency.tasks import CleanTaskGroup
from asyncpar.core.observe.recorder import Recorder
from asyncpar.core.observe.records import EventKind
from asyncpar.core.observe.spans import EventSpan
from asyncpar.device.arrays import is_device_array
from asyncpar.errors import PeerError, UsageError
from asyncpar.nn.parameter import OnGradient
from asyncpar.nn.stage import Stage
from asyncpar.pipeline.device import Sendable, check_sendable, given_to_stage
from asyncpar.pipeline.errors import ActionFailed, principal_of
from asyncpar.pipeline.mail import Array, Mail, Route, Tags, messages_in
from asyncpar.pipeline.offload.manager import MemoryManager
from asyncpar.pipeline.operation import Content, Message, OperationKind, PipelineOp

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

LossFunction: TypeAlias = Callable[[Any, Any], tuple[Any, Array]]
"""Takes the output of the last stage and the target; returns the loss and its gradient at that output.

The loss is a number, or a scalar on a device, which is read when the run is over.
"""

_LOOK_AHEAD = 2
"""How many backward passes before its own an activation begins to be read back from disk."""


class Compute(Protocol):
    """Runs the computation of layers: ``WorkerThread`` does so in a thread, while the loop moves messages."""

    async def run(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Return the result of ``function``, one call after another."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStages:
    """The virtual stages of one rank by chunk, and the object that computes them."""

    rank: int
    """In world numbering, for messages."""
    last_stage: int
    stages: Sequence[Stage[Any]]
    compute: Compute
    loss: LossFunction | None
    memory: MemoryManager
    tags: Tags
    ahead: int
    recorder: Recorder
    """Records the computations of this rank, with times."""
    group: int
    """The number of the group of the pipeline's ranks, under which they are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The input of one run.  ``is_training``: there are targets and backward passes."""

    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    on_gradient: OnGradient | None
    is_training: bool


class PipelineRun:
    """Runs ``operations`` once; ``number`` counts the runs of the pipeline, on all its ranks alike."""

    def __init__(self, part: RankStages, load: Load, operations: Sequence[PipelineOp], number: int) -> None:
        self._stages = part
        self._number = number
        self._load = load
        self._operations = operations
        self._made: dict[Message, Sendable] = {}
        self._backwards = [one for one in operations if one.kind.makes_gradient]
        self._order_of_use = {(one.chunk, one.micro_batch): use for use, one in enumerate(self._backwards)}
        self._last_weights = _last_weights(operations)
        self._clock = asyncio.get_running_loop().time
        self.losses: dict[int, float] = {}
        self.outputs: dict[int, Array] = {}
        self.seconds_busy = 0.0
        self.seconds_waiting = 0.0
        self.mail: Mail

    async def run(self, opening: Callable[[], Coroutine[Any, Any, Route]]) -> None:
        """Run all operations; ``opening`` returns the group for messages, and may fail."""
        async with CleanTaskGroup() as tasks:
            self.mail = Mail(
                messages_in(self._operations),
                self._stages.tags,
                tasks=tasks,
                rank=self._stages.rank,
                ahead=self._stages.ahead,
                stages=self._stages.stages,
            )
            opened = tasks.create_task(self._open(opening), name="opening of a pipeline")
            for operation in self._operations:
                await self._do(operation)
            await opened
            if not all(isinstance(loss, float) for loss in self.losses.values()):  # on a device: waits for it once
                self.losses = await self._timed(_as_numbers, self.losses)

    async def _open(self, opening: Callable[[], Coroutine[Any, Any, Route]]) -> None:
        self.mail.open(await opening())

    async def _do(self, operation: PipelineOp) -> None:
        if operation.kind.is_receive:
            began = self._clock()
            self._made[operation.message] = await self.mail.receive(operation)
            self.seconds_waiting += self._clock() - began
        elif operation.kind.is_send:
            self.mail.send(operation, self._made.pop(operation.message))
        else:
            fields = {"stage": operation.stage, "micro-batch": operation.micro_batch}
            span = EventSpan(
                str(operation.kind),
                fields,
                kind=EventKind.PIPELINE,
                recorder=self._stages.recorder,
                group=self._stages.group,
                sequence=self._number,
            )
            try:
                with span:
                    await self._compute(operation)
            except Exception as error:
                principal = principal_of(error) if isinstance(error, BaseExceptionGroup) else error
                if not isinstance(principal, PeerError):
                    raise ActionFailed(self._stages.rank, operation, error) from error
                principal.add_note(f"in {operation.kind} of virtual stage {operation.stage}")
                raise principal from principal.__cause__  # of layers that communicate with their peers

    # -- computing -------------------------------------------------------------------------------------------------

    async def _compute(self, operation: PipelineOp) -> None:
        match operation.kind:
            case OperationKind.FORWARD:
                await self._forward(operation)
            case OperationKind.BACKWARD | OperationKind.BACKWARD_INPUT:
                await self._backward(operation)
            case _:
                await self._backward_weight(operation)

    async def _forward(self, operation: PipelineOp) -> None:
        part, micro_batch = self._stages, operation.micro_batch
        stage = part.stages[operation.chunk]
        is_last = operation.stage == part.last_stage
        before = Message(operation.stage - 1, Content.ACTIVATION, micro_batch)
        x = _item(self._load.inputs, micro_batch) if operation.stage == 0 else given_to_stage(self._made.pop(before))
        if not self._load.is_training:
            y = await self._timed(_infer, stage, x)
        elif is_last:
            await part.memory.make_room()
            assert part.loss is not None, "the opening has looked for it"
            target = _item(self._load.targets, micro_batch)
            loss, kept = await self._timed(_forward_with_loss, stage, part.loss, x, target)
            self.losses[micro_batch] = loss
            self._store(operation, kept)
            return
        else:
            await part.memory.make_room()
            y, saved = await self._timed(stage.forward, x)
            self._store(operation, (saved, None))
        if is_last:
            self.outputs[micro_batch] = y
        else:
            self._made[_message_of(operation)] = check_sendable(y, "the output", stage)

    def _store(self, operation: PipelineOp, kept: tuple[Any, Array | None]) -> None:
        key = (operation.chunk, operation.micro_batch)
        self._stages.memory.store_activation(key, kept, needed=self._order_of_use[key])

    async def _backward(self, operation: PipelineOp) -> None:
        part, key = self._stages, (operation.chunk, operation.micro_batch)
        stage = part.stages[operation.chunk]
        saved, dy = await part.memory.retrieve_activation(key)
        self._read_ahead(key)
        if dy is None:
            dy = given_to_stage(self._made.pop(Message(operation.stage + 1, Content.GRADIENT, operation.micro_batch)))
        if operation.kind is OperationKind.BACKWARD:
            dx = await self._timed(stage.backward, saved, dy, self._on_gradient(operation))
            part.memory.free_activation(key)
        else:
            dx, deferred = await self._timed(stage.backward_input, saved, dy)
            part.memory.replace_activation(key, deferred)
        if operation.stage > 0:
            if dx is None:
                raise UsageError("the gradient of the input: expected an array, because a stage before waits, got None")
            self._made[_message_of(operation)] = check_sendable(dx, "the gradient of the input", stage)

    async def _backward_weight(self, operation: PipelineOp) -> None:
        key = (operation.chunk, operation.micro_batch)
        deferred = await self._stages.memory.retrieve_activation(key)
        stage = self._stages.stages[operation.chunk]
        await self._timed(stage.backward_weight, deferred, self._on_gradient(operation))
        self._stages.memory.free_activation(key)

    def _on_gradient(self, operation: PipelineOp) -> OnGradient | None:
        """Return the gradient callback if ``operation`` is the last one of its chunk that adds to gradients."""
        return self._load.on_gradient if self._last_weights[operation.chunk] is operation else None

    def _read_ahead(self, key: tuple[int, int]) -> None:
        use = self._order_of_use[key]
        for soon in self._backwards[use + 1 : use + 1 + _LOOK_AHEAD]:
            self._stages.memory.read_ahead((soon.chunk, soon.micro_batch))

    async def _timed(self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        began = self._clock()
        try:
            return await self._stages.compute.run(function, *arguments)
        finally:
            self.seconds_busy += self._clock() - began


def _item(items: Sequence[Any] | None, micro_batch: int) -> Any:
    assert items is not None, "the opening has looked for it"
    return items[micro_batch]


def _infer(stage: Stage[Any], x: Any) -> Array:
    return stage.forward(x)[0]


def _forward_with_loss(stage: Stage[Any], loss: LossFunction, x: Any, target: Any) -> tuple[Any, tuple[Any, Array]]:
    """Return the loss: a number, or an array on a device, for which this does not wait."""
    y, saved = stage.forward(x)
    value, dy = loss(y, target)
    return value if is_device_array(value) else float(value), (saved, dy)


def _as_numbers(losses: dict[int, Any]) -> dict[int, float]:
    return {micro_batch: float(loss) for micro_batch, loss in losses.items()}


def _last_weights(operations: Sequence[PipelineOp]) -> dict[int, PipelineOp]:
    """Return, for each chunk, the last operation that adds to the gradients of its parameters."""
    return {one.chunk: one for one in operations if one.kind.frees_activation}


def _message_of(operation: PipelineOp) -> Message:
    message = operation.made
    assert message is not None, f"{operation} makes nothing for others"
    return message
