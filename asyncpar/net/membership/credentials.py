"""Credentials of a job: its secret, from a file or the environment, and certificates."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.config.secret import SECRET_BYTES, Secret, check_secret_file
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError
from asyncpar.net.security.certificates import Certificates, list_roles
from asyncpar.net.security.identity import COORDINATOR, Role, RoleKind, certified_role, parse_label, rank_role
from asyncpar.net.transport.rpc import Credentials

_SECRET_FILE = "ASYNCPAR_SECRET_FILE"
_CERTS = "ASYNCPAR_CERTS"


def read_credentials(environment: LaunchEnvironment) -> Credentials:
    """Return the credentials of a launched rank: the job's secret, and its own certificate if the job has any.

    If ranks of the job change their numbers, the environment states which certificate each of them has.  Raises
    ``UsageError`` for unusable files, and for certificates of another job.
    """
    secret = read_secret(environment.secret_file, what=_SECRET_FILE)
    if environment.certs is None:
        return Credentials(secret)
    certified = environment.certified
    certificates = load_certificates(environment.certs, certified_role(environment.rank, certified))
    job = certificates.identity.job
    if job != environment.job:
        raise UsageError(
            f"ASYNCPAR_CERTS: expected certificates of job {environment.job!r}, those in {environment.certs} are of "
            f"job {job!r}"
        )
    return Credentials(secret, certificates, certified=certified)


def rendezvous_role(environment: LaunchEnvironment) -> Role:
    """Return the role in the certificate of the rendezvous server.  Raises ``UsageError`` for a rank's."""
    label = environment.rendezvous_role
    role = COORDINATOR if label is None else parse_label(label)
    if role is None or role.kind is RoleKind.RANK:
        raise UsageError(f"ASYNCPAR_RENDEZVOUS_ROLE: expected coordinator or agent-N, got {label!r}")
    return role


def read_elastic_credentials(environment: Mapping[str, str]) -> Credentials:
    """Return the credentials of an elastic rank: the job's secret, and the certificate of its slot if there are any.

    Raises ``UsageError`` as ``read_credentials`` does.
    """
    secret, certs = read_secret(environment[_SECRET_FILE], what=_SECRET_FILE), environment.get(_CERTS)
    if not certs:
        return Credentials(secret)
    numbers, slot = certified_ranks(certs), environment.get("LOCAL_RANK", "0")
    if not slot.isdecimal() or int(slot) >= len(numbers):
        raise UsageError(
            f"{_CERTS}: {certs} has certificates of {len(numbers)} ranks, and this one is number {slot} of its host; "
            "make new ones with `asyncpar certs init`, which has to know the ranks of each host"
        )
    return Credentials(secret, load_certificates(certs, rank_role(numbers[int(slot)])))


def certified_ranks(directory: str | Path) -> tuple[int, ...]:
    """Return the numbers of the ranks with certificates in ``directory``; for elastic ranks those of the slots."""
    roles = list_roles(Path(directory))
    return tuple(role.number for role in roles if role.kind is RoleKind.RANK and role.number is not None)


def load_certificates(directory: str | Path, role: Role) -> Certificates:
    """Return the certificates of ``role`` in ``directory``, which are currently valid.  See ``read_certificates``.

    The library that reads them takes long to import, so only jobs with certificates import it.
    """
    from asyncpar.net.security.reading import read_certificates

    return read_certificates(directory, role, now=datetime.now(UTC))


_LONGEST_SECRET = 4096


def read_secret(path: str | Path, *, what: str = "secret file") -> Secret:
    """Return the secret in the file ``path``; errors begin with ``what``.

    Raises ``UsageError`` if it cannot be read, is too short, or others may read it.  The whole file is the secret,
    including a newline at its end.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = Secret(file.read(_LONGEST_SECRET))
    except OSError as error:
        raise UsageError(f"{what}: {path} cannot be read: {os_reason(error)}") from error
    return check_secret_file(
        str(path), mode=status.st_mode, owner=status.st_uid, user=os.geteuid(), content=content, what=what
    )


def create_secret(path: str | Path) -> Secret:
    """Create the file ``path`` with a new random secret, readable only for this user, and return the secret.

    The file is created atomically.  Raises ``FileExistsError`` if it exists.
    """
    secret = Secret(secrets.token_bytes(SECRET_BYTES))
    write_secret(path, secret)
    return secret


def write_secret(path: str | Path, secret: bytes) -> None:
    """Create the file ``path`` with ``secret``, as ``create_secret`` does."""
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
