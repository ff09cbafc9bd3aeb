"""What can be wrong with a pipeline schedule."""

from __future__ import annotations

from asyncpar.errors import UsageError
from asyncpar.pipeline.operation import PipelineOp


class InvalidSchedule(UsageError):  # noqa: N818
    """A schedule would compute something never, twice or in the wrong place, or would wait for ever.

    ``rank`` and ``operation`` are the culprit: what is wrong where it stands, or, if missing, what should be there.
    """

    def __init__(self, message: str, *, rank: int, operation: PipelineOp) -> None:
        super().__init__(message)
        self.rank = rank
        self.operation = operation
