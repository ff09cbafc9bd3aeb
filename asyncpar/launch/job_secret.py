"""Where an agent gets the job's secret from, and the private file that its ranks read it from."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from asyncpar.core.config.secret import Secret
from asyncpar.errors import LaunchError, UsageError
from asyncpar.launch.guard import Guard
from asyncpar.launch.options import LaunchOptions
from asyncpar.launch.site import Site
from asyncpar.net.membership.credentials import create_secret, read_secret, write_secret


@dataclass(frozen=True, slots=True)
class JobSecret:
    """The secret, and the file with it that ranks are told of.

    ``meeting_place`` is where agents on one machine find the secret until all are there.  An agent that waited in vain
    leaves it, for others may still wait with the same secret.
    """

    secret: Secret
    path: Path
    meeting_place: Path | None = None

    def clear_meeting_place(self) -> None:
        """Take the secret away from there: all agents have it, and the next job of that name makes another."""
        if self.meeting_place is not None:
            self.meeting_place.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"JobSecret(<secret>, {self.path})"


def check_secret_options(options: LaunchOptions, site: Site) -> None:
    """Raise ``UsageError`` if this job needs a secret file and has none, or one that will not do."""
    if options.secret_file is not None:
        read_secret(options.secret_file)
    elif options.nnodes > 1 and not site.is_private:
        raise UsageError(
            "--secret-file: needed when agents meet over a network; make one with "
            "(umask 077; head -c 32 /dev/urandom > secret) and copy it to every host, or use `asyncpar certs init` "
            "and --certs, which encrypts, too"
        )


def obtain_secret(options: LaunchOptions, site: Site, guard: Guard, stack: ExitStack) -> JobSecret:
    """Return the secret of this job; the private file for the ranks is removed when ``stack`` closes, or by ``guard``.

    The secret is the content of the secret file, if there is one.  A job on this machine alone gets a new one; agents
    that meet on loopback share one through a directory that only this user can enter.
    """
    if options.secret_file is not None:
        return JobSecret(read_secret(options.secret_file), Path(options.secret_file).absolute())
    try:
        return _make_files(options, site, guard, stack)
    except OSError as error:
        raise LaunchError(f"the file with the job's secret cannot be made: {error}") from error


def _make_files(options: LaunchOptions, site: Site, guard: Guard, stack: ExitStack) -> JobSecret:
    directory = Path(tempfile.mkdtemp(prefix="asyncpar-"))  # mode 0700
    guard.add_path(directory)
    stack.callback(directory.rmdir)
    path = directory / "secret"
    if options.nnodes == 1:
        secret, meeting_place = create_secret(path), None
    else:
        meeting_place = _shared_directory() / _shared_name(site)
        secret = _share(meeting_place)
        write_secret(path, secret)
    stack.callback(path.unlink, missing_ok=True)
    return JobSecret(secret, path, meeting_place)


def _shared_name(site: Site) -> str:
    return hashlib.sha256(f"{site.coordinator} {site.job}".encode()).hexdigest()[:32]


def _share(path: Path) -> Secret:
    """Read the secret at ``path``, or make it if we are the first."""
    try:
        return create_secret(path)
    except FileExistsError:
        return read_secret(path)


def _shared_directory() -> Path:
    path = Path(tempfile.gettempdir()) / f"asyncpar-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(f"--secret-file: {path} is not a private directory of this user; give a secret file instead")
    return path
