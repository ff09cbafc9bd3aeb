"""The operations of a pipeline rank, and the messages between them.  Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class OperationKind(StrEnum):
    """The kind of an operation on one micro-batch of one virtual stage.

    BACKWARD is BACKWARD_INPUT (the gradient of the stage's input, for which the previous stage waits) and
    BACKWARD_WEIGHT (the gradients of its parameters, for which no other rank waits) in one.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    SEND_ACTIVATION = "send_activation"
    RECV_ACTIVATION = "recv_activation"
    SEND_GRADIENT = "send_gradient"
    RECV_GRADIENT = "recv_gradient"

    @property
    def is_compute(self) -> bool:
        return self in _COMPUTE

    @property
    def is_send(self) -> bool:
        return self in _SENDS

    @property
    def is_receive(self) -> bool:
        return self in _RECEIVES

    @property
    def makes_gradient(self) -> bool:
        """Whether it computes the gradient of the stage's input."""
        return self in _GIVES_GRADIENT

    @property
    def frees_activation(self) -> bool:
        """Whether nothing that the stage saved for the micro-batch is needed any more afterwards."""
        return self in _LAST_OF_A_MICRO_BATCH

    @property
    def symbol(self) -> str:
        """The letters that stand for the kind in schedule files and timelines."""
        return _SYMBOLS[self]


_SENDS = frozenset({OperationKind.SEND_ACTIVATION, OperationKind.SEND_GRADIENT})
_RECEIVES = frozenset({OperationKind.RECV_ACTIVATION, OperationKind.RECV_GRADIENT})
_COMPUTE = frozenset(OperationKind) - _SENDS - _RECEIVES
_GIVES_GRADIENT = frozenset({OperationKind.BACKWARD, OperationKind.BACKWARD_INPUT})
_LAST_OF_A_MICRO_BATCH = frozenset({OperationKind.BACKWARD, OperationKind.BACKWARD_WEIGHT})

_SYMBOLS = {
    OperationKind.FORWARD: "F",
    OperationKind.BACKWARD: "B",
    OperationKind.BACKWARD_INPUT: "I",
    OperationKind.BACKWARD_WEIGHT: "W",
    OperationKind.SEND_ACTIVATION: "SA",
    OperationKind.RECV_ACTIVATION: "RA",
    OperationKind.SEND_GRADIENT: "SG",
    OperationKind.RECV_GRADIENT: "RG",
}


class Content(StrEnum):
    """The content of a message between two stages."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Message(NamedTuple):
    """The identity of a message: equal for a matching send and receive, different for all others.

    ``stage`` is the virtual stage that made the content, which determines the rank and the chunk that it comes from.
    """

    stage: int
    content: Content
    micro_batch: int

    def __str__(self) -> str:
        return f"the {self.content} of stage {self.stage} for micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOp:
    """One operation of one rank on ``micro_batch``.

    ``stage`` is the virtual stage (0 .. num_virtual_stages - 1), always the rank's own: RECV_ACTIVATION of stage
    ``s + 1`` receives from SEND_ACTIVATION of stage ``s``, and RECV_GRADIENT of ``s - 1`` from SEND_GRADIENT of ``s``.
    ``chunk`` is the place of the stage among those of its rank.  ``peer`` is the rank at the other end of a send or
    receive, None for computations.
    """

    kind: OperationKind
    stage: int
    micro_batch: int
    chunk: int = 0
    peer: int | None = None

    @property
    def made(self) -> Message | None:
        """The message that this makes for another stage: an activation, a gradient, or None (weight gradients stay)."""
        if self.kind is OperationKind.FORWARD:
            return Message(self.stage, Content.ACTIVATION, self.micro_batch)
        return Message(self.stage, Content.GRADIENT, self.micro_batch) if self.kind.makes_gradient else None

    @property
    def message(self) -> Message:
        """The identity of the message that this sends or receives; only for sends and receives."""
        match self.kind:
            case OperationKind.SEND_ACTIVATION:
                return Message(self.stage, Content.ACTIVATION, self.micro_batch)
            case OperationKind.RECV_ACTIVATION:
                return Message(self.stage - 1, Content.ACTIVATION, self.micro_batch)
            case OperationKind.SEND_GRADIENT:
                return Message(self.stage, Content.GRADIENT, self.micro_batch)
            case OperationKind.RECV_GRADIENT:
                return Message(self.stage + 1, Content.GRADIENT, self.micro_batch)
        raise AssertionError(f"{self} is computed, not sent")

    def __str__(self) -> str:
        """Return the cell of a schedule file: stage, kind, micro-batch, such as ``2F0``."""
        return f"{self.stage}{self.kind.symbol}{self.micro_batch}"
