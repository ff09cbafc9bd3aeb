"""The secret that the agents of a group, and those who ask them, hold."""

from __future__ import annotations

from pathlib import Path

from asyncpar.errors import UsageError
from asyncpar.launch.job import JobSecret
from asyncpar.net.membership.credentials import create_secret, read_secret
from asyncpar.net.membership.private_directory import private_directory
from asyncpar.net.transport.rpc import is_loopback, split_address

_FILE = "agents"


def find_secret(path: str | None, address: str) -> JobSecret:
    """Return the secret in the file ``path``; None: that of this user's agents here, made if missing.

    Raises ``UsageError`` if ``address`` (``host:port``) is not loopback and there is no file: others could join.
    """
    if path is not None:
        return JobSecret(read_secret(path), Path(path).absolute())
    host, _ = split_address(address)
    if not is_loopback(host):
        raise UsageError(
            f"--secret-file: needed for agents that meet over a network ({address}); make one with "
            "(umask 077; head -c 32 /dev/urandom > secret) and copy it to every host"
        )
    shared = private_directory() / _FILE
    try:
        return JobSecret(create_secret(shared), shared)
    except FileExistsError:
        return JobSecret(read_secret(shared), shared)
