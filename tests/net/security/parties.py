"""Certificates for tests: of a job of their own, or spoilt on purpose."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from asyncpar.net.security.certificates import AUTHORITY_FILE, Certificates, certificate_file, key_file
from asyncpar.net.security.identity import PeerIdentity, Role
from asyncpar.net.security.issuing import Authority, CertificateOrder, issue_certificates

JOB = "demo"


def make_directory(path: Path, *, ranks: int = 2, job: str = JOB, now: datetime | None = None) -> Path:
    """Return the new directory ``path`` with the certificates of a job on one host."""
    issue_certificates(path, CertificateOrder(job=job, ranks_per_host=(ranks,)), now=now or datetime.now(UTC))
    return path


def make_homes(path: Path, *, hosts: int, ranks: int = 2, job: str = JOB) -> list[Path]:
    """Return the directories of hosts with ``ranks`` each, in the new directory ``path``."""
    return issue_certificates(path, CertificateOrder(job=job, ranks_per_host=(ranks,) * hosts), now=datetime.now(UTC))


def certify(authority: Authority, role: Role, directory: Path, *, job: str = JOB) -> Certificates:
    """Return certificates of ``authority``, unchecked, with their files in ``directory``."""
    directory.mkdir(exist_ok=True)
    pair = authority.issue(PeerIdentity(job, role))
    (directory / AUTHORITY_FILE).write_bytes(authority.certificate)
    certificate_path, key_path = directory / certificate_file(role), directory / key_file(role)
    certificate_path.write_bytes(pair.certificate)
    key_path.touch(mode=0o600)
    key_path.write_bytes(pair.key)
    return Certificates(
        identity=PeerIdentity(job, role),
        authority=authority.certificate,
        certificate=pair.certificate,
        key=pair.key,
        certificate_path=certificate_path,
        key_path=key_path,
        expires=authority.expires,
    )


def authority_now(*, job: str = JOB) -> Authority:
    """Return an authority whose certificates are good."""
    return Authority(job, now=datetime.now(UTC), days=1)


def authority_of_the_past(*, job: str = JOB) -> Authority:
    """Return an authority whose certificates have expired."""
    return Authority(job, now=datetime.now(UTC) - timedelta(days=2), days=1)


def authority_of_the_future(*, job: str = JOB) -> Authority:
    """Return an authority whose certificates are not valid yet."""
    return Authority(job, now=datetime.now(UTC) + timedelta(days=2), days=1)
