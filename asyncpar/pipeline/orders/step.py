"""One step of a rank's order, before it is known which virtual stages the rank holds.  Pure."""

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
    """Return the half of the backward pass that the stage before waits for."""
    return ComputeStep(OperationKind.BACKWARD_INPUT, chunk, micro_batch)


def backward_weight(chunk: int, micro_batch: int) -> ComputeStep:
    """Return the half of the backward pass that no other rank waits for."""
    return ComputeStep(OperationKind.BACKWARD_WEIGHT, chunk, micro_batch)


def only_first(steps: Iterable[ComputeStep], micro_batches: int) -> Iterator[ComputeStep]:
    """Leave out all steps of micro-batches from number ``micro_batches`` on.

    Steps depend on steps of their own micro-batch only, so what is left of a schedule that ends is one that ends.
    """
    return (step for step in steps if step.micro_batch < micro_batches)
