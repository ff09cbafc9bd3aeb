"""File systems that are full, closed, elsewhere or gone: an error on every rank."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest

from asyncpar.checkpoint import LocalFiles, NewFile, latest
from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.checkpoint.layouts import Layout, small_model
from tests.checkpoint.worlds import (
    NoSync,
    UnsyncedFile,
    assert_all_raise,
    each,
    each_fails,
    load_and_check,
    save,
    saving,
)


class Full(NoSync):
    """A disk that is full after some bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def create(self, path: Path) -> NewFile:
        return FileOnFull(self, super().create(path), path)


class FileOnFull(UnsyncedFile):
    def __init__(self, disk: Full, file: NewFile, path: Path) -> None:
        super().__init__(file)
        self._disk = disk
        self._path = path

    def write(self, content: bytes | memoryview) -> None:
        self._disk.room -= len(content)
        if self._disk.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device", str(self._path))
        super().write(content)


@pytest.mark.parametrize("room", [0, 300, 800, 1500])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_is_full_is_an_error_on_all_ranks_and_the_next_save_works(
    tmp_path: Path, rank: int, room: int
) -> None:
    async def main() -> None:
        layout = Layout(tp=2)
        await save(tmp_path, small_model(), layout, step=1)
        async with local_world(2) as nodes:
            errors = await each_fails(
                nodes,
                lambda node: saving(
                    node,
                    tmp_path,
                    small_model(seed=5),
                    layout,
                    step=2,
                    files=Full(room) if node.rank == rank else NoSync(),
                ),
            )
            assert_all_raise(errors, f"rank {rank} cannot write to", "No space left on device")
            last = latest(tmp_path)
            assert last is not None
            assert last.step == 1
            await each(nodes, lambda node: saving(node, tmp_path, small_model(seed=6), layout, step=2))
        await load_and_check(tmp_path, small_model(seed=6), Layout())
        assert len(list(tmp_path.glob("step_*"))) == 2

    run_virtual(main())


def test_a_folder_that_may_not_be_made_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    async def main() -> None:
        async with local_world(2) as nodes:
            errors = await each_fails(
                nodes, lambda node: saving(node, tmp_path / "file" / "folder", small_model(), Layout(dp=2))
            )
            assert_all_raise(errors, "rank 0 cannot write to", "file")

    run_virtual(main())


def test_ranks_that_do_not_see_each_others_files_say_so(tmp_path: Path) -> None:
    """Each host has a folder of its own by the same name."""

    async def main() -> None:
        async with local_world(3, hosts=["left", "left", "right"]) as nodes:
            folders = [tmp_path / "left", tmp_path / "left", tmp_path / "right"]
            errors = await each_fails(nodes, lambda node: saving(node, folders[node.rank], small_model(), Layout(dp=3)))
            assert_all_raise(errors, "rank 2 does not see the folder", "all ranks must share one file system")

    run_virtual(main())


def test_rank_0_notices_that_it_does_not_see_what_another_has_written(tmp_path: Path) -> None:
    class Elsewhere(NoSync):
        """Has the folder, as a copy that nobody else sees."""

        def create(self, path: Path) -> NewFile:
            other = tmp_path / "elsewhere"
            other.mkdir(exist_ok=True)
            return super().create(other / path.name)

    async def main() -> None:
        async with local_world(2) as nodes:
            errors = await each_fails(
                nodes,
                lambda node: saving(
                    node,
                    tmp_path / "here",
                    small_model(),
                    Layout(dp=2),
                    files=Elsewhere() if node.rank else NoSync(),
                ),
            )
            assert_all_raise(errors, "rank 0 cannot read", "rank_00001.json", "all ranks must share one file system")
        assert latest(tmp_path / "here") is None

    run_virtual(main())


def test_a_file_system_without_locks_and_syncs_of_folders_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def refuse_lock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(fcntl, "flock", refuse_lock)
    monkeypatch.setattr(os, "fsync", refuse_folders)
    run_virtual(save(tmp_path, small_model(), Layout(dp=2), files=LocalFiles()))
    run_virtual(load_and_check(tmp_path, small_model(), Layout()))


def test_a_disk_that_fails_to_sync_is_an_error_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)

    async def main() -> None:
        async with local_world(2) as nodes:
            errors = await each_fails(
                nodes, lambda node: saving(node, tmp_path, small_model(), Layout(dp=2), files=LocalFiles())
            )
            assert_all_raise(errors, "cannot write to", "Input/output error")
        assert latest(tmp_path) is None

    run_virtual(main())
