"""``simulate``: programs on simulated nodes, their faults, and how failures are shown."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.testing import simulate
from asyncpar.testing.simulation import (
    KINDS,
    Conditions,
    Fault,
    SimulatedHang,
    SimulatedLeak,
    SimulationFailed,
    SimulationResult,
    explore,
)
from tests.soak import chosen
from tests.testing.simulation.programs import check_named, check_sums, sums

SEEDS = chosen(40, soak=2000)

FAULTS = tuple(kind for kind in KINDS if kind != "restart")


def test_a_program_returns_what_it_returns_on_each_node() -> None:
    result = simulate(sums, size=3, seed=1, check=check_sums)
    assert result.results == {node: [7.0, 7.0 * 256, 7.0 * 65536] for node in range(3)}
    assert result.errors == {}
    assert 0.0 < result.seconds < 1.0


def test_a_world_of_one_and_a_large_message_work() -> None:
    async def large(node: ap.Node) -> float:
        x = np.full(3_000_000, node.rank + 1, np.float32)
        await node.world.all_reduce(x)
        return float(x.min())

    assert simulate(sums, size=1).results == {0: [1.0, 256.0, 65536.0]}
    assert simulate(large, size=3, conditions=Conditions(window=65536)).results == {0: 6.0, 1: 6.0, 2: 6.0}


def test_hours_pass_at_once() -> None:
    async def main(node: ap.Node) -> None:
        await asyncio.sleep(36_000.0)

    assert simulate(main, size=2, bound=40_000.0).seconds > 36_000.0


@pytest.mark.parametrize("kinds", [FAULTS, ("kill", "crash"), ("silence", "one_way", "isolate"), ("replay", "damage")])
def test_survivors_end_with_right_sums_or_a_peer_error(kinds: tuple[str, ...]) -> None:
    ends: dict[str, int] = {}

    def check(result: SimulationResult) -> None:
        check_sums(result)
        check_named(result)

    for result in explore(sums, size=4, seeds=range(SEEDS // 4), faults=3, kinds=kinds, check=check):
        for error in result.errors.values():
            ends[type(error).__name__] = ends.get(type(error).__name__, 0) + 1
    assert ends.get("PeerLost", 0) + ends.get("LinkDamaged", 0) > 0


def test_a_killed_node_is_named_by_the_survivors() -> None:
    async def main(node: ap.Node) -> None:
        for _ in range(1000):
            await node.world.barrier()

    result = simulate(main, size=3, seed=4, faults=[Fault(at=0.03, kind="kill", node=1)])
    assert sorted(result.errors) == [0, 2]
    for error in result.errors.values():
        assert isinstance(error, ap.PeerLost)
        assert error.rank == 1


def test_a_node_that_dies_runs_no_finally_block_that_anyone_sees() -> None:
    async def main(node: ap.Node) -> list[str]:
        try:
            if node.rank == 1:
                await asyncio.sleep(10.0)
            return [await asyncio.wait_for(node.world.broadcast_object(None, root=1), 100.0)]
        finally:
            if node.rank == 1:
                await node.world.broadcast_object("last words", root=1)

    result = simulate(main, size=2, faults=[Fault(at=1.0, kind="kill", node=1)])
    assert list(result.errors) == [0]
    assert isinstance(result.errors[0], ap.PeerLost)


def test_a_crash_is_noticed_after_the_link_timeout() -> None:
    async def main(node: ap.Node) -> float:
        await node.world.barrier()
        begun = asyncio.get_running_loop().time()
        try:
            while True:
                await node.world.barrier()
        except ap.PeerLost:
            return asyncio.get_running_loop().time() - begun

    result = simulate(main, size=2, faults=[Fault(at=0.1, kind="crash", node=1)])
    assert result.results[0] == pytest.approx(5.1, abs=0.2)


def test_a_pause_is_waited_for() -> None:
    result = simulate(sums, size=3, seed=2, faults=[Fault(at=0.0, kind="pause", node=1, seconds=20.0)], bound=100.0)
    seen = [*result.results.values(), *result.errors.values()]
    assert len(seen) == 3


def test_a_restart_begins_a_new_generation_of_the_job() -> None:
    async def main(node: ap.Node) -> int:
        await node.world.barrier()
        await asyncio.sleep(1.0)
        await node.world.barrier()
        return node.membership.generation

    result = simulate(main, size=3, faults=[Fault(at=0.5, kind="restart", node=1)])
    assert result.results == {0: 1, 1: 1, 2: 1}


async def lost_update(node: ap.Node) -> int:
    """Add one by asking and telling: two ranks may read the same value."""

    class Cell(ap.Actor):
        value = 0

        @ap.endpoint
        async def read(self) -> int:
            return self.value

        @ap.endpoint
        async def write(self, value: int) -> None:
            self.value = value

    if node.rank == 0:
        await node.spawn(Cell, name="cell")
    await node.world.barrier()
    if node.rank != 0:
        cell = node.ref("cell", 0)
        await asyncio.sleep(0.001 * node.rank)
        value = await cell.read()
        await cell.write(value + 1)
    await node.world.barrier()
    value = await node.ref("cell", 0).read()
    await node.world.barrier()
    return int(value)


def test_a_race_shows_in_some_seeds_and_always_in_the_same() -> None:
    def check(result: SimulationResult) -> None:
        assert result.results.get(0, 2) == 2, "an update was lost"

    def first_failure() -> tuple[int, str]:
        with pytest.raises(SimulationFailed, match="an update was lost") as caught:
            explore(lost_update, size=3, seeds=range(200), faults=1, kinds=("slow", "clog", "pause"), check=check)
        return caught.value.seed, caught.value.trace_hash

    assert first_failure() == first_failure()


def test_a_failure_says_how_to_see_it_again_with_as_few_faults_as_needed() -> None:
    async def fragile(node: ap.Node) -> None:
        for _ in range(100):
            await node.world.barrier()

    def check(result: SimulationResult) -> None:
        assert not result.errors, "it is not meant to bear any fault"

    with pytest.raises(SimulationFailed) as caught:
        explore(fragile, size=4, seeds=range(100), faults=8, check=check)
    failed = caught.value
    assert len(failed.faults) <= 2
    text = str(failed)
    assert "it is not meant to bear any fault" in text
    assert f"seed {failed.seed}, 4 nodes, trace hash {failed.trace_hash}" in text
    assert "(of 8; none of these can be left out)" in text
    scope: dict[str, Any] = {"main": fragile, "check": check}
    exec(failed.as_test(), scope)
    with pytest.raises(SimulationFailed) as again:
        scope[f"test_seed_{failed.seed}"]()
    assert again.value.trace_hash == failed.trace_hash


def test_what_main_raises_fails_the_run_and_is_the_cause() -> None:
    async def main(node: ap.Node) -> None:
        if node.rank == 2:
            raise ZeroDivisionError("in the program")
        await node.world.barrier()

    with pytest.raises(SimulationFailed, match="ZeroDivisionError: in the program") as caught:
        simulate(main, size=3)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_hang_says_where_every_node_waits() -> None:
    async def main(node: ap.Node) -> None:
        if node.rank:
            await asyncio.get_running_loop().create_future()

    with pytest.raises(SimulationFailed, match=r"node 1, node 1 at test_simulate.py:\d+") as caught:
        simulate(main, size=2)
    assert isinstance(caught.value.cause, SimulatedHang)


def test_tasks_that_are_left_behind_fail_the_run() -> None:
    async def main(node: ap.Node) -> None:
        asyncio.create_task(asyncio.sleep(1000.0), name="forgotten")  # noqa: RUF006

    with pytest.raises(SimulationFailed, match="tasks are left: forgotten, forgotten") as caught:
        simulate(main, size=2)
    assert isinstance(caught.value.cause, SimulatedLeak)


def test_a_callback_that_raises_fails_the_run() -> None:
    async def main(node: ap.Node) -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0.1)

    with pytest.raises(SimulationFailed, match="ZeroDivisionError"):
        simulate(main, size=1)


def test_the_trace_can_be_had_as_text() -> None:
    fault = Fault(at=0.01, kind="reset", node=0, peer=1)
    result = simulate(sums, size=2, faults=[fault], record=True)
    assert any("node 0 -> node 1: open link" in line for line in result.lines)
    assert f"0.010000 {fault!r}" in result.lines
    assert simulate(sums, size=2, faults=[fault]).trace_hash == result.trace_hash


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size: expected at least 1 node, got 0"),
        ({"faults": -1}, "faults: expected a number of faults of at least 0, got -1"),
        ({"faults": 1, "kinds": ("flood",)}, "kinds: expected some of kill, .*, got 'flood'"),
        ({"faults": [Fault(at=0.0, kind="kill", node=4)]}, "faults: expected nodes 0..3, got 4"),
        ({"faults": ["kill"]}, r"faults: expected Fault\(...\) or a number"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ap.UsageError, match=message):
        simulate(sums, **arguments)


def test_a_simulation_inside_of_another_is_refused() -> None:
    async def main(node: ap.Node) -> None:
        simulate(sums, size=2)

    with pytest.raises(SimulationFailed, match="one simulation at a time"):
        simulate(main, size=1)


@pytest.mark.parametrize("setting", ["latency", "bandwidth", "window", "link_timeout"])
def test_conditions_that_mean_nothing_are_refused(setting: str) -> None:
    with pytest.raises(ap.UsageError, match=f"{setting}: expected a positive number, got 0"):
        Conditions(**{setting: 0})
