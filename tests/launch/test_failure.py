"""The first failure is found, and its text is right."""

from __future__ import annotations

import signal
from dataclasses import replace

import msgspec

from asyncpar.core.observe.rank_reports import FailureReport
from asyncpar.launch.failure import RankEnd, add_leavers, choose_first, describe, describe_ending, exit_code_of


def failure(rank: int, at: float, *, peer: int | None = None, tail: str = "", code: int = 1) -> RankEnd:
    report = None
    if peer is not None:
        report = FailureReport(
            type_name="PeerLost", message=f"rank {peer} is gone\nmore", traceback="tb", is_peer_error=True, blames=peer
        )
    return RankEnd(
        generation=0,
        rank=rank,
        local_rank=0,
        host="left",
        pid=9,
        returncode=code,
        at=at,
        report=report,
        stderr_tail=tail,
    )


def test_the_earliest_failure_counts_not_the_lowest_rank() -> None:
    assert choose_first([failure(0, 3.0), failure(2, 1.0), failure(1, 2.0)]).rank == 2


def test_who_blames_others_comes_after_who_does_not() -> None:
    assert choose_first([failure(0, 1.0, peer=2), failure(2, 5.0)]).rank == 2
    assert choose_first([failure(0, 2.0, peer=2), failure(1, 1.0, peer=2)]).rank == 1


def test_who_blames_a_rank_that_did_not_fail_comes_before_who_blames_one_that_did() -> None:
    assert choose_first([failure(2, 1.0, peer=0), failure(0, 2.0, peer=1)]).rank == 0


def mismatch(rank: int, at: float, call: str) -> RankEnd:
    report = FailureReport(type_name="OperationMismatch", message="odd", traceback="tb", call=call)
    return replace(failure(rank, at), report=report)


def test_of_ranks_that_called_different_operations_the_odd_one_is_first_also_if_it_comes_late() -> None:
    usual, odd = [mismatch(rank, 1.0 + rank, "reduce") for rank in (0, 2)], mismatch(1, 9.0, "gather")
    assert choose_first([*usual, odd]).rank == 1
    assert choose_first(usual, [odd]).rank == 1
    assert describe(usual, [odd]).startswith("rank 1 failed first: ")
    assert choose_first([failure(3, 0.5), *usual, odd]).rank == 3, "which failed by itself before"
    assert choose_first([*usual, failure(1, 9.0, peer=0)]).rank == 0, "what that one called is not known"


def test_of_ranks_that_have_lost_each_other_the_lowest_is_first() -> None:
    assert choose_first([failure(1, 1.0, peer=0), failure(0, 2.0, peer=1)]).rank == 0
    assert choose_first([failure(1, 1.0, peer=0)], [failure(0, 2.0, peer=1)]).rank == 0
    waited = failure(1, 1.0, peer=0)
    assert waited.report is not None
    late = replace(waited, report=msgspec.structs.replace(waited.report, type_name="PeerTimeout"))
    assert choose_first([late, failure(0, 2.0, peer=1)]).rank == 1, "it has the account of the deadlock"


def test_a_rank_that_left_with_code_0_explains_the_failures_of_those_that_name_it() -> None:
    left, needless = failure(2, 1.5, code=0), failure(3, 0.5, code=0)
    victims = [failure(0, 1.0, peer=2), failure(1, 1.2, peer=2)]
    found = add_leavers(victims, [left, needless])
    assert [end.rank for end in found] == [0, 1, 2]  # nobody names rank 3: it was done
    first = choose_first(found)
    assert (first.rank, first.ending) == (2, "exited with code 0 while other ranks still needed it")
    assert first.exit_code == 1
    assert add_leavers(found, [left, needless]) == found
    crashed = [*found, failure(4, 0.9)]
    assert choose_first(crashed).rank == 4  # which was earlier


def test_a_signal_after_the_exception_does_not_change_the_exit_code() -> None:
    overtaken = failure(0, 1.0, peer=1, code=-15)
    assert overtaken.exit_code == 1
    assert overtaken.ending == "was killed by SIGTERM while it ended with an exception"
    assert failure(0, 1.0, code=-15).exit_code == 143


def test_the_summary_quotes_the_evidence() -> None:
    text = describe([failure(0, 2.0, peer=1), failure(1, 3.0, tail="oh\nno\n", code=3)])
    assert text.splitlines() == [
        "rank 1 failed first: exited with code 3",
        "  on left (local rank 0, pid 9)",
        "  end of its stderr:",
        "    oh",
        "    no",
        "  then rank 0 on left: PeerLost: rank 1 is gone",
    ]


def test_ranks_that_failed_alike_share_a_line() -> None:
    ends = [failure(rank, 3.0, peer=1) for rank in (0, 2, 3, 4)]
    lines = describe([failure(1, 1.0, code=3), *ends]).splitlines()
    assert lines[2:] == ["  then ranks 0, 2-4 on left (2.0 s later): PeerLost: rank 1 is gone"]
    alike = describe([failure(rank, 0.0) for rank in range(1000)]).splitlines()
    assert alike[2:] == ["  then ranks 1-999 on left: the same"]


def test_who_fails_after_all_were_asked_to_end_is_never_first() -> None:
    late = failure(0, 0.5, code=5)
    first = replace(failure(1, 1.0, code=3), stderr_file="logs/1")
    lines = describe([first], [late]).splitlines()
    assert lines[0].startswith("rank 1 failed first")
    assert lines[2:] == ["  then rank 0 on left: exited with code 5", "  more: logs/1 (on left)"]


def test_many_failures_are_counted_not_listed() -> None:
    text = describe([failure(rank, float(rank), code=rank + 1) for rank in range(20)])
    assert text.count("then rank") == 8
    assert "then 11 more ranks" in text


def test_ends_read_and_exit_as_in_a_shell() -> None:
    assert [exit_code_of(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]
    assert describe_ending(-11) == "was killed by SIGSEGV"
    assert describe_ending(-40) == f"was killed by SIGRTMIN+{40 - signal.SIGRTMIN}"
    assert describe_ending(-signal.SIGRTMIN) == "was killed by SIGRTMIN"
    assert describe_ending(-33) == "was killed by signal 33"


def test_a_crash_is_named_with_its_place_once() -> None:
    crash = "Fatal Python error: Segmentation fault, in add at /job.py:12"
    end = replace(failure(1, 1.0, code=-11), stderr_tail=f"at work\n{crash}")
    assert end.ending == f"was killed by SIGSEGV ({crash})"
    text = describe([end])
    assert text.count(crash) == 1
    assert "    at work" in text
    assert replace(end, returncode=3).ending == "exited with code 3"
