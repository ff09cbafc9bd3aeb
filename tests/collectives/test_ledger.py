"""Counts of uses are exact however many names there are, and take little memory."""

from __future__ import annotations

import random
import tracemalloc
from collections import Counter

from asyncpar.collectives.ledger import CollectiveStatistics, GroupLedger, Traffic, UseCounts
from tests.soak import chosen


def test_uses_are_counted_exactly_also_of_names_that_were_packed_away() -> None:
    dice, counts, expected = random.Random(1), UseCounts(), Counter[str]()
    for _ in range(60_000):
        name = f"name {int(dice.paretovariate(0.3)) % 20_000}"
        expected[name] += 1
        assert counts.add(name) == expected[name]
    assert len(expected) > 5_000
    assert 0 < counts.nbytes <= 12 * len(expected)


def test_very_many_keys_take_twelve_bytes_each() -> None:
    ledger, count = GroupLedger(), chosen(20_000, soak=200_000)
    for number in range(5_000):
        ledger.allot_keyed(f"before {number}", ())
    tracemalloc.start()
    try:
        for number in range(count):
            ledger.allot_keyed(f"key {number}", ())
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 16 * count + (1 << 20)
    assert ledger.allot_keyed("key 0", ())[1] == 2


def test_traffic_prints_as_a_table() -> None:
    one = CollectiveStatistics(
        operation="all_reduce", algorithm="ring", calls=1200, payload_bytes=25_000_000, messages=2400, seconds=0.6
    )
    assert str(Traffic(operations=(one,))).splitlines() == [
        "operation   algorithm  calls  payload  messages  mean time",
        "all_reduce  ring       1,200    25 MB     2,400     500 us",
    ]
    assert len(str(Traffic(operations=())).splitlines()) == 1
