"""Sends and receives around what a rank computes.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from asyncpar.pipeline.layout import StageLayout
from asyncpar.pipeline.operation import OperationKind, PipelineOp


def with_messages(order: Iterable[PipelineOp], layout: StageLayout) -> Iterator[PipelineOp]:
    """Yield ``order``, with a receive before each operation whose input comes from another rank, and a send behind each
    whose output goes to one.

    What the next or the previous virtual stage of the same rank takes stays where it is: nothing is sent.
    """
    for operation in order:
        yield from _messages(_received(operation.kind), operation, layout)
        yield operation
        yield from _messages(_sent(operation.kind), operation, layout)


def _received(kind: OperationKind) -> tuple[OperationKind, int] | None:
    """What an operation needs from another stage, and how many stages ahead that one is."""
    if kind is OperationKind.FORWARD:
        return OperationKind.RECV_ACTIVATION, -1
    return (OperationKind.RECV_GRADIENT, +1) if kind.makes_gradient else None


def _sent(kind: OperationKind) -> tuple[OperationKind, int] | None:
    """What an operation makes for another stage, and how many stages ahead that one is."""
    if kind is OperationKind.FORWARD:
        return OperationKind.SEND_ACTIVATION, +1
    return (OperationKind.SEND_GRADIENT, -1) if kind.makes_gradient else None


def _messages(
    message: tuple[OperationKind, int] | None, operation: PipelineOp, layout: StageLayout
) -> Iterator[PipelineOp]:
    if message is None:
        return
    kind, ahead = message
    neighbour = operation.stage + ahead
    if not 0 <= neighbour < layout.num_virtual_stages:
        return
    peer = layout.ranks[neighbour]
    if peer != layout.ranks[operation.stage]:
        yield PipelineOp(
            kind=kind, stage=operation.stage, micro_batch=operation.micro_batch, chunk=operation.chunk, peer=peer
        )
