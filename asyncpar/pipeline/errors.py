"""Errors of pipelines: schedules that cannot run, actions that fail, disks that do not take activations.  Pure."""

from __future__ import annotations

from asyncpar.errors import AsyncparError, PeerCancelled, PeerError, UsageError
from asyncpar.pipeline.operation import OperationKind, PipelineOp


class InvalidSchedule(UsageError):  # noqa: N818
    """A schedule would compute something never, twice or in the wrong place, or would wait for ever.

    ``rank`` and ``operation`` are the culprit: what is wrong where it stands, or, if missing, what should be there.
    """

    def __init__(self, message: str, *, rank: int, operation: PipelineOp) -> None:
        super().__init__(message)
        self.rank = rank
        self.operation = operation


class ActionFailed(AsyncparError):  # noqa: N818
    """An action of this rank failed: ``kind`` of virtual stage ``stage`` on ``micro_batch``.  The reason is its cause.

    ``rank`` is in world numbering.  The other ranks get ``StepFailed`` with the same text.
    """

    def __init__(self, rank: int, operation: PipelineOp, reason: BaseException) -> None:
        place = f"rank {rank}: {operation.kind} of virtual stage {operation.stage}, micro-batch {operation.micro_batch}"
        super().__init__(f"{place}, failed: {type(reason).__name__}: {reason}")
        self.rank = rank
        self.stage = operation.stage
        self.micro_batch = operation.micro_batch
        self.kind: OperationKind = operation.kind


def principal_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error in ``group`` that says most: one of this rank before those that other ranks have caused."""
    leaves: list[BaseException] = []
    waiting: list[BaseException] = [group]
    while waiting:
        error = waiting.pop(0)
        if isinstance(error, BaseExceptionGroup):
            waiting.extend(error.exceptions)
        else:
            leaves.append(error)
    return min(leaves, key=_distance)


def _distance(error: BaseException) -> int:
    if not isinstance(error, Exception):
        return 0
    return 3 if isinstance(error, PeerCancelled) else 2 if isinstance(error, PeerError) else 1


class OffloadError(AsyncparError):
    """The disk did not take what was to be offloaded, or gave back something else; the message says which and where."""
