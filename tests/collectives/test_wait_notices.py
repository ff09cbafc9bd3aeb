"""An operation that waits for long is reported once, with the culprit and its place; a deadlock with its cycle."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

from asyncpar import Quorum
from asyncpar.collectives.long_waits import LongWaits
from asyncpar.collectives.operation import Operation
from asyncpar.core.observe.rank_observer import MOST_REPORTED
from asyncpar.errors import PeerTimeout
from asyncpar.testing import run_virtual
from tests.collective_engines import engine_of
from tests.collectives.conftest import OpenRanks


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "asyncpar.runtime"]


def test_a_late_rank_is_reported_once_per_operation_and_when_it_goes_on(
    open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            zero, one, two = ranks.communicators
            engine_of(two).table.links.observer.find_program = lambda: "is in user code at train.py:57"
            waiting = [asyncio.ensure_future(each.all_reduce(np.zeros(1), key="k")) for each in (zero, one)]
            await asyncio.sleep(60.0)
            await two.all_reduce(np.zeros(1), key="k")
            await asyncio.gather(*waiting)

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    waits = [text for text in logged(caplog) if "has waited" in text]
    assert sorted(text.partition(":")[0] for text in waits) == ["rank 0", "rank 1"]
    for text in waits:
        assert "has waited 10 s for rank 2 (localhost), which is in user code at train.py:57" in text
        assert "test_wait_notices.py:" in text
    assert sum(text.endswith("goes on") for text in logged(caplog)) == 2


def test_waiting_is_reported_after_the_time_that_was_set_or_never(
    open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(seconds: float | None) -> None:
        async with open_ranks(2) as ranks:
            zero, one = ranks.communicators
            engine_of(zero).table.links.observer.warn_after = seconds
            waiting = asyncio.ensure_future(zero.recv(1))
            await asyncio.sleep(3.0)
            await one.send(np.zeros(1), 0)
            await waiting

    with caplog.at_level(logging.WARNING):
        run_virtual(main(None))
        assert logged(caplog) == []
        run_virtual(main(0.5))
    assert "has waited 0.5 s for rank 1 (localhost)" in logged(caplog)[0]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_timeout_names_the_cycle_of_a_deadlock(open_ranks: OpenRanks, size: int) -> None:
    async def main() -> list[BaseException]:
        async with open_ranks(size, timeout=30.0) as ranks:
            receives = [each.recv((each.rank + 1) % size) for each in ranks.communicators]
            return await asyncio.gather(*receives, return_exceptions=True)  # type: ignore[return-value]

    timeouts = [error for error in run_virtual(main()) if isinstance(error, PeerTimeout)]
    assert timeouts
    for error in timeouts:
        assert "deadlock" in str(error)
        assert "rank 0 waits for rank 1 in recv from rank 1" in str(error)
        assert "test_wait_notices.py:" in str(error)


def test_ranks_of_one_operation_that_wait_for_an_absent_one_are_no_deadlock(open_ranks: OpenRanks) -> None:
    async def main() -> list[BaseException]:
        async with open_ranks(8, timeout=30.0) as ranks:
            calls = [each.all_reduce(np.zeros(64), algorithm="ring") for each in ranks.communicators[:-1]]
            return await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[return-value]

    errors = run_virtual(main())
    assert all("deadlock" not in str(error) for error in errors)


def test_a_thousand_waits_are_looked_at_with_rests_and_reported_in_few_words(
    open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking at each of them once a second took all the time there was, on a machine with other work."""
    count, looks = 1000, [0]
    look = LongWaits._record_wait  # noqa: SLF001  # nothing shows how often it is looked
    culprit = "rank 1 (localhost)"

    def counted(waits: LongWaits, operation: Operation) -> None:
        looks[0] += 1
        look(waits, operation)

    monkeypatch.setattr(LongWaits, "_record_wait", counted)

    async def main() -> None:
        async with open_ranks(2) as ranks:
            zero, one = ranks.communicators
            waiting = [asyncio.ensure_future(zero.all_reduce(np.zeros(1), key=str(key))) for key in range(count)]
            await asyncio.sleep(60.0)
            await asyncio.gather(*(one.all_reduce(np.zeros(1), key=str(key)) for key in range(count)), *waiting)

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    assert 0 < looks[0] <= 33 * count  # every two seconds
    waits = [text for text in logged(caplog) if "has waited" in text]
    assert len(waits) == MOST_REPORTED
    assert all(culprit in text for text in waits)
    assert sum(text.endswith("goes on") for text in logged(caplog)) == MOST_REPORTED


def test_a_sum_under_a_policy_says_for_whom_it_waits(open_ranks: OpenRanks, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with open_ranks(3) as ranks:
            zero, one, two = ranks.communicators
            for each in (zero, one):
                engine_of(each).table.links.observer.warn_after = 2.0
            engine_of(one).table.links.observer.record_condition(2, "is stopped")
            waiting = [asyncio.ensure_future(each.all_reduce(np.zeros(1), until=Quorum(1.0))) for each in (zero, one)]
            await asyncio.sleep(5.0)
            await two.all_reduce(np.zeros(1), until=Quorum(1.0))
            await asyncio.gather(*waiting)

    with caplog.at_level(logging.WARNING):
        run_virtual(main())
    policy = Quorum(1.0)
    assert sorted(text for text in logged(caplog) if "has waited" in text) == [
        f"rank 0: all_reduce #1 until {policy} has waited 2.0 s for rank 2 (localhost), which has not called it",
        f"rank 1: all_reduce #1 until {policy} has waited 2.0 s for rank 2 (localhost), which is stopped",
    ]
    assert sum(text.endswith("goes on") for text in logged(caplog)) == 2
