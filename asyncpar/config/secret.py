"""The rules for a job secret: how long, and who may read the file that holds it."""

from __future__ import annotations

import stat

from asyncpar.errors import UsageError

SECRET_BYTES = 32


def check_private_file(what: str, path: str, *, mode: int, owner: int, user: int) -> None:
    """Raise ``UsageError``, which begins with ``what``, unless ``path`` is a file that only ``user`` can read.

    ``mode`` and ``owner`` are those of the file; root may own it too.
    """
    if not stat.S_ISREG(mode):
        raise UsageError(f"{what}: expected a regular file, {path} is none")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(
            f"{what}: {path} is accessible to others (mode {stat.S_IMODE(mode):04o}); run: chmod 600 {path}"
        )
    if owner not in (user, 0):
        raise UsageError(f"{what}: {path} belongs to user {owner}; expected user {user} or root")


def check_secret_file(path: str, *, mode: int, owner: int, user: int, content: bytes) -> bytes:
    """Return ``content`` if it may serve as the secret of a job; raise ``UsageError`` that says what to change.

    ``mode`` and ``owner`` are those of the file, ``user`` the effective user of this process.
    """
    check_private_file("secret file", path, mode=mode, owner=owner, user=user)
    if len(content) < SECRET_BYTES:
        raise UsageError(
            f"secret file: expected at least {SECRET_BYTES} bytes in {path}, got {len(content)}; "
            f"run: head -c {SECRET_BYTES} /dev/urandom > {path}"
        )
    return content
