"""If a rank dies at any byte of a save, the last complete checkpoint is there, and saving goes on."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from random import Random

import pytest

from asyncpar.checkpoint import LocalFiles, latest
from asyncpar.checkpoint.folder import survey
from asyncpar.errors import AsyncparError
from asyncpar.node import Node
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.checkpoint.fragile_disk import Died, Disk, FragileFiles
from tests.checkpoint.layouts import Layout, Tensor, small_model
from tests.checkpoint.worlds import each, loading, saving
from tests.soak import chosen

POINTS = 500
BATCHES = 10
CHOSEN = chosen(1, soak=BATCHES)
FOLDER = Path("/checkpoints")
LAYOUT = Layout(tp=2)
KEEP = 2


class Death(StrEnum):
    RANK = "one rank dies"
    PROCESSES = "all ranks die"
    POWER = "the machine loses its power"


def model_at(step: int) -> list[Tensor]:
    """Return a tensor that is cut, one that all ranks hold, and a scalar."""
    model = small_model(seed=100 * step)
    return [model[0], model[3], model[4]]


async def save(nodes: Sequence[Node], files: Sequence[FragileFiles], step: int) -> None:
    tensors = model_at(step)
    await each(nodes, lambda node: saving(node, FOLDER, tensors, LAYOUT, step=step, keep=KEEP, files=files[node.rank]))


async def save_and_die(nodes: Sequence[Node], disk: Disk, death: Death, budget: int, step: int, random: Random) -> bool:
    """Save until death comes; return whether the save came off before."""
    files = [FragileFiles(disk) for _ in nodes]
    if death is Death.RANK:
        victim = random.randrange(len(nodes))
        files[victim] = FragileFiles(disk, budget=budget // (2 if victim == 0 else 4))
    else:
        disk.budget = budget
    tensors = model_at(step)
    calls = [saving(node, FOLDER, tensors, LAYOUT, step=step, keep=KEEP, files=files[node.rank]) for node in nodes]
    try:
        await each(nodes, lambda node: calls[node.rank])
    except BaseExceptionGroup as errors:
        leaves = list(_leaves(errors))
        assert any(isinstance(error, Died) for error in leaves), leaves
        assert all(isinstance(error, (Died, AsyncparError)) for error in leaves), leaves
        return False
    return True


def _leaves(errors: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    return [
        leaf
        for error in errors.exceptions
        for leaf in (_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]


async def check_complete(nodes: Sequence[Node], disk: Disk, place: Path) -> int:
    """Assert that the first and the last complete checkpoint have every bit, on a copy of the disk.

    Returns the last one's step.
    """
    disk.copy_to(place)
    complete = survey(place / FOLDER.name, LocalFiles()).complete
    last = latest(place / FOLDER.name)
    assert last is not None
    assert last == complete[-1]
    for step in {complete[0].step, last.step}:
        tensors = model_at(step)
        loaded = await each(nodes, lambda node: loading(node, place / FOLDER.name, tensors, LAYOUT, step=step))  # noqa: B023
        for node, one in zip(nodes, loaded, strict=True):
            LAYOUT.check(tensors, node.rank, one.arrays)
    shutil.rmtree(place)
    return last.step


@pytest.mark.parametrize("batch", range(CHOSEN))
def test_the_last_complete_checkpoint_survives_death_at_any_byte(place: Path, batch: int) -> None:
    """50 deaths: of one rank, of all processes, of the machine with all it had not synced."""

    async def main() -> None:
        random = Random(batch)
        disk = Disk()
        came_off = died = 0
        async with local_world(LAYOUT.size) as nodes:
            whole = [FragileFiles(disk) for _ in nodes]
            await save(nodes, whole, 0)
            await save(nodes, whole, 1)
            disk.spent = 0
            await save(nodes, whole, 2)
            cost = disk.spent
            certain = step = 2  # what is on disk for certain, and what is there
            for _ in range(POINTS // BATCHES):
                death, next_step = random.choice(list(Death)), step + 1
                is_saved = await save_and_die(nodes, disk, death, random.randint(0, 3 * cost // 2), next_step, random)
                if is_saved:
                    assert len(FragileFiles(disk).folders(FOLDER)) == KEEP, "what is old or unfinished is removed"
                    certain = next_step
                if death is Death.POWER:
                    disk.lose_power(random)
                else:
                    disk.kill()
                found = await check_complete(nodes, disk, place / "disk")
                assert found in {certain, next_step} | ({step} if step > certain else set())
                if death is Death.POWER:
                    certain = found
                came_off, died, step = came_off + is_saved, died + (not is_saved), found
        assert died > came_off > 1

    run_virtual(main())
