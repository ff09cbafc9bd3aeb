"""The checker finds what is wrong with a schedule."""

from __future__ import annotations

import pytest

from asyncpar.collectives.algorithms.catalog import schedule_of
from asyncpar.collectives.algorithms.check import ScheduleError, verify
from asyncpar.collectives.algorithms.steps import Copy, RankSchedule, Recv, Round, Send, Span, one


def plan(*rounds: Round, chunks: int = 1) -> RankSchedule:
    return RankSchedule(chunks=chunks, rounds=rounds)


def ring(size: int = 3) -> list[RankSchedule]:
    return [schedule_of("all_reduce", "ring", rank=rank, size=size) for rank in range(size)]


def changed(schedule: RankSchedule, index: int, steps: Round | None) -> RankSchedule:
    """Return ``schedule`` with one round replaced, or left out."""
    rounds = (*schedule.rounds[:index], *(() if steps is None else (steps,)), *schedule.rounds[index + 1 :])
    return RankSchedule(chunks=schedule.chunks, rounds=rounds)


def test_two_ranks_that_both_receive_first_are_a_deadlock() -> None:
    schedules = [plan((Recv(1 - rank, one(0), reduce=True),), (Send(1 - rank, one(0)),)) for rank in range(2)]
    with pytest.raises(ScheduleError, match=r"deadlock.*rank 0 in round 0, rank 1 in round 0"):
        verify("all_reduce", schedules)


def test_two_ranks_that_both_send_first_are_a_deadlock_without_buffers() -> None:
    schedules = [plan((Send(1 - rank, one(0)),), (Recv(1 - rank, one(0), reduce=True),)) for rank in range(2)]
    with pytest.raises(ScheduleError, match="deadlock"):
        verify("all_reduce", schedules)


def test_a_round_left_out_on_one_rank_is_found() -> None:
    for index in range(4):
        schedules = ring()
        schedules[1] = changed(schedules[1], index, None)
        with pytest.raises(ScheduleError):
            verify("all_reduce", schedules)


def test_a_message_that_nobody_receives_is_found() -> None:
    schedules = [plan((Send(1, one(0)),)), plan()]
    with pytest.raises(ScheduleError, match=r"deadlock|never receives"):
        verify("reduce", schedules, root=1)


def test_a_sum_that_lacks_a_rank_is_found() -> None:
    schedules = [plan((Recv(1, one(0)),)), plan((Send(0, one(0)),))]
    with pytest.raises(
        ScheduleError, match=r"rank 0: chunk 0 must hold \(\(0, 0\), \(1, 0\)\).*it holds \(\(1, 0\),\)"
    ):
        verify("reduce", schedules)


def test_a_rank_that_is_summed_twice_is_found() -> None:
    schedules = [
        plan((Recv(1, one(0), reduce=True),), (Recv(1, one(0), reduce=True),)),
        plan((Send(0, one(0)),), (Send(0, one(0)),)),
    ]
    with pytest.raises(ScheduleError, match="must hold"):
        verify("reduce", schedules)


def test_a_chunk_of_the_wrong_origin_is_found() -> None:
    schedules = [schedule_of("all_gather", "ring", rank=rank, size=3) for rank in range(3)]
    send, recv = schedules[0].rounds[1]
    assert isinstance(recv, Recv)
    schedules[0] = changed(schedules[0], 1, (send, Recv(recv.peer, one(2))))
    with pytest.raises(ScheduleError):
        verify("all_gather", schedules)


def test_sending_what_is_not_there_yet_is_found() -> None:
    schedules = [plan((Send(1, one(1)),), chunks=2), plan((Recv(0, one(1)),), chunks=2)]
    with pytest.raises(ScheduleError, match="chunk 1 is sent but holds nothing yet"):
        verify("all_gather", schedules)


def test_receiving_into_what_is_being_sent_is_found() -> None:
    schedules = [plan((Send(1 - rank, one(0)), Recv(1 - rank, one(0)))) for rank in range(2)]
    with pytest.raises(ScheduleError, match="are read and written"):
        verify("all_reduce", schedules)


def test_reducing_into_what_is_being_sent_is_allowed() -> None:
    schedules = [plan((Send(1 - rank, one(0)), Recv(1 - rank, one(0), reduce=True))) for rank in range(2)]
    assert verify("all_reduce", schedules).steps == 1


def test_two_writes_to_one_chunk_in_a_round_are_found() -> None:
    schedules = [
        plan((Recv(1, one(0), reduce=True), Recv(2, one(0), reduce=True))),
        plan((Send(0, one(0)),)),
        plan((Send(0, one(0)),)),
    ]
    with pytest.raises(ScheduleError, match="chunk 0 is written twice"):
        verify("reduce", schedules)


def test_numbers_of_chunks_that_differ_are_found() -> None:
    schedules = [plan((Send(1, (Span(0, 2),)),), chunks=2), plan((Recv(0, one(0)),), chunks=2)]
    with pytest.raises(ScheduleError, match="another number of chunks than rank 0 sends"):
        verify("broadcast", schedules)


@pytest.mark.parametrize("peer", [0, 5])
def test_a_peer_that_cannot_be_is_found(peer: int) -> None:
    with pytest.raises(ScheduleError, match=f"sends to rank {peer}"):
        verify("broadcast", [plan((Send(peer, one(0)),)), plan()])


def test_a_chunk_out_of_range_is_found() -> None:
    with pytest.raises(ScheduleError, match="chunk 3 is not one of 1"):
        verify("broadcast", [plan((Copy(Span(0, 1), Span(3, 4)),)), plan()])


def test_a_copy_between_different_lengths_is_found() -> None:
    schedules = [plan((Copy(Span(0, 1), Span(1, 3)),), chunks=3)]
    with pytest.raises(ScheduleError, match="another length"):
        verify("all_reduce", schedules)


def test_a_barrier_that_does_not_wait_for_all_is_found() -> None:
    schedules = [plan((Send((rank + 1) % 4, ()), Recv((rank - 1) % 4, ())), chunks=0) for rank in range(4)]
    with pytest.raises(ScheduleError, match=r"rank 0 leaves the barrier without knowing that ranks \[1, 2\] have"):
        verify("barrier", schedules)


def test_the_report_counts_bytes_by_rank() -> None:
    report = verify("all_reduce", ring(4))
    assert report.bytes_sent(4000) == (6000, 6000, 6000, 6000)
