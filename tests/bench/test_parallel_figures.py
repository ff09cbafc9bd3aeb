"""Figures of scripts/bench/compare/parallel.py: medians, ratios, tables, and what is found to be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from scripts.bench.compare.parallel import show
from scripts.bench.compare.parallel_figures import (
    find_faults,
    hop_table,
    layout_table,
    peer_table,
    schedule_table,
    zero_table,
)
from scripts.bench.compare.parallel_options import parse_arguments
from scripts.bench.rounds import Figures
from tests.bench.figures import figures_of

WIDTH = 80


def cells(table: Sequence[str], title: str) -> list[str]:
    """Return what a table has in the row of that title."""
    (line,) = [line for line in table if line.startswith(f"| {title} ")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def schedule(**changes: Any) -> dict[str, Any]:
    record = {
        "what": "schedule",
        "kind": "interleaved_one_f1b",
        "chunks": 2,
        "table": (57, 48),
        "simulated": (57.0, 48.0),
        "measured": (57.0, 48.0),
        "peaks": [11, 9, 7, 5],
    }
    return record | changes


def zero(stage: str, seconds: float, **changes: Any) -> dict[str, Any]:
    record = {
        "what": "zero",
        "lane": "shm",
        "stage": stage,
        "seconds": seconds,
        "reduction": seconds / 2,
        "update": seconds / 4,
        "sent": 100_000_000,
        "held": 350_000_000,
        "wrong": 0,
    }
    return record | changes


def train(layout: str, seconds: float, *, lane: str = "shm", loss: float = 4.8, **changes: Any) -> dict[str, Any]:
    record = {
        "what": "train",
        "side": "asyncpar",
        "layout": layout,
        "lane": lane,
        "micro_batches": 8 if "pp" in layout else 1,
        "seconds": seconds,
        "losses": [5.6, loss],
        "computing": 0.7,
        "communicating": 0.2,
        "waiting": 0.1,
    }
    return record | changes


def theirs(layout: str, seconds: float, *, loss: float = 4.8) -> dict[str, Any]:
    return {"what": "train", "side": "torch", "layout": layout, "seconds": seconds, "losses": [5.6, loss]}


def test_schedules_are_shown_beside_their_table_and_simulation() -> None:
    table = schedule_table(figures_of([schedule(), schedule(kind="zbv", table=None)]))
    assert cells(table, "interleaved, 2 chunks") == ["57/48", "57/48", "57/48", "18.8%", "11 9 7 5"]
    assert cells(table, "zbv")[0] == "-"


def test_hops_are_shown_less_half_the_raw_round_trip() -> None:
    seconds = {
        "raw": 100e-6,
        "round_robin loop": 300e-6,
        "round_robin loop once": 1500e-6,
        "one_forward_one_backward loop": 250e-6,
        "round_robin thread": 500e-6,
    }
    table = hop_table(figures_of([{"what": "hops", "lane": "tcp", "size": 4000, "seconds": seconds}]))
    assert cells(table, "tcp, 4 kB, loop") == ["100", "300", "100", "250", "1,500"]
    assert cells(table, "tcp, 4 kB, thread") == ["100", "500", "200", "-", "-"]


def test_stages_are_compared_with_none_of_the_same_lane() -> None:
    table = zero_table(
        figures_of([zero("none", 0.2), zero("stage3", 0.3), zero("none", 0.1, lane="tcp"), zero("stage3", 0.3)])
    )
    assert cells(table, "shm, stage3") == ["300.0", "1.50x", "150.0", "75.0", "100.0", "350.0"]
    assert cells(table, "tcp, none")[1] == "1.00x"


def test_layouts_are_compared_with_one_process() -> None:
    table = layout_table(
        figures_of([train("alone", 0.8, lane="none"), train("dp2xpp2", 0.4), theirs("pp2", 0.1)]), 4096
    )
    assert cells(table, "dp2xpp2, shm") == ["8", "400.0", "10,240", "2.00x", "70%", "20%", "10%"]
    assert cells(table, "alone")[3] == "1.00x"
    assert not any("gloo" in line for line in table)


def test_torch_is_compared_with_the_layout_that_does_the_same() -> None:
    ours = [train("alone", 0.8, lane="none"), train("dp2-zero3", 0.5), train("dp2-zero3", 0.6, lane="tcp")]
    table = peer_table(figures_of([*ours, theirs("alone", 0.9), theirs("fsdp2", 1.0), train("tp2", 0.1)]), 4096)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    assert rows == [
        ["one process", "asyncpar", "800.0", "5,120", "1.00x", "1.12x"],
        ["one process", "torch", "900.0", "4,551", "1.00x", ""],
        ["ZeRO 3 (FSDP2)", "asyncpar shm", "500.0", "8,192", "1.60x", "2.00x"],
        ["ZeRO 3 (FSDP2)", "asyncpar tcp", "600.0", "6,827", "1.33x", "1.67x"],
        ["ZeRO 3 (FSDP2)", "torch gloo", "1,000", "4,096", "0.90x", ""],
    ]


def test_without_figures_there_are_no_tables() -> None:
    none = Figures()
    assert [schedule_table(none), hop_table(none), zero_table(none)] == [[], [], []]
    assert [layout_table(none, 1), peer_table(none, 1)] == [[], []]
    assert peer_table(figures_of([train("alone", 0.8, lane="none")]), 1) == []


def test_tables_fit_a_terminal() -> None:
    seconds = dict.fromkeys(("raw", "round_robin loop", "one_forward_one_backward loop"), 0.0123)
    every = figures_of(
        [
            schedule(),
            {"what": "hops", "lane": "shm", "size": 4_000_000, "seconds": seconds},
            zero("stage3", 12.3),
            train("dp2xpp2", 12.3),
            train("dp2-zero3", 12.3),
            theirs("fsdp2", 12.3),
            theirs("pp2", 12.3),
        ]
    )
    tables = [schedule_table(every), hop_table(every), zero_table(every)]
    for table in [*tables, layout_table(every, 4096), peer_table(every, 4096)]:
        assert table
        assert max(map(len, table)) <= WIDTH, "\n".join(table)
    lines = show(parse_arguments([]), every, "what ran where")
    assert "scripts/bench/run parallel --parts zero --rounds 3:" in lines
    assert max(map(len, lines)) <= WIDTH, max(lines, key=len)


def test_what_is_right_has_no_faults() -> None:
    records = [schedule(), zero("none", 0.1), train("alone", 0.8), train("dp2", 0.4, loss=4.80001), theirs("ddp2", 0.4)]
    assert find_faults(figures_of(records)) == []


@pytest.mark.parametrize(
    ("record", "fault"),
    [
        (schedule(measured=(58.0, 48.0), simulated=(58.0, 48.0)), "expected 57/48 (table), got 58/48"),
        (schedule(table=None, measured=(58.0, 48.0)), "expected 57/48 (simulated), got 58/48"),
        (zero("stage2", 0.1, wrong=3), "ZeRO stage2 over shm: 3 values are wrong"),
        (train("tp2", 0.4, loss=4.81), "asyncpar tp2: expected a last loss of 4.800000, got 4.810000"),
        (theirs("pp2", 0.4, loss=float("nan")), "torch pp2: expected a last loss of 4.800000, got nan"),
    ],
)
def test_what_is_wrong_is_named(record: dict[str, Any], fault: str) -> None:
    (found,) = find_faults(figures_of([train("alone", 0.8), record]))
    assert found.endswith(fault)
