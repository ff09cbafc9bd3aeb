"""The secret of a job: a type that hides it, its length, and the checks of the file that holds it."""

from __future__ import annotations

import stat

from asyncpar.errors import UsageError

SECRET_BYTES = 32


class Secret(bytes):
    """Bytes that no traceback, log line or formatted text shows; otherwise like any ``bytes``.

    Values derived from them (a slice, a copy by ``bytes(...)``) are plain bytes again.
    """

    def __repr__(self) -> str:
        return f"<{len(self)} secret bytes>"

    __str__ = __repr__

    def __format__(self, _: str) -> str:
        return repr(self)


class SecretText(str):
    """Text that no traceback or log line shows, like ``Secret``; only ``str.encode`` and the like reveal it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{len(self)} secret characters>"

    __str__ = __repr__

    def __format__(self, _: str) -> str:
        return repr(self)


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


def check_secret_file(
    path: str, *, mode: int, owner: int, user: int, content: Secret, what: str = "secret file"
) -> Secret:
    """Return ``content`` if it may serve as the secret of a job; raise ``UsageError`` that says what to change.

    It begins with ``what``.

    ``mode`` and ``owner`` are those of the file, ``user`` the effective user of this process.
    """
    check_private_file(what, path, mode=mode, owner=owner, user=user)
    if len(content) < SECRET_BYTES:
        raise UsageError(
            f"{what}: expected at least {SECRET_BYTES} bytes in {path}, got {len(content)}; "
            f"run: head -c {SECRET_BYTES} /dev/urandom > {path}"
        )
    return content
