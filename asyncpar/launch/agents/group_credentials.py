"""The credentials of the agents of a group and of their callers: a secret and, optionally, certificates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncpar.core.addresses import is_loopback, split_address
from asyncpar.errors import UsageError
from asyncpar.launch.job import JobCertificates, JobSecret, read_host_certificates
from asyncpar.net.membership.credentials import create_secret, read_secret
from asyncpar.net.membership.private_directory import private_directory
from asyncpar.net.security.certificates import SECRET_FILE
from asyncpar.net.transport.rpc import Credentials

_FILE = "agents"


@dataclass(frozen=True, slots=True)
class GroupCredentials:
    """The secret of the group and the file from which ranks read it; with certificates, also those of this host."""

    secret: JobSecret
    certificates: JobCertificates | None = None

    @property
    def rpc(self) -> Credentials:
        """The credentials of calls from this host: by its agent, or in its name."""
        return Credentials(self.secret.secret, None if self.certificates is None else self.certificates.agent)


def find_credentials(secret_file: str | None, certs: str | None, address: str) -> GroupCredentials:
    """Return the secret in ``secret_file`` and the certificates of this host in the directory ``certs``.

    Without a file, the secret is the one beside the certificates, or that of this user's agents here, made if missing.
    Raises ``UsageError`` for unusable files, and if ``address`` (``host:port``) is not loopback and there is no secret:
    others could join.
    """
    if certs is None:
        return GroupCredentials(_find_secret(secret_file, address))
    certificates = read_host_certificates(certs)
    beside = certificates.directory / SECRET_FILE
    path = secret_file or (str(beside) if beside.exists() else None)
    return GroupCredentials(_find_secret(path, address), certificates)


def _find_secret(path: str | None, address: str) -> JobSecret:
    if path is not None:
        return JobSecret(read_secret(path), Path(path).absolute())
    host, _ = split_address(address)
    if not is_loopback(host):
        raise UsageError(
            f"--secret-file: needed for agents that meet over a network ({address}); make one with "
            "(umask 077; head -c 32 /dev/urandom > secret) and copy it to every host, or use `asyncpar certs init` "
            "and --certs, which encrypts, too"
        )
    shared = private_directory() / _FILE
    try:
        return JobSecret(create_secret(shared), shared)
    except FileExistsError:
        return JobSecret(read_secret(shared), shared)
