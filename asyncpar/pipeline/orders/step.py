"""One step of a rank's order, before the rank's virtual stages are known.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from asyncpar.pipeline.operation import OperationKind


class ComputeStep(NamedTuple):
    """Compute ``kind`` for ``micro_batch`` with the rank's own ``chunk``."""

    kind: OperationKind
    chunk: int
    micro_batch: int


def forward(chunk: int, micro_batch: int) -> ComputeStep:
    """Return the forward pass of one micro-batch through one chunk."""
    return ComputeStep(OperationKind.FORWARD, chunk, micro_batch)


def backward(chunk: int, micro_batch: int) -> ComputeStep:
    """Return the whole backward pass."""
    return ComputeStep(OperationKind.BACKWARD, chunk, micro_batch)


def backward_input(chunk: int, micro_batch: int) -> ComputeStep:
    """Return the half of the backward pass for which the previous stage waits."""
    return ComputeStep(OperationKind.BACKWARD_INPUT, chunk, micro_batch)


def backward_weight(chunk: int, micro_batch: int) -> ComputeStep:
    """Return the half of the backward pass for which no other rank waits."""
    return ComputeStep(OperationKind.BACKWARD_WEIGHT, chunk, micro_batch)


def only_first(steps: Iterable[ComputeStep], micro_batches: int) -> Iterator[ComputeStep]:
    """Leave out all steps of micro-batches from number ``micro_batches`` on.

    Steps depend only on steps of their own micro-batch, so the rest of a schedule that can be completed can be
    completed, too.
    """
    return (step for step in steps if step.micro_batch < micro_batches)
