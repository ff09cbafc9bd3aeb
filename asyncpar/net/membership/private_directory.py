"""Directories of one user that nobody else can enter: one below the directory of temporary files, and named ones."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError


def private_directory() -> Path:
    """Return this user's directory for secrets that processes of this machine share; nobody else can enter it."""
    return make_private(Path(tempfile.gettempdir()) / f"asyncpar-{os.geteuid()}", "--secret-file")


def make_private(path: Path, setting: str) -> Path:
    """Create the directory ``path`` if it does not exist, and return it.

    Raises ``UsageError`` naming ``setting`` if others can enter it, or it cannot be created.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise UsageError(f"{setting}: {path} cannot be made: {os_reason(error)}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise UsageError(f"{setting}: {path} is not a private directory of this user; give another one")
    return path
