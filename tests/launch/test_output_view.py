"""The output of ranks of all hosts, for the page: followed while somebody looks, bounded."""

from __future__ import annotations

from collections.abc import Iterable

from asyncpar.dashboard.log_tail import MOST_LINES, LogTail
from asyncpar.launch.output_view import MOST_FOLLOWED, OutputFollower, read_output
from asyncpar.launch.rank_output import TAIL_BYTES, RecentOutput
from asyncpar.observe.summary import HostSummary, JobSummary, RankAnswer, RankReport


class Printing:
    """A job whose ranks print what the test says."""

    def __init__(self, size: int) -> None:
        self.printed = {rank: RecentOutput() for rank in range(size)}
        self.pids = dict.fromkeys(range(size), 1000)
        self.silent: set[int] = set()
        self.asked: list[list[int]] = []

    async def status(self) -> JobSummary:
        reports = tuple(RankReport(rank=rank, host="h", pid=1) for rank in self.printed)
        return JobSummary(job="j", pid=1, time=0.0, hosts=(HostSummary(host="h", ranks=reports),))

    async def collect(self, kind: str, ranks: Iterable[int] | None) -> list[RankAnswer]:
        assert ranks is not None
        self.asked.append(list(ranks))
        return [self._answer(kind, rank) for rank in self.asked[-1] if rank in self.printed]

    def _answer(self, kind: str, rank: int) -> RankAnswer:
        if rank in self.silent:
            return RankAnswer(rank=rank, host="h", error="its agent does not answer")
        output = self.printed[rank]
        content = output.tail(self.pids[rank]) if kind == "tail" else output.read()
        return RankAnswer(rank=rank, host=f"h{rank}", content=content, error="" if content else "there is none")


class Followed:
    """A follower of a job of which the ranks below ``own`` are on the host of the page."""

    def __init__(self, size: int, own: int = 1) -> None:
        self.job = Printing(size)
        self.tail = LogTail()
        reports = [RankReport(rank=rank, host="a", pid=1) for rank in range(own)]
        self._follower = OutputFollower(self.job, self.tail, lambda: reports)

    async def look(self) -> list[tuple[int, str]]:
        """Look once; return what is new in the tail."""
        last = self.tail.after(0)
        await self._follower.look(await self.job.status())
        return [(line["rank"], line["text"]) for line in self.tail.after(last[-1]["n"] if last else 0)]


async def test_lines_of_other_hosts_come_once_and_whole() -> None:
    followed = Followed(3)
    printed = followed.job.printed
    printed[0].write(b"its own host has it\n")
    printed[1].write(b"one\ntw")
    printed[2].write(b"other\n")
    assert await followed.look() == [(1, "one"), (2, "other")]
    assert followed.job.asked == [[1, 2]]
    printed[1].write(b"o\nthree\n")
    assert await followed.look() == [(1, "two"), (1, "three")]
    assert await followed.look() == []


async def test_what_was_printed_faster_than_it_is_kept_is_marked() -> None:
    followed = Followed(2)
    followed.job.printed[1].write(b"begin")
    await followed.look()
    followed.job.printed[1].write(b"".join(b"%07d\n" % number for number in range(2000)))
    lines = await followed.look()
    assert lines[0] == (1, "begin ...")
    numbers = [int(text) for _, text in lines[1:]]
    assert numbers == list(range(numbers[0], 2000))
    assert TAIL_BYTES // 8 - 1 <= len(numbers) <= TAIL_BYTES // 8


async def test_a_process_that_is_started_again_is_followed_from_its_begin() -> None:
    followed = Followed(2)
    followed.job.printed[1].write(b"x" * 100 + b"\n")
    await followed.look()
    followed.job.printed[1] = RecentOutput()
    followed.job.pids[1] += 1
    followed.job.printed[1].write(b"again\n" * 30)
    assert await followed.look() == [(1, "again")] * 30


async def test_at_first_each_rank_has_a_part_of_the_lines() -> None:
    followed = Followed(51)
    for output in followed.job.printed.values():
        output.write(b"".join(b"line %d\n" % number for number in range(300)))
    lines = await followed.look()
    assert {sum(rank == one for one, _ in lines) for rank in range(1, 51)} == {MOST_LINES // 2 // 50}
    assert lines[-1] == (50, "line 299")


async def test_ten_thousand_ranks_are_followed_in_part() -> None:
    followed = Followed(10_000, own=8)
    await followed.look()
    assert len(followed.job.asked[0]) == MOST_FOLLOWED
    alone = Followed(8, own=8)
    await alone.look()
    assert alone.job.asked == []


async def test_the_last_lines_of_some_ranks_are_read_wherever_they_run() -> None:
    job = Printing(4)
    job.printed[1].write(b"one\n10%\r20%\n\xff\n")
    job.printed[3].write(b"three")
    job.silent.add(2)
    lines = await read_output(job, [0, 1, 2, 3, 9])
    assert [(line["rank"], line["text"]) for line in lines] == [
        (0, "(nothing was printed)"),
        (1, "one"),
        (1, "20%"),
        (1, "\ufffd"),
        (2, "(its agent does not answer)"),
        (3, "three"),
        (9, "(the job has no such rank)"),
    ]
    assert [line["error"] for line in lines] == [True, False, False, False, True, False, True]


async def test_long_output_is_cut() -> None:
    job = Printing(2)
    for output in job.printed.values():
        output.write(b"x" * 5000 + b"\n" + b"y\n" * 20_000)
    assert len(await read_output(job, [0, 1])) == MOST_LINES
