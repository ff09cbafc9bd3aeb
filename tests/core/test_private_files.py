"""Files that only their user can read; what links point to stays as it is."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from asyncpar.checkpoint.files import LocalFiles
from asyncpar.core.private_files import (
    append_private,
    make_private_folder,
    open_private,
    remove_tree,
    write_private,
)
from asyncpar.dashboard.run_file import RUN_FILE, write_run
from asyncpar.hosts.votes import DirectoryDisk
from asyncpar.launch.command_line import write_result
from asyncpar.launch.options import Streams, parse_streams
from asyncpar.launch.post_mortem import TailFile
from asyncpar.launch.rank_output import RankLogs
from asyncpar.launch.reaper import remove
from asyncpar.observe.dump_folder import write_dumps


@pytest.fixture(autouse=True)
def open_mask() -> Iterator[None]:
    """Give new files to everyone, unless they say otherwise."""
    before = os.umask(0)
    yield
    os.umask(before)


def write_log(path: Path) -> None:
    logs = RankLogs(
        path.parent.parent.parent, redirects=parse_streams("--redirects", "1"), tee=parse_streams("--tee", "0")
    )
    file = logs.open(Streams.STDOUT, attempt=0, rank=1)
    assert file is not None
    file.write(b"new")
    file.close()


def write_opened(path: Path) -> None:
    descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, b"new")
    os.close(descriptor)


def write_tail(path: Path) -> None:
    tail = TailFile(path)
    tail.write(b"new")
    tail.close()


WRITERS: dict[str, Callable[[Path], None]] = {
    "private": lambda path: write_private(path, b"new"),
    "opened": write_opened,
    "appended": lambda path: append_private(path, b"new"),
    "result of a command": lambda path: write_result(path, b"new"),
    "last output": write_tail,
    "attempt_0/1/stdout.log": write_log,
    RUN_FILE: lambda path: write_run(path.parent, {"lines": []}),
    "ranks.json": lambda path: write_dumps(path.parent, {}, {}),
    "votes": lambda path: DirectoryDisk(path.parent).replace(path.name, b"new"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_files_can_be_read_by_their_user_only(name: str, tmp_path: Path) -> None:
    path = tmp_path / "made" / name
    make_private_folder(path.parent)
    WRITERS[name](path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (path.parent, tmp_path / "made"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [one.name for one in path.parent.iterdir()] == [path.name], "a draft is left"


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("beside", ["", ".new"])
def test_what_a_link_in_the_way_points_to_stays(name: str, beside: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("still here")
    precious.chmod(0o644)
    path = tmp_path / "made" / name
    path.parent.mkdir(parents=True)
    path.with_name(f"{path.name}{beside}").symlink_to(precious)
    WRITERS[name](path)
    assert precious.read_text() == "still here"
    assert stat.S_IMODE(precious.stat().st_mode) == 0o644
    assert not path.is_symlink()


def test_log_files_are_not_written_through_a_folder_that_is_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious" / "1"
    precious.mkdir(parents=True)
    (precious / "stdout.log").write_text("still here")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "attempt_0").symlink_to(precious.parent)
    with pytest.raises(OSError, match="a symbolic link, which is not followed"):
        write_log(tmp_path / "logs" / "attempt_0" / "1" / "stdout.log")
    assert (precious / "stdout.log").read_text() == "still here"


REMOVERS: dict[str, Callable[[Path], None]] = {
    "tree": remove_tree,
    "reaper": lambda path: remove(str(path)),
    "checkpoint": LocalFiles().remove_folder,
}


@pytest.mark.parametrize("name", REMOVERS)
@pytest.mark.parametrize("is_inside", [False, True])
def test_of_a_link_the_link_alone_is_removed(name: str, is_inside: bool, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("still here")
    path = tmp_path / "gone"
    if is_inside:
        path.mkdir()
        (path / "link").symlink_to(precious)
    else:
        path.symlink_to(precious)
    REMOVERS[name](path)
    assert not path.is_symlink()
    assert not path.exists()
    assert (precious / "file").read_text() == "still here"
