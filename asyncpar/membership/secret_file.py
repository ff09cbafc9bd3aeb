"""Read and make the file that holds a job's secret."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from asyncpar.config.secret import SECRET_BYTES, check_secret_file
from asyncpar.errors import UsageError

_LONGEST_SECRET = 4096


def read_secret(path: str | Path) -> bytes:
    """Return the secret in the file ``path``.

    Raises ``UsageError`` when it cannot be read, is too short, or others may read it.  All of the file is the secret,
    a newline at its end too.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(_LONGEST_SECRET)
    except OSError as error:
        raise UsageError(f"secret file: {path} cannot be read: {error.strerror}") from error
    return check_secret_file(str(path), mode=status.st_mode, owner=status.st_uid, user=os.geteuid(), content=content)


def create_secret(path: str | Path) -> bytes:
    """Write a new random secret to the new file ``path``, readable for this user only, and return it.

    Raises ``FileExistsError`` when the file exists.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, secret)
    finally:
        os.close(descriptor)
    return secret
