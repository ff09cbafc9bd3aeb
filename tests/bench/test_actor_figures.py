"""Figures of actor libraries: medians, ratios, tables and verdicts."""

from __future__ import annotations

from scripts.bench.compare.actor_figures import Figures, figure_table, judge, soak_table, verdict_table


def figures() -> Figures:
    """Ours and xoscar's figures: asks of 50 and 250 us, and so on."""
    made = Figures()
    for seconds in (40e-6, 50e-6, 900e-6):
        made.add("asyncpar", {"figure": "ask", "seconds": seconds, "p99": 2 * seconds, "wrong": 0})
    made.add("xoscar", {"figure": "ask", "seconds": 250e-6, "p99": 300e-6, "wrong": 0})
    return made


def soak(*resident: tuple[int, int]) -> Figures:
    made = Figures()
    for place, (caller, callee) in enumerate(resident, 1):
        record = {"figure": "soak", "asks": 1000 * place, "caller": caller, "callee": callee, "wrong": 0}
        made.add("asyncpar", record)
    return made


def test_ratios_are_those_of_the_medians() -> None:
    assert figures().median("ask", "asyncpar", "seconds") == 50e-6
    assert figures().ratio("ask", "xoscar") == 5.0
    assert figures().ratio("ask", "ray") is None
    assert figures().ratio("local", "xoscar") is None


def test_the_table_has_a_column_for_each_side_and_a_ratio_for_each_peer() -> None:
    made = figures()
    made.add("asyncpar", {"figure": "concurrent", "seconds": 20e-6, "wrong": 0})
    made.add("asyncpar", {"figure": "array 64000000", "seconds": 0.016, "size": 64_000_000, "wrong": 0})
    made.add("asyncpar", {"figure": "idle", "bytes": 30e6, "actors": 10_000, "wrong": 0})
    table = "\n".join(figure_table(made))
    assert "asyncpar against xoscar" in table
    assert "Ray" not in table
    for shown in ("50.0 us", "250.0 us", "5.00x", "50,000 /s", "4.00 GB/s", "30.0 MB", "64 MB array", "ask, 99 %"):
        assert shown in table


def test_targets_are_judged_where_there_are_figures() -> None:
    made = figures()
    made.add("asyncpar", {"figure": "local", "seconds": 31e-6, "p99": 1.0, "wrong": 0})
    made.add("asyncpar", {"figure": "idle", "bytes": 14e6, "actors": 10_000, "wrong": 0})
    verdicts = judge(made)
    assert [(one.what, one.is_reached) for one in verdicts] == [
        ("ask, against xoscar", True),
        ("ask in the process", False),
        ("10,000 idle actors", True),
    ]
    assert "short" in "\n".join(verdict_table(verdicts))


def test_many_asks_are_judged_by_a_hundred_and_first_messages_by_later_ones() -> None:
    made = Figures()
    made.add("asyncpar", {"figure": "concurrent", "seconds": 14e-6, "wrong": 0})
    made.add("asyncpar", {"figure": "concurrent 1000", "seconds": 31e-6, "wrong": 0})
    first = {"figure": "first", "seconds": 0.02, "later": 0.005, "size": 64_000_000, "wrong": 0}
    made.add("asyncpar", first)
    assert [(one.what, one.reached, one.is_reached) for one in judge(made)] == [
        ("an ask of 1,000 under way, against one of 100", "0.45x", False),
        ("first 64 MB messages of a pair, against later ones", "0.25x", False),
    ]
    table = "\n".join(figure_table(made))
    for shown in ("asks, 1,000 under way", "32,258 /s", "slowest of the first messages of a pair", "3.20 GB/s"):
        assert shown in table
    made.add("asyncpar", first | {"seconds": 0.001})
    made.add("asyncpar", {"figure": "concurrent 1000", "seconds": 1e-6, "wrong": 0})
    made.add("asyncpar", {"figure": "concurrent 1000", "seconds": 1e-6, "wrong": 0})
    assert [one.is_reached for one in judge(made)] == [True, False]


def test_another_number_of_idle_actors_is_no_verdict() -> None:
    made = Figures()
    made.add("asyncpar", {"figure": "idle", "bytes": 30e6, "actors": 100, "wrong": 0})
    assert judge(made) == []
    assert "growth by 100 idle actors" in "\n".join(figure_table(made))


def test_memory_is_flat_if_neither_side_grows() -> None:
    flat = soak((100_000_000, 90_000_000), (100_500_000, 90_000_000), (100_400_000, 90_100_000))
    assert [one.is_reached for one in judge(flat)] == [True]
    growing = soak((100_000_000, 90_000_000), (100_000_000, 95_000_000), (100_000_000, 99_000_000))
    assert [one.is_reached for one in judge(growing)] == [False]
    assert "3,000" in "\n".join(soak_table(flat))
    assert figure_table(flat) == []
    assert "99.0 MB" in "\n".join(soak_table(growing))


def test_wrong_answers_of_any_side_are_counted() -> None:
    made = figures()
    made.add("xoscar", {"figure": "ask", "seconds": 1.0, "p99": 1.0, "wrong": 3})
    assert made.wrong == 3
