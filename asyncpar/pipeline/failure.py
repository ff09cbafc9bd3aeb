"""What a pipeline rank raises when one of its actions fails.  Pure."""

from __future__ import annotations

from asyncpar.errors import AsyncparError, PeerCancelled, PeerError
from asyncpar.pipeline.operation import OperationKind, PipelineOp


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
