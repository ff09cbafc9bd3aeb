"""Messages between agents and the coordinator arrive as they were sent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar.core.observe.agent_line import Loss
from asyncpar.core.observe.rank_reports import FailureReport, Phase
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.messages import (
    decode_hello,
    decode_order,
    decode_rank_end,
    decode_state,
    encode_hello,
    encode_order,
    encode_rank_end,
    encode_state,
)
from asyncpar.launch.protocol import AgentAssignment, AgentHello, GiveUpRank, JobOutcome, Order, StopRanks
from asyncpar.launch.vitals import Condition, RankState

ASSIGNMENT = AgentAssignment(
    generation=2,
    restart_count=1,
    group_rank=3,
    group_world_size=4,
    rank_offset=6,
    world_size=8,
    master_addr="10.0.0.1",
    master_port=29500,
)
ORDERS: tuple[Order, ...] = (
    ASSIGNMENT,
    StopRanks(2, 15, "rank 0 failed"),
    StopRanks(2, 15, "rank 0 failed", Loss(0, "left", "exited with code 3")),
    GiveUpRank(2, Loss(5, "right", "was stopped for 30.0 s")),
    JobOutcome(0),
    JobOutcome(130, "the agent on left got SIGINT"),
)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_every_order_arrives_as_it_was_sent(order: Order) -> None:
    message = pb.AgentCommand.FromString(encode_order(order).SerializeToString())
    assert decode_order(message) == order


def test_an_order_of_a_newer_coordinator_is_none() -> None:
    assert decode_order(pb.AgentCommand(number=1)) is None


@pytest.mark.parametrize("node_rank", [None, 0, 3])
def test_an_introduction_distinguishes_no_place_from_place_0(node_rank: int | None) -> None:
    hello = AgentHello(job="j", nnodes=4, nproc=2, node_rank=node_rank, host="left")
    assert decode_hello(encode_hello(hello).hello) == hello


@pytest.mark.parametrize("phase", [None, *Phase])
@pytest.mark.parametrize("condition", list(Condition))
def test_a_state_arrives_in_any_phase_and_condition(phase: Phase | None, condition: Condition) -> None:
    state = RankState(generation=1, rank=2, phase=phase, condition=condition, seconds=1.5, place="é\n.py:9")
    assert decode_state(encode_state(state).state) == state


def test_a_time_that_is_no_number_counts_as_none() -> None:
    state = RankState(generation=1, rank=2, condition=Condition.HUNG, seconds=math.nan)
    assert decode_state(encode_state(state).state).seconds == 0.0


END = RankEnd(generation=1, rank=5, local_rank=1, host="left", pid=77, returncode=-9, at=100.0, stderr_tail="oh\nno")
REPORT = FailureReport(
    type_name="PeerLost", message="rank 3", traceback="tb", is_peer_error=True, blames=3, call="barrier"
)


@pytest.mark.parametrize("report", [None, REPORT, FailureReport(type_name="E", message="", traceback="")])
def test_an_end_travels_with_its_time_on_the_clock_of_its_host(report: FailureReport | None) -> None:
    sent = replace(END, report=report)
    arrived = decode_rank_end(encode_rank_end(sent).rank_ended, host="left", offset=-92.5)
    assert arrived == replace(sent, at=7.5)
    broken = decode_rank_end(encode_rank_end(replace(END, at=math.nan)).rank_ended, host="left", offset=0.0)
    assert broken.at == 0.0


def test_long_texts_are_cut_where_they_say_least() -> None:
    report = long_report(message="m" * 70_000 + "x", traceback="x" + "t" * 70_000, blames=-1)
    arrived = decode_rank_end(encode_rank_end(replace(END, report=report)).rank_ended, host="h", offset=0.0)
    assert arrived.report is not None
    assert (arrived.report.message, arrived.report.traceback) == ("m" * 64_000, "t" * 64_000)
    assert arrived.report.blames is None  # no rank


def long_report(*, message: str, traceback: str, blames: int) -> FailureReport:
    return FailureReport(type_name="E", message=message, traceback=traceback, blames=blames)
