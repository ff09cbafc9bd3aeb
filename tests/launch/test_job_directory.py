"""Commands find jobs by their directories, which are private, and say in words which ones there are."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from asyncpar.errors import LaunchError, UsageError
from asyncpar.launch.job_directory import (
    JobEntry,
    find_job,
    jobs_directory,
    list_jobs,
    make_job_directory,
    remove_job_directory,
)


def entry(job: str, pid: int | None = None, *, is_whole: bool = True) -> JobEntry:
    return JobEntry(
        job=job, pid=pid or os.getpid(), host="a", started=time.time(), command=("python", "t.py"), is_whole=is_whole
    )


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def test_a_job_is_found_by_name_number_and_alone(environment: dict[str, str]) -> None:
    made = make_job_directory(environment, entry("train"))
    assert made.name == f"train-{os.getpid()}"
    for name in (None, "train", made.name, str(os.getpid())):
        assert find_job(environment, name).socket_path == Path(made.directory) / "control"


def test_directories_are_private(environment: dict[str, str]) -> None:
    made = make_job_directory(environment, entry("train"))
    for path in (Path(made.directory), jobs_directory(environment)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_without_a_runtime_directory_they_are_in_a_private_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert jobs_directory({}) == tmp_path / f"asyncpar-{os.geteuid()}" / "jobs"
    assert jobs_directory({"XDG_RUNTIME_DIR": str(tmp_path / "absent")}).is_relative_to(tmp_path)


def test_a_runtime_directory_that_others_can_enter_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "asyncpar").mkdir(mode=0o755)
    assert jobs_directory({"XDG_RUNTIME_DIR": str(tmp_path)}).name == "jobs"


def test_no_job_is_reported(environment: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match="no job of yours runs on this host"):
        find_job(environment, None)
    make_job_directory(environment, entry("train"))
    with pytest.raises(LaunchError, match=r"none of yours here is called 'eval'; there is train-\d+"):
        find_job(environment, "eval")


class Running:
    """A process of ``user`` ("": one that has ended), as psutil shows it."""

    def __init__(self, user: str, *words: str, uid: int) -> None:
        self.user = user
        self.info = {"cmdline": list(words), "uids": SimpleNamespace(real=uid)}

    def username(self) -> str:
        if not self.user:
            raise psutil.NoSuchProcess(1)
        return self.user


def test_jobs_of_other_users_are_named_and_nothing_else_of_them(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    python, other = ("/usr/bin/python", "-m", "asyncpar", "launch", "t.py"), os.getuid() + 1
    found = [
        *(Running(user, *python, uid=other) for user in ("eva", "ada", "eva", "")),
        Running("bob", "/usr/bin/vi", "asyncpar.txt", uid=other),
        Running("me", *python, uid=os.getuid()),
    ]
    monkeypatch.setattr(psutil, "process_iter", lambda _: iter(found))
    with pytest.raises(LaunchError) as raised:
        find_job(environment, None)
    assert str(raised.value) == (
        "no job of yours runs on this host; jobs of other users run here (ada, eva), and only they can inspect them"
    )


def test_several_jobs_are_listed(environment: dict[str, str]) -> None:
    others = [process.pid for process in psutil.process_iter() if process.pid != os.getpid()][:1]
    make_job_directory(environment, entry("train"))
    make_job_directory(environment, entry("eval", others[0]))
    with pytest.raises(
        UsageError, match=r"one of 2 jobs that run here:\n.*eval-\d+.*\n.*train-\d+|train-\d+"
    ) as raised:
        find_job(environment, None)
    assert "eval-" in str(raised.value)
    assert find_job(environment, "eval").job == "eval"


def test_hosts_of_one_job_on_one_machine_are_one_job(environment: dict[str, str]) -> None:
    others = [process.pid for process in psutil.process_iter() if process.pid != os.getpid()][:1]
    make_job_directory(environment, entry("train", others[0], is_whole=False))
    whole = make_job_directory(environment, entry("train"))
    assert find_job(environment, None) == find_job(environment, whole.name)
    assert find_job(environment, None).is_whole


def test_parts_of_a_job_in_one_process_are_one_job_and_have_directories_of_their_own(
    environment: dict[str, str],
) -> None:
    """Places of an engine may be in the caller's own process."""
    parts = [make_job_directory(environment, entry("train", is_whole=False)) for _ in range(2)]
    whole = make_job_directory(environment, entry("train"))
    names = [made.name for made in (*parts, whole)]
    assert names == [f"train-{os.getpid()}{tail}" for tail in ("", ".2", ".3")]
    for name in (None, "train", str(os.getpid()), whole.name):
        assert find_job(environment, name) == find_job(environment, whole.name)
    assert find_job(environment, parts[1].name).name == parts[1].name
    remove_job_directory(parts[0])
    assert [one.name for one in list_jobs(environment)] == [whole.name, parts[1].name]


def test_directories_that_are_being_made_are_no_jobs(environment: dict[str, str]) -> None:
    made = make_job_directory(environment, entry("train"))
    Path(made.directory).rename(Path(made.directory).with_name(".draft"))
    assert list_jobs(environment) == []


def test_what_a_dead_launcher_left_is_removed(environment: dict[str, str]) -> None:
    dead = make_job_directory(environment, entry("train", 2**22 - 3))  # no process has this number
    alive = make_job_directory(environment, entry("eval"))
    path = Path(dead.directory) / "job.json"
    path.write_bytes(path.read_bytes().replace(b'"born":-1.0', b'"born":1.0'))
    (jobs_directory(environment) / "torn").mkdir()
    assert [one.name for one in list_jobs(environment)] == [alive.name]
    assert not Path(dead.directory).exists()


def test_names_that_are_no_file_names(environment: dict[str, str]) -> None:
    made = make_job_directory(environment, entry("../../etc/" + "x" * 300))
    assert Path(made.directory).parent == jobs_directory(environment)
    assert find_job(environment, "../../etc/" + "x" * 300).name == made.name


@pytest.mark.parametrize("call", range(4))
def test_the_directory_of_jobs_may_be_removed_at_any_time(
    call: int, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that ends removes it, if it is empty: here before the ``call``-th system call in it."""
    calls = iter(range(100))
    directory = Path(environment["XDG_RUNTIME_DIR"]) / "asyncpar"

    def removing(original: Callable[..., Any]) -> Callable[..., Any]:
        def remove_and_call(path: Path, *args: Any, **settings: Any) -> Any:
            if path.is_relative_to(directory) and next(calls) == call:
                with suppress(OSError):
                    directory.rmdir()
            return original(path, *args, **settings)

        return remove_and_call

    for name in ("mkdir", "lstat", "iterdir"):
        monkeypatch.setattr(Path, name, removing(getattr(Path, name)))
    assert list_jobs(environment) == []
    made = make_job_directory(environment, entry("train"))
    assert Path(made.directory).parent == directory
    assert [one.name for one in list_jobs(environment)] == [made.name]
