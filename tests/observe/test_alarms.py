"""Alarms of a job come from the rounds and links that ranks tell of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec
import pytest

from asyncpar.launch.commands.job_text import show_job
from asyncpar.launch.job_view import JobOutcome
from asyncpar.launch.observers import Observers
from asyncpar.observe.alarms import AlarmBoard, count_missing_rounds, find_alarms
from asyncpar.observe.stragglers import REPORTED_ROUNDS
from asyncpar.observe.summary import (
    HostSummary,
    JobSummary,
    LinkSummary,
    MemorySummary,
    RankAnswer,
    RankReport,
    RankSummary,
    RoundSummary,
    pack,
)


def rank(number: int, *, own: int = 40_000, cause: str = "compute", links: tuple[LinkSummary, ...] = ()) -> RankSummary:
    parts = {"compute": 40_000}
    if own > 40_000:
        parts[cause] = parts.get(cause, 0) + own - 40_000
    rounds = tuple(RoundSummary(n, own, 60_000, parts) for n in range(REPORTED_ROUNDS))
    return RankSummary(rank=number, pid=1, time=0.0, host=f"host-{number}", rounds=rounds, links=links)


def job(*ranks: RankSummary | None) -> JobSummary:
    reports = tuple(RankReport(rank=n, host="h", pid=1, summary=one) for n, one in enumerate(ranks))
    return JobSummary(job="j", pid=1, time=0.0, hosts=(HostSummary(host="h", ranks=reports),))


def test_a_slow_rank_and_a_slow_link_are_reported() -> None:
    assert find_alarms(job(rank(0), rank(1), rank(2))) == ()
    (alarm,) = find_alarms(job(rank(0), rank(1, own=60_000, cause="input"), rank(2)))
    assert alarm.startswith("rank 1 on host-1 is slow: each of its rounds takes 20.0 ms (33%) more")
    assert alarm.endswith("because of its input")
    links = (LinkSummary(peer=1, rtt=0.02), LinkSummary(peer=2, rtt=0.0001))
    (alarm,) = find_alarms(job(rank(0, links=links), rank(1, links=(LinkSummary(peer=2, rtt=0.0002),)), rank(2)))
    assert "link between ranks 0 and 1" in alarm


def test_ranks_that_report_nothing_or_causes_of_other_versions_disturb_nothing() -> None:
    assert find_alarms(job(rank(0), None, rank(2, own=60_000, cause="magic"))) != ()
    assert find_alarms(job(None, None)) == ()
    assert find_alarms(job()) == ()


def test_too_few_rounds_are_counted_and_reported() -> None:
    few = [msgspec.structs.replace(rank(n), rounds=rank(n).rounds[:12]) for n in range(2)]
    assert count_missing_rounds(job(*few)) == 3
    assert "who is slow is not known yet (steps still to be seen: 3)" in show_job(job(*few))
    assert count_missing_rounds(job(rank(0), rank(1))) == 0
    assert "not known yet" not in show_job(job(rank(0), rank(1)))
    assert count_missing_rounds(job(rank(0), None)) == count_missing_rounds(job(few[0])) == 0


def test_rounds_fit_into_a_summary() -> None:
    assert len(pack(rank(0, own=60_000, cause="garbage collection"))) < 1700


SLOW = "rank 2 on h is slow: each of its rounds takes {ms:.1f} ms more, because of its input"


def test_an_alarm_is_reported_once_when_it_has_stayed_and_once_more_when_it_is_over() -> None:
    board, reported = AlarmBoard(), []
    for second in range(60):
        alarms = [SLOW.format(ms=20 + second)] if 10 <= second < 30 and second != 20 else []
        reported += [(second, line) for line in board.add(alarms, float(second))]
    assert reported == [(12, SLOW.format(ms=32)), (44, "rank 2 on h is slow no more")]


def test_an_alarm_that_comes_and_goes_is_not_reported() -> None:
    board = AlarmBoard()
    assert not any(board.add([SLOW.format(ms=1)] if second % 3 else [], float(second)) for second in range(100))


def test_alarms_of_different_ranks_are_reported_each() -> None:
    board = AlarmBoard()
    link = "the link between ranks 0 and 1 is slow: a round trip takes 9.0 ms"
    reported = [line for second in range(5) for line in board.add([SLOW.format(ms=second), link], float(second))]
    assert reported == [SLOW.format(ms=2), link]


def test_an_agent_that_does_not_answer_is_reported_once_and_not_when_it_is_no_more() -> None:
    board, reported = AlarmBoard(), []
    alarm = "the agent of rank 1 on two (10.0.0.2:1) does not answer; look on that host"
    for second in range(40):
        reported += board.add([alarm] if second < 10 else [], float(second))
    assert reported == [alarm]


class Watch:
    """A job that is always the same."""

    def __init__(self, job: JobSummary) -> None:
        self._job = job

    async def status(self) -> JobSummary:
        return self._job

    async def collect(self, kind: str, ranks: Iterable[int] | None) -> list[RankAnswer]:
        raise NotImplementedError


@pytest.mark.parametrize("failure", [RuntimeError("torn"), asyncio.CancelledError()])
async def test_an_inspection_that_fails_is_reported_once_and_the_next_ones_are_made(
    failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncpar.launch.observers.LOOK_SECONDS", 0.001)
    inspections, reported = [], list[str]()

    class Torn(Watch):
        async def status(self) -> JobSummary:
            inspections.append(failure)
            if len(inspections) in (2, 3):
                raise failure
            return await super().status()

    running = asyncio.ensure_future(Observers(Torn(job(rank(0))), reported.append, None).run())
    while len(inspections) < 6:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    assert reported == [f"the job could not be inspected: {type(failure).__name__}: {failure}"]


async def test_a_last_inspection_that_fails_does_not_end_the_launcher() -> None:
    class Torn(Watch):
        async def status(self) -> JobSummary:
            raise RuntimeError("torn")

    reported: list[str] = []
    await Observers(Torn(job(rank(0))), reported.append, None).finish(JobOutcome(0, ""))
    assert reported == ["the job could not be inspected: RuntimeError: torn"]


async def test_the_launcher_reports_alarms() -> None:
    slow = job(rank(0), rank(1, own=60_000, cause="input"), rank(2))
    slow = msgspec.structs.replace(slow, alarms=find_alarms(slow))
    reported: list[str] = []
    observers = Observers(Watch(slow), reported.append, None)
    for _ in range(5):
        await observers.look()
    assert len(reported) == 1
    assert reported[0].startswith("rank 1 on host-1 is slow: ")


def test_a_rank_with_a_slow_link_is_an_alarm_once() -> None:
    def sender(number: int, rate: float) -> RankSummary:
        busy = LinkSummary(peer=(number + 1) % 4, bytes=20_000_000, rate=rate, is_full=True, share=0.5)
        return rank(number, links=(LinkSummary(peer=(number + 3) % 4, bytes=10_000, rate=18e6), busy))

    (alarm,) = find_alarms(job(*(sender(number, 2e6 if number == 2 else 90e6) for number in range(4))))
    assert alarm.startswith("rank 2")
    assert "is slow: its link takes 2 MB/s" in alarm
    assert find_alarms(job(*(sender(number, 90e6) for number in range(4)))) == ()


@pytest.mark.parametrize(
    ("used", "growth", "text"),
    [
        (
            7.7,
            0.0,
            "host-1 is short of memory: 7.7 GiB of the 8 GiB of its control group are used, most by rank 1 (3 GiB)",
        ),
        (
            7.0,
            0.1,
            "host-1 is short of memory: 7 GiB of the 8 GiB of its control group are used, most by rank 1 (3 GiB)",
        ),
        (7.0, 0.01, ""),
        (5.0, 1.0, ""),
    ],
)
def test_a_host_that_is_short_of_memory_is_an_alarm_before_the_kernel_kills(
    used: float, growth: float, text: str
) -> None:
    gib = 1 << 30
    ranks = [msgspec.structs.replace(rank(number), rss=(1 + 2 * number) * gib) for number in range(2)]
    memory = MemorySummary(used=round(used * gib), limit=8 * gib, is_group=True, growth=growth * gib)
    reports = tuple(RankReport(rank=one.rank, host="host-1", pid=1, summary=one) for one in ranks)
    found = find_alarms(
        JobSummary(job="j", pid=1, time=0.0, hosts=(HostSummary(host="host-1", ranks=reports, memory=memory),))
    )
    assert [alarm.partition(";")[0] for alarm in found] == ([text] if text else [])
    assert all(("; at this rate the rest lasts 10 s" in alarm) is (growth > 0) for alarm in found)
    board = AlarmBoard()
    reported = [line for second in range(30) for line in board.add(found if second < 5 else (), float(second))]
    assert reported == ([*found, "host-1 has memory again"] if text else [])
