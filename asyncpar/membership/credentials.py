"""Where a rank gets its credentials from: the files that its environment names."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from asyncpar.config.environment import LaunchEnvironment
from asyncpar.errors import UsageError
from asyncpar.membership.secret_file import read_secret
from asyncpar.security.certificates import Certificates
from asyncpar.security.identity import Role, rank_role
from asyncpar.transport.rpc import Credentials


def read_credentials(environment: LaunchEnvironment) -> Credentials:
    """Return the credentials of a launched rank: the job's secret, and its own certificate if the job has any.

    Raises ``UsageError`` for files that will not do, and for certificates of another job.
    """
    secret = read_secret(environment.secret_file)
    if environment.certs is None:
        return Credentials(secret)
    certificates = load_certificates(environment.certs, rank_role(environment.rank))
    job = certificates.identity.job
    if job != environment.job:
        raise UsageError(
            f"ASYNCPAR_CERTS: expected certificates of job {environment.job!r}, those in {environment.certs} are of "
            f"job {job!r}"
        )
    return Credentials(secret, certificates)


def load_certificates(directory: str | Path, role: Role) -> Certificates:
    """Return the certificates of ``role`` in ``directory``, which are good now.  See ``read_certificates``.

    The library that reads them takes long to import, so only who has certificates imports it.
    """
    from asyncpar.security.reading import read_certificates

    return read_certificates(directory, role, now=datetime.now(UTC))
