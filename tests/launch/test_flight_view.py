"""Views of recorded events for the dashboard: findings, and the last events of all ranks, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.launch.page_views import MOST_EVENTS, view_flight
from asyncpar.observe.summary import HostSummary, JobSummary, RankAnswer, RankReport, RankSummary, pack


class RecordedJob:
    """A job of which ranks answer with the images that are given, or an error."""

    def __init__(
        self,
        images: Mapping[int, bytes | str],
        conditions: Mapping[int, str],
        before: Mapping[int, str] | None = None,
        now: Mapping[int, str] | None = None,
    ) -> None:
        """``before`` is what ranks do by the status of the job, ``now`` what they answer."""
        self._images, self._conditions = images, conditions
        self._reported = {
            rank: RankSummary(rank=rank, pid=1, time=0.0, doing=doing) for rank, doing in (before or {}).items()
        }
        self._summaries = [
            RankAnswer(rank=rank, host="a", content=pack(RankSummary(rank=rank, pid=1, time=1.0, doing=doing)))
            for rank, doing in (now or {}).items()
        ]

    async def status(self) -> JobSummary:
        reports = tuple(
            RankReport(rank=rank, host="a", pid=1, condition=how, summary=self._reported.get(rank), age=0.9)
            for rank, how in self._conditions.items()
        )
        return JobSummary(job="job", pid=1, time=0.0, hosts=(HostSummary(host="a", ranks=reports),))

    async def collect(self, kind: str, ranks: Iterable[int] | None) -> list[RankAnswer]:
        assert ranks is None
        if kind == "summary":
            return self._summaries
        return [
            RankAnswer(rank=rank, host="a", error=image)
            if isinstance(image, str)
            else RankAnswer(rank=rank, host="a", content=image)
            for rank, image in self._images.items()
        ]


async def recorded(size: int, rounds: int) -> dict[int, bytes]:
    """Return the rings of a world in which the last rank does not call the last operation."""
    async with ap.testing.local_world(size) as nodes:
        for _ in range(rounds):
            await asyncio.gather(*(node.world.all_reduce(np.ones(3)) for node in nodes))
        waiting = [asyncio.ensure_future(node.world.all_reduce(np.ones(3))) for node in nodes[:-1]]
        await asyncio.sleep(0.1)
        images = {node.rank: node.links.recorder.snapshot() for node in nodes}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return images


@pytest.mark.parametrize(("size", "rounds"), [(3, 2), (16, 40)])
def test_it_names_who_is_absent_and_shows_the_last_events(size: int, rounds: int) -> None:
    async def main() -> dict[str, Any]:
        images = await recorded(size, rounds)
        return await view_flight(RecordedJob(images, dict.fromkeys(images, "well")))

    answer = ap.testing.run_virtual(main())
    assert [one["ranks"] for one in answer["findings"]] == [[size - 1]]
    assert f"rank {size - 1}" in answer["findings"][0]["text"]
    assert answer["ranks"] == size
    assert len(answer["events"]) <= MOST_EVENTS
    started = [event for event in answer["events"] if event["state"] == "started" and event["name"] == "all_reduce"]
    assert sorted(event["rank"] for event in started) == list(range(size - 1))


def test_ranks_that_do_not_answer_or_answer_nonsense_are_named() -> None:
    async def main() -> dict[str, Any]:
        images: dict[int, bytes | str] = {**await recorded(3, 1)}
        images[1], images[2] = b"no ring", "it is stopped (SIGSTOP, or a debugger)"
        return await view_flight(RecordedJob(images, {0: "well", 1: "well", 2: "stopped"}))

    answer = ap.testing.run_virtual(main())
    assert answer["ranks"] == 1
    assert [problem.split(":")[0] for problem in answer["problems"]] == ["rank 1", "rank 2"]
    assert "stopped" in answer["problems"][1]


@pytest.mark.parametrize(
    ("before", "now", "cause"),
    [
        ("waits at job.py:21", "sleeps at job.py:24", "sleeping"),
        ("sleeps at job.py:24", "is in user code at job.py:30", "absent"),
        ("sleeps at job.py:24", None, "sleeping"),  # it does not answer: what it told last counts
    ],
)
def test_what_ranks_do_is_of_the_moment_of_their_events(before: str, now: str | None, cause: str) -> None:
    async def main() -> dict[str, Any]:
        images = await recorded(2, 1)
        answers = {} if now is None else {1: now}
        return await view_flight(RecordedJob(images, dict.fromkeys(images, "well"), {1: before}, answers))

    (finding,) = ap.testing.run_virtual(main())["findings"]
    assert finding["cause"] == cause
    assert (now or before) in finding["text"]
