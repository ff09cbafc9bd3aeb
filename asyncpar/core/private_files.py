"""Files that only their user can read, and writes that never follow a symbolic link.

The output of ranks, their stacks and their records are private to the user who runs them, whatever the umask is.

A process that can write to one of our folders could put a link where we are about to write: such a link is replaced,
not followed.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_PRIVATE: Final = 0o600
_NO_FOLLOW: Final[int] = getattr(os, "O_NOFOLLOW", 0)  # Windows has no such flag


def make_private_folder(path: Path, *, under: Path | None = None) -> None:
    """Make the folder ``path`` and its missing parents; only this user can enter the new ones.

    No folder between ``under``, which is ours, and ``path`` may be a link: ``OSError`` names one that is.
    """
    missing = []
    above = path
    while not above.is_dir():
        missing.append(above)
        above = above.parent
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    if under is not None:
        for folder in (path, *path.parents):
            if folder == under:
                break
            refuse_link(folder)


def refuse_link(path: Path) -> None:
    """Raise ``OSError`` if ``path`` is a symbolic link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "a symbolic link, which is not followed", str(path))


def open_private(path: str | Path, flags: int) -> int:
    """Open ``path`` with the ``flags`` of ``os.open`` as a plain file for this user alone, and return its descriptor.

    An existing file gets that mode, too.  A link is replaced by a new file if ``flags`` allow creating one.
    """
    flags |= _NO_FOLLOW
    try:
        descriptor = os.open(path, flags, _PRIVATE)
    except OSError as error:
        if error.errno != errno.ELOOP or not flags & os.O_CREAT or not os.path.islink(path):
            raise
        os.unlink(path)
        descriptor = os.open(path, flags | os.O_EXCL, _PRIVATE)
    if hasattr(os, "fchmod") and stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, _PRIVATE)
    return descriptor


def open_unnamed(name: str) -> int:
    """Return a descriptor of an empty file without a name in any folder: in memory where the system supports it.

    ``name`` is shown in listings of a process's descriptors.  Raises ``OSError``.
    """
    make = getattr(os, "memfd_create", None)
    if make is not None:
        return int(make(name))
    descriptor, path = tempfile.mkstemp(prefix="asyncpar-")
    try:
        os.unlink(path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_private(path: Path, content: bytes) -> None:
    """Replace the content of the file ``path`` atomically, for this user alone.  Raises ``OSError``.

    A link of that name is replaced; its target stays unchanged.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def append_private(path: Path, content: bytes) -> None:
    """Append ``content`` to the file ``path``, created for this user alone if missing.  Raises ``OSError``."""
    descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)


def remove_tree(path: Path) -> None:
    """Remove the folder ``path`` with its contents, as far as possible; of a link, the link alone."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
