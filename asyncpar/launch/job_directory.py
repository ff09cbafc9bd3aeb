"""Directories by which commands find the jobs of launchers: ``$XDG_RUNTIME_DIR/asyncpar/JOB-PID/``.

The directories are private (0700): only the user who runs a job can inspect it.  Each has ``job.json`` and a socket,
``control``.  Without XDG_RUNTIME_DIR they are in the user's directory below the one for temporary files.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import psutil

from asyncpar.core.private_files import remove_tree, write_private
from asyncpar.errors import LaunchError, UsageError
from asyncpar.net.membership.private_directory import private_directory

_RUNTIME: Final = "XDG_RUNTIME_DIR"
_LONGEST_NAME: Final = 32
_ENTRY: Final = "job.json"
_SOCKET: Final = "control"
_FALLBACK: Final = "jobs"
_TRIES: Final = 5


class JobEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A job that runs on this host; ``is_whole``: its launcher sees all hosts of the job."""

    job: str
    pid: int
    host: str
    started: float
    command: tuple[str, ...]
    is_whole: bool = True
    born: float = 0.0
    """When the process began, which distinguishes it from another one with its number."""
    directory: str = ""
    agent: str = ""
    """The address of the agent (``host:port``); "" for a launcher."""

    @property
    def socket_path(self) -> Path:
        return Path(self.directory) / _SOCKET

    @property
    def name(self) -> str:
        """The name of the job in commands: ``train-4711``."""
        return Path(self.directory).name

    @property
    def since(self) -> str:
        return time.strftime("%H:%M:%S", time.localtime(self.started))

    @property
    def is_alive(self) -> bool:
        """Whether its launcher runs."""
        return _born(self.pid) == self.born


def jobs_directory(environment: Mapping[str, str]) -> Path:
    """Return the directory of all jobs of this user, created if necessary.

    Another job that ends may remove it at any time, if it is empty.
    """
    runtime = environment.get(_RUNTIME, "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        directory = Path(runtime) / "asyncpar"
        for _ in range(_TRIES):
            try:
                directory.mkdir(mode=0o700, exist_ok=True)
                status = directory.lstat()
            except FileNotFoundError:  # a job has ended meanwhile, and removed the empty directory
                continue
            except OSError:
                break
            if (
                stat.S_ISDIR(status.st_mode)
                and status.st_uid == os.geteuid()
                and not stat.S_IMODE(status.st_mode) & 0o077
            ):
                return directory
            break
    directory = private_directory() / _FALLBACK
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def make_job_directory(environment: Mapping[str, str], entry: JobEntry) -> JobEntry:
    """Make the directory of a job that this process runs, and return its entry.  Raises ``OSError``.

    A process may run several parts of a job, each of which has a directory of its own.
    """
    plain = re.sub(r"[^A-Za-z0-9._]+", "_", entry.job)[:_LONGEST_NAME].strip("._") or "job"
    name = plain if plain.endswith(f"-{entry.pid}") else f"{plain}-{entry.pid}"
    for attempt in range(_TRIES):
        try:
            draft = jobs_directory(environment) / f".{secrets.token_hex(8)}"
            draft.mkdir(mode=0o700)
            break
        except FileNotFoundError:  # another job has ended meanwhile, and removed the empty directory
            if attempt == _TRIES - 1:
                raise
    entry = msgspec.structs.replace(entry, born=_born(entry.pid), started=time.time())
    write_private(draft / _ENTRY, msgspec.json.encode(entry))
    return msgspec.structs.replace(entry, directory=str(_place_directory(draft, name, entry.born)))


def _place_directory(draft: Path, name: str, born: float) -> Path:
    """Rename ``draft`` to ``name``, with a number appended if another part of this process, ``born`` then, has it."""
    for number in itertools.count(1):
        directory = draft.with_name(name if number == 1 else f"{name}.{number}")
        before = _read_entry(directory)
        if before is not None and before.born != born:
            _remove(directory)  # left by a dead process that had our number
        try:
            draft.rename(directory)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        else:
            return directory
    raise AssertionError("numbers do not end")


def _read_entry(directory: Path) -> JobEntry | None:
    """Return the entry of a job, None if there is none (yet, or any more)."""
    try:
        return msgspec.json.decode((directory / _ENTRY).read_bytes(), type=JobEntry)
    except (OSError, msgspec.DecodeError):
        return None


def remove_job_directory(entry: JobEntry) -> None:
    """Remove the directory of a job that has ended, and the empty ones around it if they belong to this user alone."""
    directory = Path(entry.directory)
    _remove(directory)
    with suppress(OSError):
        directory.parent.rmdir()
        if directory.parent.name == _FALLBACK:
            directory.parent.parent.rmdir()


def list_jobs(environment: Mapping[str, str]) -> list[JobEntry]:
    """Return the jobs of this user on this host, the newest first; directories left by dead ones are removed."""
    entries = []
    try:
        paths = sorted(jobs_directory(environment).iterdir())
    except FileNotFoundError:  # the last job has ended meanwhile, and removed the directory
        return []
    for path in paths:
        entry = _read_entry(path)
        if entry is None:
            continue  # being created or removed
        if entry.is_alive and path.name.startswith("."):
            continue  # being created
        if entry.is_alive:
            entries.append(msgspec.structs.replace(entry, directory=str(path)))
        else:
            _remove(path)
    return sorted(entries, key=lambda entry: -entry.started)


def find_job(environment: Mapping[str, str], name: str | None) -> JobEntry:
    """Return the job called ``name`` (None: the only one).

    Raises ``LaunchError`` if there is none, and ``UsageError`` with a list if there are several.
    """
    entries = list_jobs(environment)
    if name is not None:
        found = [entry for entry in entries if name in (entry.name, entry.job, str(entry.pid))]
    else:
        found = entries
    if not found:
        what = "no job of yours runs on this host" if name is None else f"JOB: none of yours here is called {name!r}"
        known = (
            f"; there {'is' if len(entries) == 1 else 'are'} {', '.join(one.name for one in entries)}"
            if entries
            else ""
        )
        raise LaunchError(what + known + _others())
    whole = [entry for entry in found if entry.is_whole]
    if len({entry.job for entry in found}) == 1 and len(whole) == 1:
        return whole[0]  # several hosts of one job, on this machine
    if len(found) > 1:
        lines = "".join(f"\n  {entry.name}  since {entry.since}: {' '.join(entry.command)[:80]}" for entry in found)
        raise UsageError(f"JOB: expected the name of one of {len(found)} jobs that run here:{lines}")
    return found[0]


def _others() -> str:
    """Return a sentence about launchers of other users on this host, "" if there are none."""
    users = set()
    for process in psutil.process_iter(["cmdline", "uids"]):
        words, uids = process.info["cmdline"] or [], process.info["uids"]
        is_launcher = "launch" in words[:4] and any("asyncpar" in word for word in words[:4])
        if is_launcher and uids is not None and uids.real != os.getuid():
            with suppress(psutil.Error, KeyError):
                users.add(process.username())
    if not users:
        return ""
    return f"; jobs of other users run here ({', '.join(sorted(users))}), and only they can inspect them"


def _born(pid: int) -> float:
    try:
        return float(psutil.Process(pid).create_time())
    except (psutil.Error, OSError):  # too many open files, for instance
        return -1.0


def _remove(directory: Path) -> None:
    remove_tree(directory)
