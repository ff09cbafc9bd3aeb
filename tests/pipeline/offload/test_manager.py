"""Activations that are held, offloaded and brought back."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.parallel import MemoryOptimizationStrategy as Strategy
from asyncpar.core.config.parallel import PipelineScheduleType as Kind
from asyncpar.errors import UsageError
from asyncpar.pipeline import PipelineSchedule
from asyncpar.pipeline.alarm import StepFailed
from asyncpar.pipeline.errors import ActionFailed
from asyncpar.pipeline.offload import MemoryManager, OffloadError, Volume
from asyncpar.pipeline.offload.manager import SpillFile
from tests.pipeline.real_stages import alone, cut_model, gradients_of, make_executors, make_samples, run_all
from tests.pipeline.worlds import open_ranks, outcomes

COUNT = 1000
NBYTES = 8 * COUNT


@dataclass(frozen=True)
class Saved:
    x: Any
    weights: Any


def make_value(number: int) -> Saved:
    return Saved(x=np.full(COUNT // 2, float(number)), weights=[np.full(COUNT // 2, -float(number))])


def check_value(value: Any, number: int) -> None:
    assert isinstance(value, Saved)
    np.testing.assert_array_equal(value.x, np.full(COUNT // 2, float(number)))
    np.testing.assert_array_equal(value.weights[0], np.full(COUNT // 2, -float(number)))


def spill_of(manager: MemoryManager) -> SpillFile:
    spill = manager._file  # noqa: SLF001  # the file has no name in any folder: nothing but the manager leads to it
    assert spill is not None
    return spill


def descriptor_of(spill: SpillFile) -> int:
    return spill._file  # noqa: SLF001  # to damage or measure a file that has no name, only its number will do


async def test_what_is_stored_is_held_until_it_is_freed() -> None:
    async with MemoryManager() as manager:
        value = make_value(1)
        manager.store_activation((0, 1), value)
        assert await manager.retrieve_activation((0, 1)) is value
        assert manager.stats.current_bytes == NBYTES
        manager.free_activation((0, 1))
        stats = manager.stats
    assert (stats.current_bytes, stats.peak_bytes, stats.current_count, stats.peak_count) == (0, NBYTES, 0, 1)
    assert stats.stored == stats.retrieved == Volume(count=1, nbytes=NBYTES)
    assert stats.offloaded == stats.restored == Volume()


async def test_extreme_sends_everything_to_disk_and_brings_it_back(tmp_path: Path) -> None:
    async with MemoryManager(strategy=Strategy.EXTREME, folder=tmp_path) as manager:
        for number in range(10):
            await manager.make_room()
            manager.store_activation((0, number), make_value(number))
        await manager.settle()
        assert manager.stats.current_bytes == 0
        assert manager.stats.peak_bytes <= 4 * NBYTES
        for number in reversed(range(10)):
            check_value(await manager.retrieve_activation((0, number)), number)
            assert manager.stats.current_bytes == NBYTES
            manager.free_activation((0, number))
        stats = manager.stats
        assert stats.offloaded == stats.restored == Volume(count=10, nbytes=10 * NBYTES)


async def test_the_limit_is_kept_and_what_is_needed_last_goes() -> None:
    async with MemoryManager(limit=4 * NBYTES) as manager:
        for number in range(12):
            await manager.make_room()
            manager.store_activation((0, number), make_value(number), needed=number)
        assert manager.stats.peak_bytes <= 4 * NBYTES
        assert manager.stats.offloaded.count >= 8
        restored = []
        for number in range(12):
            check_value(await manager.retrieve_activation((0, number)), number)
            manager.free_activation((0, number))
            restored.append(manager.stats.restored.count)
        assert restored[0] == 0  # needed first: it has stayed
        assert manager.stats.peak_bytes <= 4 * NBYTES


async def test_below_the_limit_nothing_is_written() -> None:
    async with MemoryManager(limit=4 * NBYTES) as manager:
        for number in range(3):
            await manager.make_room()
            manager.store_activation((0, number), make_value(number))
        assert manager.stats.offloaded == Volume()


async def test_a_limit_that_cannot_be_kept_is_no_hang() -> None:
    async with asyncio.timeout(30), MemoryManager(limit=10) as manager:
        for number in range(3):
            await manager.make_room()
            manager.store_activation((0, number), make_value(number))
        for number in range(3):
            check_value(await manager.retrieve_activation((0, number)), number)


async def test_a_value_retrieved_while_it_is_written_stays_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    write = SpillFile.write

    def slow(self: SpillFile, *arguments: Any) -> int:
        gate.wait(10)
        return write(self, *arguments)

    monkeypatch.setattr(SpillFile, "write", slow)
    async with MemoryManager(strategy=Strategy.EXTREME) as manager:
        value = make_value(1)
        manager.store_activation((0, 1), value)
        await asyncio.sleep(0)
        assert await manager.retrieve_activation((0, 1)) is value
        gate.set()
        await manager.settle()
        assert manager.stats.current_bytes == NBYTES
        assert manager.stats.offloaded == Volume()


async def test_a_value_retrieved_before_it_is_written_is_not_looked_at_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A backward pass may take it apart in its thread from then on."""
    monkeypatch.setattr("asyncpar.pipeline.offload.manager.take_apart", lambda _: pytest.fail("it was taken apart"))
    async with MemoryManager(strategy=Strategy.EXTREME) as manager:
        value = make_value(1)
        manager.store_activation((0, 1), value)
        manager.read_ahead((0, 1))
        manager.store_activation((0, 2), value)
        assert await manager.retrieve_activation((0, 2)) is value
        await manager.settle()
        assert await manager.retrieve_activation((0, 1)) is value
        assert manager.stats.offloaded == Volume()


async def test_the_loop_goes_on_while_files_are_written_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    loop_thread = threading.get_ident()
    for name in ("write", "read"):
        original = getattr(SpillFile, name)

        def watched(self: SpillFile, *arguments: Any, original: Any = original) -> Any:
            seen.append(threading.get_ident() == loop_thread)
            return original(self, *arguments)

        monkeypatch.setattr(SpillFile, name, watched)
    async with MemoryManager(strategy=Strategy.EXTREME) as manager:
        manager.store_activation((0, 1), make_value(1))
        await manager.settle()
        await manager.retrieve_activation((0, 1))
    assert seen == [False, False]


async def test_reading_ahead_brings_a_value_back_before_it_is_asked_for() -> None:
    async with MemoryManager(strategy=Strategy.EXTREME) as manager:
        manager.store_activation((0, 1), make_value(1))
        await manager.settle()
        manager.read_ahead((0, 1))
        manager.read_ahead((5, 5))  # nobody has stored that yet
        await manager.settle()
        check_value(await manager.retrieve_activation((0, 1)), 1)
        assert manager.stats.restored.count == 1


async def test_memory_shared_by_two_values_is_counted_once() -> None:
    async with MemoryManager() as manager:
        shared = np.zeros(100)
        manager.store_activation((0, 0), [shared, np.zeros(10)])
        manager.store_activation((0, 1), (shared[3:],))
        assert manager.stats.current_bytes == 880
        manager.free_activation((0, 0))
        assert manager.stats.current_bytes == 800


async def test_what_replaces_an_activation_is_counted_instead_of_it() -> None:
    async with MemoryManager() as manager:
        manager.store_activation((0, 0), make_value(0))
        rest = np.zeros(5)
        manager.replace_activation((0, 0), [lambda: rest])
        assert manager.stats.current_bytes == 40
        manager.free_activation((0, 0))
        assert manager.stats.current_bytes == 0


class FullDisk:
    """Takes so many bytes, and no more."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, file: int, content: Any, start: int) -> int:
        if start + len(content) > self.room:
            raise OSError(28, "No space left on device")
        return len(content)


async def test_a_full_disk_is_a_typed_error_that_says_which_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MemoryManager(strategy=Strategy.EXTREME, folder="/tmp") as manager:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", FullDisk(100))
            manager.store_activation((2, 7), make_value(1))
            await manager.settle()
            message = r"activation of chunk 2, micro-batch 7: writing .* in /tmp failed: .* No space left on device"
            with pytest.raises(OffloadError, match=message):
                await manager.retrieve_activation((2, 7))
            with pytest.raises(OffloadError, match="No space left"):
                manager.store_activation((2, 8), make_value(1))
        manager.clear()
        manager.store_activation((2, 7), make_value(1))
        check_value(await manager.retrieve_activation((2, 7)), 1)


async def test_a_folder_that_takes_no_files_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    async with MemoryManager(strategy=Strategy.EXTREME, folder="/tmp") as manager:
        manager.store_activation((0, 0), make_value(0))
        await manager.settle()
        with pytest.raises(OffloadError, match=r"folder: expected one where files can be made, got /tmp .*denied"):
            await manager.retrieve_activation((0, 0))


async def test_what_is_read_back_wrong_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MemoryManager(strategy=Strategy.EXTREME) as manager:
        manager.store_activation((0, 3), make_value(1))
        await manager.settle()
        spill = spill_of(manager)
        os.pwrite(descriptor_of(spill), b"x", 100)
        with pytest.raises(OffloadError, match=r"micro-batch 3: what was read back .* is not what was written"):
            await manager.retrieve_activation((0, 3))


async def test_a_file_that_was_cut_is_a_typed_error() -> None:
    async with MemoryManager(strategy=Strategy.EXTREME) as manager:
        manager.store_activation((0, 3), make_value(1))
        await manager.settle()
        spill = spill_of(manager)
        os.ftruncate(descriptor_of(spill), 10)
        with pytest.raises(OffloadError, match=r"has ended .* bytes too early"):
            await manager.retrieve_activation((0, 3))


async def test_nothing_is_left_in_the_folder_at_any_time(tmp_path: Path) -> None:
    async with MemoryManager(strategy=Strategy.EXTREME, folder=tmp_path) as manager:
        manager.store_activation((0, 3), make_value(1))
        await manager.settle()
        assert list(tmp_path.iterdir()) == []  # it has no name: it goes with the process, however that ends
        spill = spill_of(manager)
        number = descriptor_of(spill)
        os.fstat(number)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


async def test_a_manager_that_is_forgotten_closes_its_file(tmp_path: Path) -> None:
    manager = MemoryManager(strategy=Strategy.EXTREME, folder=tmp_path)
    manager.store_activation((0, 3), make_value(1))
    await manager.settle()
    spill = spill_of(manager)
    number, thread = descriptor_of(spill), manager._thread  # noqa: SLF001  # the manager is to end this thread when it is forgotten, and shows it to nobody
    del manager, spill
    await thread.run(int)  # the thread may still refer to its last write
    thread.close()
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


async def test_ranges_of_the_file_are_used_again(tmp_path: Path) -> None:
    async with MemoryManager(strategy=Strategy.EXTREME, folder=tmp_path) as manager:
        for number in range(20):
            manager.store_activation((0, number), make_value(number))
            await manager.settle()
            check_value(await manager.retrieve_activation((0, number)), number)
            manager.free_activation((0, number))
        spill = spill_of(manager)
        assert os.fstat(descriptor_of(spill)).st_size <= 2 * NBYTES


async def test_freed_while_written_or_read_leaves_nothing() -> None:
    async with MemoryManager(strategy=Strategy.EXTREME) as manager:
        manager.store_activation((0, 0), make_value(0))
        manager.store_activation((0, 1), make_value(1))
        manager.free_activation((0, 0))
        await manager.settle()
        reading = asyncio.create_task(manager.retrieve_activation((0, 1)))
        await asyncio.sleep(0)
        manager.clear()
        with pytest.raises(UsageError, match="chunk 0, micro-batch 1 was freed while it was retrieved"):
            await reading
        await manager.settle()
        assert manager.stats.current_bytes == manager.stats.current_count == 0
        spill = spill_of(manager)
        assert len(spill._ranges._taken) == 0  # noqa: SLF001  # a leaked range of the file shows nowhere else: the file is sparse and the statistics count values


async def test_a_cancelled_retrieval_can_be_repeated() -> None:
    async with MemoryManager(strategy=Strategy.EXTREME) as manager:
        manager.store_activation((0, 1), make_value(1))
        await manager.settle()
        reading = asyncio.create_task(manager.retrieve_activation((0, 1)))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        check_value(await manager.retrieve_activation((0, 1)), 1)


async def test_wrong_uses_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="limit: expected a positive number of bytes or None, got 0"):
        MemoryManager(limit=0)
    with pytest.raises(UsageError, match="folder: expected a folder that exists"):
        MemoryManager(folder=tmp_path / "none")
    async with MemoryManager() as manager:
        manager.store_activation((0, 1), 5)
        with pytest.raises(UsageError, match="chunk 0, micro-batch 1 is stored already"):
            manager.store_activation((0, 1), 5)
        with pytest.raises(UsageError, match="chunk 1, micro-batch 1 is not stored"):
            await manager.retrieve_activation((1, 1))
        with pytest.raises(UsageError, match="chunk 1, micro-batch 1 is not stored"):
            manager.free_activation((1, 1))


async def test_a_closed_manager_can_be_closed_again() -> None:
    manager = MemoryManager(strategy=Strategy.EXTREME)
    manager.store_activation((0, 1), make_value(1))
    await manager.close()
    await manager.close()
    assert manager.stats.current_bytes == 0


class PatientCompute:
    """Computes when nothing is on its way to disk any more, so that offloading does not depend on how quick it is."""

    def __init__(self, memories: list[MemoryManager]) -> None:
        self._memories = memories

    async def run(self, function: Any, *arguments: Any) -> Any:
        await asyncio.gather(*(memory.settle() for memory in self._memories))
        return function(*arguments)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("options", [{"strategy": Strategy.EXTREME}, {"limit": 2000}])
async def test_a_pipeline_computes_the_same_with_offloading(kind: Kind, options: dict[str, Any]) -> None:
    schedule = PipelineSchedule(num_stages=2, num_microbatches=4, schedule_type=kind)
    inputs, targets = make_samples(4, rows=lambda number: 1 + number)
    losses, expected = alone(cut_model(schedule.num_virtual_stages), inputs, targets)
    memories = [MemoryManager(**options) for _ in range(2)]
    waiting = list(memories)
    async with open_ranks(2) as ranks:
        executors, held = make_executors(
            schedule, ranks, memory=lambda: waiting.pop(0), compute=lambda: PatientCompute(memories)
        )
        for repetition in (1, 2):
            results = await run_all(executors, inputs, targets)
            last = schedule.rank_of(schedule.num_virtual_stages - 1)
            assert list(results[last].losses) == losses
            for stages in held:
                for name, gradient in gradients_of(stages).items():
                    np.testing.assert_allclose(gradient, repetition * expected[name], rtol=1e-12, atol=1e-12)
        await asyncio.gather(*(executor.close() for executor in executors))
    for memory in memories:
        assert memory.stats.current_bytes == 0
    assert sum(memory.stats.offloaded.count for memory in memories) > 0
    assert sum(memory.stats.restored.count for memory in memories) > 0


async def test_a_full_disk_ends_the_run_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = PipelineSchedule(num_stages=2, num_microbatches=6, schedule_type=Kind.GPIPE)
    inputs, targets = make_samples(6)
    async with open_ranks(2) as ranks:
        waiting = [MemoryManager(strategy=Strategy.EXTREME), MemoryManager()]
        executors, _ = make_executors(schedule, ranks, memory=lambda: waiting.pop(0))
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", FullDisk(100))
            zero, one = await outcomes([executor.run(inputs, targets) for executor in executors])
        assert isinstance(zero, ActionFailed)
        assert isinstance(zero.__cause__, OffloadError)
        assert isinstance(one, StepFailed)
        assert "No space left on device" in str(one)
        results = await run_all(executors, inputs, targets)
        assert len(results[1].losses) == 6
        await asyncio.gather(*(executor.close() for executor in executors))
