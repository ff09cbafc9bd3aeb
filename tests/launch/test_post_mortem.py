"""The post-mortem: what is in the folder after any death, and that a job that ends well leaves nothing."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.observe.rank_reports import FailureReport
from asyncpar.core.observe.recorder import Recorder
from asyncpar.core.observe.records import EventKind, RankIdentity, image_bytes
from asyncpar.errors import UsageError
from asyncpar.launch.failure import RankEnd
from asyncpar.launch.post_mortem import LOG_BYTES, PostMortem, TailFile, redacted, summarize
from asyncpar.observe.image import read_image
from tests.launch.conftest import LIMIT, Launcher
from tests.soak import first

WORK = """
    import asyncio
    from pathlib import Path
    import numpy as np
    import asyncpar as ap

    WAITS = Path(__file__).with_name("waits")

    async def main():
        async with ap.init() as node:
            x = np.ones(1024, np.float32)
            await node.world.all_reduce(x)
            print("at work", flush=True)
            register()
            if rank == 1:
                while sys.argv[1] == "wait" or not WAITS.exists():
                    await asyncio.sleep(0.01)
                if sys.argv[1] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if sys.argv[1] == "raise":
                    raise ValueError("bad thing")
            waiting = asyncio.ensure_future(node.world.all_reduce(x))
            await asyncio.sleep(0)
            WAITS.touch()
            await waiting

    ap.run(main)
"""


def place(rank: int = 0) -> LaunchEnvironment:
    return LaunchEnvironment(
        rank=rank,
        local_rank=rank,
        world_size=2,
        local_world_size=2,
        group_rank=0,
        group_world_size=1,
        master_addr="127.0.0.1",
        master_port=1,
        rendezvous="127.0.0.1:1",
        secret_file="/nowhere",
        job="job",
        generation=0,
        restart_count=0,
        host="a",
        host_id="a",
        bind="127.0.0.1",
        timeout=1.0,
    )


def open_folder(directory: Path) -> PostMortem:
    return PostMortem.open(str(directory), job="my job/1", host="a", command=["python", "x.py"], environment={})


def only_folder(directory: Path) -> Path:
    (folder,) = directory.iterdir()
    return folder


@pytest.mark.parametrize("how", first(1, ["raise", "kill"]))
def test_a_failed_job_leaves_rings_logs_and_a_summary(launcher: Launcher, how: str) -> None:
    remains = launcher.directory / "remains"
    done = launcher.run("--nproc-per-node", "2", "--post-mortem", str(remains), launcher.script(WORK), how)
    assert done.returncode != 0
    folder = only_folder(remains)
    assert str(folder) in done.stderr, "the launcher says where it is"
    text = (folder / "summary.txt").read_text()
    assert "rank 1: was killed by SIGKILL" in text if how == "kill" else "ValueError: bad thing" in text
    assert "all_reduce #2 of world, called at job.py:" in text, "what rank 0 waited in"
    assert {path.name for path in (folder / "rings").iterdir()} == {"0-0.ring", "0-1.ring"}
    for ring in (folder / "rings").iterdir():
        assert [event.name for event in read_image(ring.read_bytes()).operations][:1] == ["all_reduce"]
    assert (folder / "logs" / "0-1.stdout").read_text() == "at work\n"
    assert json.loads((folder / "job.json").read_text())["command"][-1] == how
    assert folder.stat().st_mode & 0o077 == 0


def test_a_crash_leaves_its_stack_and_survivors_theirs(launcher: Launcher) -> None:
    remains = launcher.directory / "remains"
    script = launcher.script("""
        import asyncio, ctypes
        import asyncpar as ap

        async def main():
            async with ap.init() as node:
                await node.world.barrier()
                if rank == 1:
                    while not os.path.exists("sleeps"):
                        await asyncio.sleep(0.01)
                    ctypes.string_at(0)
                open("sleeps", "w").close()
                time.sleep(60.0)  # hears nothing

        ap.run(main)
    """)
    options = ("--nproc-per-node", "2", "--grace-period", "1")
    done = launcher.run(*options, "--post-mortem", str(remains), script)
    assert done.returncode != 0
    where = f"Fatal Python error: Segmentation fault, in string_at at {ctypes.__file__}:"
    assert f"was killed by SIGSEGV ({where}" in done.stderr
    text = (only_folder(remains) / "summary.txt").read_text()
    assert "rank 1: was killed by SIGSEGV" in text
    assert "    stack: Fatal Python error: Segmentation fault, at job.py:" in text
    survivor = (only_folder(remains) / "stacks" / "0-0.txt").read_text()
    assert "time.sleep(60.0)  # hears nothing" in survivor
    assert f"    stack: {launcher.directory}" in text


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system with 64 kB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


TALKATIVE = """
    import asyncpar as ap

    async def main():
        async with ap.init() as node:
            await node.world.barrier()
            print("at work" * 20_000, flush=True)
            if sys.argv[1] == "raise":
                raise ValueError("bad thing")

    ap.run(main)
"""


@pytest.mark.parametrize("how", first(1, ["raise", "go"]))
def test_a_full_disk_leaves_the_job_undisturbed(launcher: Launcher, tiny: Path, how: str) -> None:
    done = launcher.run("--post-mortem", str(tiny / "remains"), launcher.script(TALKATIVE), how)
    if how == "go":
        assert done.returncode == 0, done.stderr
        assert not (tiny / "remains").exists()
        return
    assert done.returncode == 1
    assert "rank 0 failed first: ValueError: bad thing" in done.stderr
    assert f"post-mortem: {only_folder(tiny / 'remains')} has no summary: No space left on device" in done.stderr
    assert not list(tiny.rglob("*.new"))


def test_a_job_that_ends_well_leaves_nothing(launcher: Launcher) -> None:
    remains = launcher.directory / "remains"
    done = launcher.run("--post-mortem", str(remains), launcher.script(TALKATIVE), "go")
    assert done.returncode == 0, done.stderr
    assert not remains.exists()


def test_a_launcher_that_is_killed_is_explained_too(launcher: Launcher) -> None:
    remains = launcher.directory / "remains"
    job = launcher.start("--nproc-per-node", "2", "--post-mortem", str(remains), launcher.script(WORK), "wait")
    limit = time.monotonic() + LIMIT
    while len(launcher.registered()) < 2 or not (launcher.directory / "waits").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate(timeout=LIMIT)
    while not (found := list(remains.glob("*/summary.txt"))):
        assert time.monotonic() < limit, "the reaper starts what writes it"
        time.sleep(0.05)
    text = found[0].read_text()
    host = json.loads((found[0].parent / "job.json").read_text())["host"]
    assert f"The launcher on {host} (pid {job.pid}) was killed" in text
    assert "rank 0 waits for rank 1 in all_reduce(float32[1024], sum) at job.py:" in text
    assert "under way: all_reduce #2 of world, called at job.py:" in text


def test_a_directory_that_cannot_be_written_is_reported_at_once(launcher: Launcher) -> None:
    (launcher.directory / "file").write_text("")
    done = launcher.run("--post-mortem", str(launcher.directory / "file"), launcher.script("print(1)"))
    assert done.returncode == 2
    assert "--post-mortem" in done.stderr
    assert "Traceback" not in done.stderr


def test_secrets_are_redacted() -> None:
    found = redacted(
        {
            "AWS_SECRET_ACCESS_KEY": "x",
            "GITHUB_TOKEN": "x",
            "DB_PASSWORD": "x",
            "WANDB_API_KEY": "x",
            "ASYNCPAR_SECRET_FILE": "/x",
            "DATABASE_URL": "postgres://me:x@host/db",
            "HOME": "/root",
        }
    )
    assert found["HOME"] == "/root"
    assert found["DATABASE_URL"] == "postgres://me:<redacted>@host/db"
    assert {value for name, value in found.items() if name not in ("HOME", "DATABASE_URL")} == {"<redacted>"}


def test_the_last_output_is_kept_in_bounded_files(tmp_path: Path) -> None:
    path = tmp_path / "out"
    tail = TailFile(path)
    line = b"%063d\n"
    for number in range(LOG_BYTES // 64 * 3):
        tail.write(line % number)
    tail.close()
    tail.write(b"late")
    kept = path.with_name("out.1").read_bytes() + path.read_bytes()
    assert kept.endswith(line % (LOG_BYTES // 64 * 3 - 1))
    assert LOG_BYTES // 2 <= len(kept) <= LOG_BYTES
    assert kept[:64] == line % int(kept[:63])


def test_a_full_disk_stops_the_log_and_not_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    tail = TailFile(tmp_path / "out")
    remains = open_folder(tmp_path / "d")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        patched.setattr(os, "posix_fallocate", full)
        tail.write(b"x")
        tail.write(b"y")
        with pytest.raises(OSError, match="No space"):
            remains.make_ring(place())
    assert list((remains.folder / "rings").iterdir()) == []
    TailFile(tmp_path / "missing" / "out").write(b"x")


def test_folders_with_files_missing_or_torn_are_explained_as_far_as_possible(tmp_path: Path) -> None:
    remains = open_folder(tmp_path)
    descriptor = remains.make_ring(place(0))
    assert os.fstat(descriptor).st_size == image_bytes()
    os.close(descriptor)
    assert "rank 0: no end of it was seen\n    it has made no node" in summarize(remains.folder)
    with (remains.folder / "rings" / "0-0.ring").open("r+b") as file:
        file.write(b"garbage!")
    report = FailureReport(type_name="ValueError", message="one\ntwo", traceback="...")
    for rank in (0, 1):
        remains.add_end(
            RankEnd(generation=0, rank=rank, local_rank=rank, host="a", pid=1, returncode=1, at=0.0, report=report)
        )
    with (remains.folder / "ends.jsonl").open("a") as file:
        file.write('{"generation": 0, "ra')
    (remains.folder / "job.json").unlink()
    text = summarize(remains.folder, message="rank 0 failed first")
    assert "rank 0 failed first" in text
    assert "rank 0: exited with code 1: ValueError: one\n    its ring cannot be read" in text
    assert "rank 1: exited with code 1: ValueError: one\n    its ring is missing" in text


def test_operations_under_way_are_reported_with_place_and_time(tmp_path: Path) -> None:
    remains = open_folder(tmp_path)
    descriptor = remains.make_ring(place(0))
    now = [10.0]
    memory = mmap.mmap(descriptor, image_bytes())
    recorder = Recorder(memory, RankIdentity(rank=0, size=1, wall=1000.0), clock=lambda: now[0])
    for number in range(5):
        recorder.begin(EventKind.SPAN, recorder.name(f"load {number}"))
        now[0] += 1.0
    os.close(descriptor)
    text = summarize(remains.folder)
    assert "under way: load 0, for 4.000 s" in text
    assert "and 2 more" in text


def test_a_name_that_is_no_file_name_is_made_one(tmp_path: Path) -> None:
    assert open_folder(tmp_path).folder.name == f"my_job_1-a-{os.getpid()}"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        open_folder(tmp_path / "file")
