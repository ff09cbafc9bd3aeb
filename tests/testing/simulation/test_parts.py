"""The pure parts of a simulation: faults, shrinking, disks."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

import asyncpar as ap
from asyncpar.testing.simulation import KINDS, Fault, draw_faults
from asyncpar.testing.simulation.disk import SimulatedDisk
from asyncpar.testing.simulation.runs import shrink, simplify


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "flood"}, "kind: expected one of kill, .*, got 'flood'"),
        ({"at": -1.0}, "at: expected a virtual time"),
        ({"at": float("nan")}, "at: expected a virtual time"),
        ({"kind": "reset"}, "peer: expected a node for reset"),
        ({"peer": 1}, "peer: expected None for kill"),
        ({"kind": "reset", "peer": 0}, "peer: expected another node than 0"),
        ({"kind": "pause"}, "seconds: expected a number for pause, got None"),
        ({"kind": "pause", "seconds": 0.0}, "seconds: expected a positive number for pause"),
        ({"kind": "clock"}, "factor: expected a positive number for clock, got None"),
    ],
)
def test_faults_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ap.UsageError, match=message):
        Fault(**dict[str, Any]({"at": 1.0, "kind": "kill", "node": 0} | fields))


def test_a_fault_reads_as_the_code_that_makes_it() -> None:
    for fault in draw_faults(1, count=100, size=3, within=1.0, kinds=tuple(KINDS)):
        assert eval(repr(fault), {"Fault": Fault}) == fault


def test_faults_are_drawn_from_the_seed_in_order_and_of_all_kinds() -> None:
    drawn = draw_faults(1, count=500, size=3, within=2.0, kinds=tuple(KINDS))
    assert drawn == draw_faults(1, count=500, size=3, within=2.0, kinds=tuple(KINDS))
    assert drawn != draw_faults(2, count=500, size=3, within=2.0, kinds=tuple(KINDS))
    assert {fault.kind for fault in drawn} == set(KINDS)
    assert [fault.at for fault in drawn] == sorted(fault.at for fault in drawn)
    assert max(fault.at for fault in drawn) <= 2.0


def test_in_a_world_of_one_nothing_happens_between_nodes() -> None:
    assert {fault.peer for fault in draw_faults(1, count=50, size=1, within=1.0)} == {None}


@pytest.mark.parametrize("needed", [set(), {3}, {0, 19}, {4, 5, 6}, set(range(20))])
def test_a_list_shrinks_to_what_is_needed(needed: set[int]) -> None:
    asked = 0

    def fails(items: tuple[int, ...]) -> bool:
        nonlocal asked
        asked += 1
        assert list(items) == sorted(items)
        return needed <= set(items)

    assert shrink(range(20), fails) == tuple(sorted(needed))
    assert asked <= 200


def test_shrinking_ends_after_the_attempts_with_what_it_has() -> None:
    assert set(shrink(range(64), lambda items: {7, 60} <= set(items), attempts=6)) >= {7, 60}


def test_items_are_replaced_by_the_first_simpler_one_that_fails_still() -> None:
    simple = simplify([5.123, 7.891], lambda items: items[0] > 5.1, lambda item: [round(item), round(item, 1), 0.0])
    assert simple == (5.123, 8)


def files(seed: int) -> SimulatedDisk:
    disk = SimulatedDisk(Random(seed))
    disk.append("log", b"durable ")
    disk.sync("log")
    disk.append("log", b"lost")
    disk.append("new", b"never synced")
    disk.replace("vote", b"one")
    disk.replace("vote", b"two")
    return disk


def test_a_crash_keeps_what_was_synced_and_tears_what_was_not() -> None:
    logs, names = set(), set()
    for seed in range(100):
        disk = files(seed)
        disk.lose_unsynced()
        logs.add(disk.read("log"))
        assert disk.read("vote") == b"two"
        try:
            names.add(disk.read("new"))
        except FileNotFoundError:
            names.add(b"gone")
    assert logs == {b"durable " + b"lost"[:count] for count in range(5)}
    assert b"gone" in names
    assert len(names) > 5


def test_without_a_crash_everything_is_there() -> None:
    disk = files(0)
    assert disk.read("log") == b"durable lost"
    disk.truncate("log", 7)
    assert disk.read("log") == b"durable"
    with pytest.raises(FileNotFoundError):
        disk.read("other")


def test_a_full_and_a_broken_disk_refuse_to_write() -> None:
    disk = files(0)
    disk.capacity = 30
    with pytest.raises(OSError, match="No space left"):
        disk.append("log", bytes(30))
    disk.is_broken = True
    with pytest.raises(OSError, match="Input/output error"):
        disk.sync("log")
    assert disk.read("log") == b"durable lost"
