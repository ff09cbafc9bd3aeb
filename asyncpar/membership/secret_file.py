"""Read and make the file that holds a job's secret."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from asyncpar.config.secret import SECRET_BYTES, Secret, check_secret_file
from asyncpar.errors import UsageError

_LONGEST_SECRET = 4096


def read_secret(path: str | Path) -> Secret:
    """Return the secret in the file ``path``.

    Raises ``UsageError`` when it cannot be read, is too short, or others may read it.  All of the file is the secret,
    a newline at its end too.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = Secret(file.read(_LONGEST_SECRET))
    except OSError as error:
        raise UsageError(f"secret file: {path} cannot be read: {error.strerror}") from error
    return check_secret_file(str(path), mode=status.st_mode, owner=status.st_uid, user=os.geteuid(), content=content)


def create_secret(path: str | Path) -> Secret:
    """Make the new file ``path`` with a new random secret, readable for this user only, and return the secret.

    The file appears whole or not at all.  Raises ``FileExistsError`` when it exists.
    """
    secret = Secret(secrets.token_bytes(SECRET_BYTES))
    write_secret(path, secret)
    return secret


def write_secret(path: str | Path, secret: bytes) -> None:
    """Make the new file ``path`` with ``secret``; as ``create_secret``."""
    draft = f"{path}.{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            os.fchmod(descriptor, 0o600)
            os.write(descriptor, secret)
        finally:
            os.close(descriptor)
        os.link(draft, path)
    finally:
        os.unlink(draft)
