"""Ranks that are cancelled, die or never come; and saving beside the training."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from asyncpar.checkpoint import LocalFiles, latest, save_checkpoint
from asyncpar.errors import AsyncparError, CheckpointError, PeerCancelled, PeerLost, PeerTimeout
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.checkpoint.layouts import Layout, small_model
from tests.checkpoint.worlds import (
    MODEL,
    Gate,
    NoSync,
    assert_all_raise,
    each,
    each_fails,
    load_and_check,
    save,
    saving,
)

# -- ranks that go -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [0, 1, 3, 8, 20, 40])
def test_a_rank_may_be_cancelled_at_any_moment(tmp_path: Path, turns: int) -> None:
    """Nobody hangs; either there is a checkpoint of that step, whole, or none; and the next save works."""

    async def main() -> None:
        layout, tensors = Layout(tp=3), small_model()
        async with local_world(3) as nodes:
            for culprit in range(3):
                step = 10 * culprit + 1
                calls = [asyncio.ensure_future(saving(node, tmp_path, tensors, layout, step=step)) for node in nodes]
                for _ in range(turns):
                    await asyncio.sleep(0)
                calls[culprit].cancel()
                results = await asyncio.gather(*calls, return_exceptions=True)
                for result in results:
                    assert not isinstance(result, BaseException) or isinstance(
                        result, (asyncio.CancelledError, AsyncparError)
                    ), repr(result)
                await each(nodes, lambda node: saving(node, tmp_path, tensors, layout, step=step + 1))  # noqa: B023
        await load_and_check(tmp_path, tensors, Layout())

    run_virtual(main())


def test_a_rank_that_is_cancelled_says_that_to_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_world(2) as nodes:
            calls = [asyncio.ensure_future(saving(node, tmp_path, small_model(), Layout(dp=2))) for node in nodes]
            calls[1].cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[0], PeerCancelled)
        assert results[0].rank == 1

    run_virtual(main())


def test_a_rank_that_dies_ends_the_save_on_all(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            calls = [saving(node, tmp_path, small_model(), Layout(dp=3)) for node in nodes[:2]]
            running = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(0)
            await nodes[2].stop()
            for result in await asyncio.gather(*running, return_exceptions=True):
                assert isinstance(result, PeerLost), repr(result)
                assert result.rank == 2
        assert latest(tmp_path) is None

    run_virtual(main())


def test_a_rank_that_never_comes_is_named_when_time_is_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with local_world(3) as nodes:
            running = [saving(node, tmp_path, small_model(), Layout(dp=3)) for node in nodes[:2]]
            results = await asyncio.gather(*running, return_exceptions=True)
            assert any(isinstance(result, PeerTimeout) and result.rank == 2 for result in results), results
            assert all(isinstance(result, AsyncparError) for result in results), results
            assert [getattr(result, "rank", None) for result in results] == [2, 2], results

    run_virtual(main())


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 30])
def test_ranks_that_hear_of_a_lost_one_from_another_name_the_lost_one(tmp_path: Path, turns: int) -> None:
    """Only rank 0 sees rank 2 end; what rank 1 gets is an error of a checkpoint that has the rank and the cause."""

    async def main() -> None:
        async with local_world(3) as nodes:
            calls = [saving(node, tmp_path, small_model(), Layout(dp=3)) for node in nodes[:2]]
            running = [asyncio.ensure_future(call) for call in calls]
            for _ in range(turns):
                await asyncio.sleep(0)
            error = nodes[0].links._lost_error(2, "its process ended")  # noqa: SLF001  # gives a rank up on one other rank only, at an exact turn of the loop: ends of processes come at no such time
            nodes[0].links._give_up(2, error)  # noqa: SLF001  # gives a rank up on one other rank only, at an exact turn of the loop: ends of processes come at no such time
            results = await asyncio.gather(*running, return_exceptions=True)
        for result in results:
            assert isinstance(result, PeerLost | CheckpointError), repr(result)
            assert result.rank == 2, repr(result)
            assert "its process ended" in str(result)
        if isinstance(results[1], CheckpointError):
            assert isinstance(results[1].__cause__, PeerCancelled | PeerLost)

    run_virtual(main())


async def test_a_file_system_that_hangs_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    """In real time, for threads do not know any other."""
    import threading

    hung = threading.Event()

    class Hanging(NoSync):
        def has_folder(self, path: Path) -> bool:
            hung.wait(20.0)
            return super().has_folder(path)

    async with local_world(2) as nodes:
        for node in nodes:
            node.world.timeout = 0.3
        pending = each_fails(
            nodes,
            lambda node: saving(
                node, tmp_path, small_model(), Layout(dp=2), files=Hanging() if node.rank else NoSync()
            ),
        )
        asyncio.get_running_loop().call_later(1.0, hung.set)
        assert_all_raise(await pending, "no progress for 0.3 s; does the file system hang?")


# -- beside the training -------------------------------------------------------------------------------------------


def test_a_snapshot_may_be_saved_while_the_arrays_change_and_ranks_talk(tmp_path: Path) -> None:
    async def main() -> None:
        layout, tensors = Layout(dp=2), small_model()
        async with local_world(2) as nodes:
            held = [layout.pieces(tensors, node.rank) for node in nodes]
            async with asyncio.TaskGroup() as tasks:
                for node, pieces in zip(nodes, held, strict=True):
                    call = save_checkpoint(
                        tmp_path, step=1, pieces=pieces, model=MODEL, communicator=node.world, snapshot=True
                    )
                    tasks.create_task(call)
                for pieces in held:
                    for piece in pieces:
                        piece.array.setflags(write=True)
                        piece.array[...] = 1
                for step in range(20):
                    sums = await each(nodes, lambda node: node.world.all_reduce(np.full(3, node.rank + step)))  # noqa: B023
                    assert all((one == 2 * step + 1).all() for one in sums)
        await load_and_check(tmp_path, tensors, Layout())

    run_virtual(main())


def test_an_array_that_changes_while_it_is_saved_is_an_error_and_no_checkpoint(tmp_path: Path) -> None:
    async def main() -> None:
        gate, tensors = Gate(), small_model()
        async with local_world(2) as nodes:
            held = [Layout(dp=2).pieces(tensors, node.rank) for node in nodes]
            calls = [
                saving(node, tmp_path, tensors, Layout(dp=2), pieces=pieces, files=gate)
                for node, pieces in zip(nodes, held, strict=True)
            ]
            running = [asyncio.ensure_future(call) for call in calls]
            await gate.reached.wait()
            for pieces in held:
                changed = pieces[3].array
                changed.setflags(write=True)
                changed.view(np.uint16)[0] = ~small_model()[3].whole.view(np.uint16)[0]
            gate.open()
            errors = await each_fails(nodes, lambda node: running[node.rank])
            assert_all_raise(errors, 'tensor "bias" (value): its array has changed while it was saved')
        assert latest(tmp_path) is None

    run_virtual(main())


def test_the_loop_turns_while_files_are_written(tmp_path: Path) -> None:
    async def main() -> None:
        gate = Gate()
        async with local_world(1) as nodes:
            running = asyncio.ensure_future(saving(nodes[0], tmp_path, small_model(), Layout(), files=gate))
            await gate.reached.wait()
            gate.open()
            await running

    run_virtual(main())


def test_files_are_made_by_real_syncs_too(tmp_path: Path) -> None:
    run_virtual(save(tmp_path / "new" / "folders", small_model(), Layout(dp=2), files=LocalFiles()))
    run_virtual(load_and_check(tmp_path / "new" / "folders", small_model(), Layout()))
