"""Where an agent gets the job's secret from, and the private file that its ranks read it from."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from asyncpar.errors import UsageError
from asyncpar.launch.guard import Guard
from asyncpar.launch.options import LaunchOptions
from asyncpar.launch.site import Site
from asyncpar.membership.secret_file import create_secret, read_secret


@dataclass(frozen=True, slots=True)
class JobSecret:
    """The secret, and the file with it that ranks are told of."""

    secret: bytes
    path: Path

    def __repr__(self) -> str:
        return f"JobSecret(<secret>, {self.path})"


def check_secret_options(options: LaunchOptions, site: Site) -> None:
    """Raise ``UsageError`` if this job needs a secret file and has none, or one that will not do."""
    if options.secret_file is not None:
        read_secret(options.secret_file)
    elif options.nnodes > 1 and not site.is_private:
        raise UsageError(
            "--secret-file: needed when agents meet over a network; make one with "
            "(umask 077; head -c 32 /dev/urandom > secret) and copy it to every host"
        )


def obtain_secret(options: LaunchOptions, site: Site, guard: Guard, stack: ExitStack) -> JobSecret:
    """Return the secret of this job; what was made for it is removed when ``stack`` closes, or by ``guard``.

    That is the content of the secret file, if there is one.  A job on this machine alone gets a new one; agents that
    meet on loopback share it through a directory that only this user can enter.
    """
    if options.secret_file is not None:
        return JobSecret(read_secret(options.secret_file), Path(options.secret_file).absolute())
    if options.nnodes > 1:
        path = _shared_directory() / hashlib.sha256(f"{site.coordinator} {site.job}".encode()).hexdigest()[:32]
        return JobSecret(_share(path, guard, stack), path)
    directory = Path(tempfile.mkdtemp(prefix="asyncpar-"))  # mode 0700
    guard.add_path(directory)
    path = directory / "secret"
    stack.callback(directory.rmdir)
    secret = create_secret(path)
    stack.callback(path.unlink)
    return JobSecret(secret, path)


def _share(path: Path, guard: Guard, stack: ExitStack) -> bytes:
    """Read the secret at ``path``, or make it if we are the first."""
    try:
        secret = create_secret(path)
    except FileExistsError:
        return read_secret(path)
    guard.add_path(path)
    stack.callback(path.unlink, missing_ok=True)
    return secret


def _shared_directory() -> Path:
    path = Path(tempfile.gettempdir()) / f"asyncpar-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(f"--secret-file: {path} is not a private directory of this user; give a secret file instead")
    return path
