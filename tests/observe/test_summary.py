"""Summaries go to msgpack and JSON and back, and stay small."""

from __future__ import annotations

import msgspec
import pytest

from asyncpar.observe.summary import (
    MOST_LINKS,
    MOST_OPERATIONS,
    BlockedSummary,
    HostSummary,
    JobSummary,
    LinkSummary,
    MailboxSummary,
    OperationSummary,
    ProgressSummary,
    RankReport,
    RankSummary,
    from_json,
    pack,
    to_json,
    unpack,
)


def full_summary() -> RankSummary:
    operation = OperationSummary(
        label="all_reduce #7",
        kind="all_reduce",
        group="world",
        sequence=7,
        text="all_reduce(float32[1024], sum)",
        waits_for=(2, 3),
        culprit=2,
        seconds=12.5,
        site="train.py:57",
    )
    return RankSummary(
        rank=1,
        pid=4711,
        time=1.5,
        host="host-b",
        world_size=4,
        phase="member",
        blocked=BlockedSummary(what="task 'main'", where="train.py:60", seconds=1.0),
        operations_done={"arena": 3, "messages": 4},
        bytes_moved={"arena": 3 << 20},
        operations=(operation,) * MOST_OPERATIONS,
        user_site="train.py:57",
        progress=ProgressSummary(description="train", completed=3, total=10),
        values={"loss": 2.5},
        mailboxes=(MailboxSummary(actor="counter", waiting=3),),
        links=tuple(LinkSummary(peer=peer, lane="tcp", bytes=1 << 30, rtt=1e-4) for peer in range(8)),
    )


def test_summaries_survive_msgpack_and_json() -> None:
    report = RankReport(rank=1, host="host-b", pid=4711, condition="stopped", seconds=3.0, summary=full_summary())
    job = JobSummary(job="train", pid=1, time=2.0, hosts=(HostSummary(host="host-b", ranks=(report,)),))
    assert unpack(pack(job), JobSummary) == job
    assert from_json(to_json(job), JobSummary) == job


def test_a_summary_is_small() -> None:
    one = msgspec.structs.replace(full_summary(), operations=full_summary().operations[:3])
    assert len(pack(one)) < 2048
    most = msgspec.structs.replace(
        full_summary(),
        links=tuple(LinkSummary(peer=peer, lane="tcp", bytes=1 << 40, rtt=1e-4) for peer in range(MOST_LINKS)),
    )
    assert len(pack(most)) < 10_000


def test_ranks_of_a_job_come_in_order() -> None:
    hosts = (
        HostSummary(host="b", ranks=(RankReport(rank=3, host="b", pid=4), RankReport(rank=2, host="b", pid=3))),
        HostSummary(host="a", ranks=(RankReport(rank=0, host="a", pid=1), RankReport(rank=1, host="a", pid=2))),
    )
    assert [report.rank for report in JobSummary(job="x", pid=1, time=0.0, hosts=hosts).ranks] == [0, 1, 2, 3]


def test_torn_content_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        unpack(pack(full_summary())[:-3], RankSummary)
