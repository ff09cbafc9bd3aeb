"""Folders of checkpoints: what stays, what goes, who may write."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

from asyncpar.testing.loop import run_virtual
from asyncpar.testing.world import local_world
from tests.checkpoint.layouts import Layout, small_model
from tests.checkpoint.worlds import Gate, NoSync, assert_all_raise, each_fails, load_and_check, save, saving


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    async def main() -> None:
        await save(tmp_path, small_model(), Layout(dp=2), step=7)
        async with local_world(2) as nodes:
            errors = await each_fails(
                nodes, lambda node: saving(node, tmp_path, small_model(seed=9), Layout(dp=2), step=7)
            )
        assert_all_raise(errors, "step_000000007 is there already: remove it, or save another step")
        await load_and_check(tmp_path, small_model(), Layout())

    run_virtual(main())


def test_only_the_last_ones_are_kept_and_nothing_that_is_not_ours_is_removed(tmp_path: Path) -> None:
    async def main() -> None:
        for name in ("step_1", "notes", "step_000000001.backup", "step_000000001.saving-ffffffffffffffff"):
            (tmp_path / name).mkdir()
        for step in range(1, 6):
            saved = await save(tmp_path, small_model(), Layout(dp=2), step=step, keep=3)
            removed = (tmp_path / f"step_{step - 3:09d}",) if step > 3 else ()
            assert [one.removed for one in saved] == [removed, removed]
        names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
        kept = [f"step_{step:09d}" for step in (3, 4, 5)]
        assert names == sorted([*kept, "notes", "step_000000001.backup", "step_1"])

    run_virtual(main())


def test_what_was_just_saved_is_kept_even_if_later_steps_are_there(tmp_path: Path) -> None:
    async def main() -> None:
        for step in (10, 20):
            await save(tmp_path, small_model(), Layout(), step=step)
        await save(tmp_path, small_model(), Layout(), step=5, keep=1)
        names = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
        assert names == ["step_000000005", "step_000000020"]

    run_virtual(main())


def test_old_ones_that_cannot_be_removed_are_told_and_no_error(tmp_path: Path) -> None:
    class Sticky(NoSync):
        def remove_folder(self, path: Path) -> None:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    async def main() -> None:
        await save(tmp_path, small_model(), Layout(dp=2), step=1)
        saved = await save(tmp_path, small_model(), Layout(dp=2), step=2, keep=1, files=Sticky())
        assert "Permission denied" in str(saved[0].left)
        assert saved[0].left == saved[1].left
        assert saved[0].removed == ()
        await load_and_check(tmp_path, small_model(), Layout())

    run_virtual(main())


def test_a_link_that_looks_unfinished_is_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("still here")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "step_000000001.saving-0123456789abcdef").symlink_to(tmp_path / "precious")
    run_virtual(save(folder, small_model(), Layout()))
    assert (tmp_path / "precious" / "file").read_text() == "still here"
    assert sorted(path.name for path in folder.iterdir()) == [".saving.lock", "step_000000001"]


def test_two_saves_into_one_folder_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The second is refused on all its ranks; the first comes off."""

    async def main() -> None:
        gate = Gate()
        async with local_world(2) as nodes, local_world(2) as others:
            calls = [saving(node, tmp_path, small_model(), Layout(dp=2), step=1, files=gate) for node in nodes]
            running = [asyncio.ensure_future(call) for call in calls]
            await gate.reached.wait()
            errors = await each_fails(others, lambda node: saving(node, tmp_path, small_model(), Layout(dp=2), step=2))
            assert_all_raise(errors, "another save into this folder is under way")
            gate.open()
            await asyncio.gather(*running)
        await load_and_check(tmp_path, small_model(), Layout())

    run_virtual(main())


def test_a_kept_checkpoint_that_is_a_link_is_removed_and_not_followed(tmp_path: Path) -> None:
    folder, archive = tmp_path / "folder", tmp_path / "archive"

    async def main() -> None:
        await save(archive, small_model(), Layout(dp=2), step=1)
        before = {path.name: path.read_bytes() for path in (archive / "step_000000001").iterdir()}
        folder.mkdir()
        (folder / "step_000000001").symlink_to(archive / "step_000000001")
        for step in (2, 3):
            await save(folder, small_model(), Layout(dp=2), step=step, keep=1)
        assert {path.name: path.read_bytes() for path in (archive / "step_000000001").iterdir()} == before
        assert sorted(path.name for path in folder.iterdir()) == [".saving.lock", "step_000000003"]
        await load_and_check(archive, small_model(), Layout())

    run_virtual(main())


def test_no_file_is_made_where_a_link_with_the_name_of_the_lock_points(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / ".saving.lock").symlink_to(tmp_path / "elsewhere")
        async with local_world(1) as nodes:
            errors = await each_fails(nodes, lambda node: saving(node, tmp_path, small_model(), Layout(), step=1))
        assert_all_raise(errors, "symbolic link")
        assert not (tmp_path / "elsewhere").exists()

    run_virtual(main())
