"""History stays small and keeps what matters."""

from __future__ import annotations

import msgspec
import pytest

from asyncpar.dashboard.history import History
from asyncpar.dashboard.states import RankActivity
from asyncpar.observe.summary import HostSummary, JobSummary, MemorySummary, ProgressSummary, RankReport, RankSummary


def at(time: float, *, completed: float = 0.0, values: dict[str, float] | None = None) -> JobSummary:
    progress = ProgressSummary(description="steps", completed=completed)
    summary = RankSummary(rank=0, pid=1, time=time, progress=progress, values=values or {})
    ranks = (RankReport(rank=0, host="a", pid=1, summary=summary),)
    return JobSummary(job="j", pid=1, time=time, hosts=(HostSummary(host="a", ranks=ranks),))


def test_a_full_strip_is_thinned_out_and_shows_the_whole_job() -> None:
    history = History(columns=8)

    for second in range(100):
        history.take(at(float(second)), {0: RankActivity.FAILED if second == 3 else RankActivity.COMPUTES})

    assert len(history.columns) < 8
    assert len(history.columns) == len(history.times) == len(history.series["steps/s"].points)
    assert history.columns[0] == bytes([RankActivity.FAILED])  # the worst of the time that a column stands for


def test_ten_thousand_ranks_take_no_more_room_than_rows_allow() -> None:
    history = History(columns=4, rows=16)
    states = dict.fromkeys(range(10_000), RankActivity.COMPUTES) | {9_999: RankActivity.HOLDS_UP}

    for second in range(3):
        history.take(at(float(second)), states)

    assert all(len(column) <= 16 for column in history.columns)
    assert history.columns[0][9_999 // history.ranks_per_row] == RankActivity.HOLDS_UP


def test_a_world_that_grows_keeps_what_was_shown() -> None:
    history = History(columns=8, rows=2)
    history.take(at(0.0), {0: RankActivity.WAITS, 1: RankActivity.COMPUTES})

    history.take(at(1.0), dict.fromkeys(range(4), RankActivity.COMPUTES))

    assert history.columns[0] == bytes([RankActivity.WAITS])
    assert history.columns[1] == bytes([RankActivity.COMPUTES] * 2)


def test_a_rank_that_is_missing_below_others_leaves_its_row_empty() -> None:
    history = History(columns=8)

    history.take(at(0.0), {1: RankActivity.COMPUTES, 3: RankActivity.WAITS})

    assert history.columns == [bytes([0, RankActivity.COMPUTES, 0, RankActivity.WAITS])]


def test_speed_is_steps_over_the_ranks_own_time() -> None:
    history = History()
    for second in range(3):
        history.take(at(2.0 * second, completed=10.0 * second), {0: RankActivity.COMPUTES})

    assert history.series["steps/s"].points == [None, 5.0, 5.0]


def test_a_step_count_that_starts_again_is_no_negative_speed() -> None:
    history = History()
    for time, completed in ((0.0, 50.0), (1.0, 0.0), (2.0, 4.0)):
        history.take(at(time, completed=completed), {0: RankActivity.COMPUTES})

    assert history.series["steps/s"].points == [None, None, 4.0]


def test_values_that_come_later_begin_later_and_are_bounded_in_number() -> None:
    history = History()
    history.take(at(0.0), {0: RankActivity.COMPUTES})

    history.take(at(1.0, values={f"v{number}": float(number) for number in range(99)}), {0: RankActivity.COMPUTES})
    history.take(at(2.0, values={"v0": float("nan")}), {0: RankActivity.COMPUTES})

    assert history.series["v0"].points == [None, 0.0, None]
    assert len(history.series) == 24


def test_memory_has_a_line_that_of_the_fullest_host() -> None:
    history = History()
    for second, used in enumerate((100, 100, 700)):
        hosts = tuple(
            HostSummary(host=name, memory=MemorySummary(used=bytes_used, limit=1000))
            for name, bytes_used in (("a", used), ("b", 200))
        )
        history.take(msgspec.structs.replace(at(float(second)), hosts=hosts), {0: RankActivity.COMPUTES})
    assert history.series["memory %"].points == [20.0, 20.0, 70.0]


def test_a_number_of_columns_that_cannot_be_halved_is_refused() -> None:
    with pytest.raises(ValueError, match="even number"):
        History(columns=7)
