from __future__ import annotations

import pytest

from asyncpar.pipeline import Content, Message, OperationKind, PipelineOp


def operation(kind: OperationKind, stage: int) -> PipelineOp:
    return PipelineOp(kind=kind, stage=stage, micro_batch=5, chunk=1, peer=0)


def test_a_send_and_the_receive_of_the_next_stage_name_the_same_message() -> None:
    sent = operation(OperationKind.SEND_ACTIVATION, 2).message
    assert sent == operation(OperationKind.RECV_ACTIVATION, 3).message == Message(2, Content.ACTIVATION, 5)


def test_a_gradient_goes_to_the_stage_before() -> None:
    sent = operation(OperationKind.SEND_GRADIENT, 3).message
    assert sent == operation(OperationKind.RECV_GRADIENT, 2).message == Message(3, Content.GRADIENT, 5)


def test_what_is_sent_is_what_was_made() -> None:
    assert operation(OperationKind.FORWARD, 2).made == operation(OperationKind.SEND_ACTIVATION, 2).message
    for kind in (OperationKind.BACKWARD, OperationKind.BACKWARD_INPUT):
        assert operation(kind, 2).made == operation(OperationKind.SEND_GRADIENT, 2).message
    assert operation(OperationKind.BACKWARD_WEIGHT, 2).made is None


@pytest.mark.parametrize("kind", OperationKind)
def test_each_kind_is_computed_sent_or_received(kind: OperationKind) -> None:
    assert [kind.is_compute, kind.is_send, kind.is_receive].count(True) == 1


def test_an_operation_reads_as_its_cell() -> None:
    assert [str(operation(kind, 12)) for kind in OperationKind] == [
        "12F5",
        "12B5",
        "12I5",
        "12W5",
        "12SA5",
        "12RA5",
        "12SG5",
        "12RG5",
    ]
