"""Creation of the directory with all certificates of a job: atomic, and never over an existing one.

Each host gets only the files that its own parties need, so a compromised host gives away its own ranks, not the
others::

    DIR/host-0/ca.crt, secret, agent-0.*, coordinator.*, rank-0.*, rank-1.*
    DIR/host-1/ca.crt, secret, agent-1.*, rank-2.*, rank-3.*

The directory of a job on one host has the files of ``host-0`` itself.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from asyncpar.core.config.secret import SECRET_BYTES, Secret
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError
from asyncpar.net.security.certificates import AUTHORITY_FILE, SECRET_FILE, certificate_file, host_directory, key_file
from asyncpar.net.security.identity import (
    ANY_AGENT,
    COORDINATOR,
    PeerIdentity,
    Role,
    RoleKind,
    agent_role,
    check_job_name,
    rank_role,
)

CLOCK_SKEW = timedelta(minutes=10)
"""Tolerated difference of the hosts' clocks: certificates become valid that long before they are made."""

_USES = {
    RoleKind.RANK: (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
    RoleKind.AGENT: (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
    RoleKind.COORDINATOR: (ExtendedKeyUsageOID.SERVER_AUTH,),
}


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its private key, in PEM."""

    certificate: bytes
    key: Secret = field(repr=False)


class Authority:
    """Signs the certificates of one job, all valid until ``expires``.

    Its private key exists only in this object and is never written: once the object is gone, no one can make another
    certificate that the job accepts.  Keys are ECDSA on P-256, which gRPC's TLS supports (it does not support Ed25519).
    """

    def __init__(self, job: str, *, now: datetime, days: int) -> None:
        self._job = job
        self._begins = now - CLOCK_SKEW
        self.expires = now + timedelta(days=days)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"asyncpar CA of job {job}"[:64])])
        self._certificate = (
            self._begin(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def certificate(self) -> bytes:
        """The certificate of the authority, in PEM, against which all parties check each other's."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, identity: PeerIdentity) -> KeyPair:
        """Return a new key and the certificate for it of ``identity``."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, str(identity.role))])
        names: list[x509.GeneralName] = [
            x509.DNSName(identity.dns_name),
            x509.UniformResourceIdentifier(identity.uri),
        ]
        if ANY_AGENT.includes(identity.role):  # a joining agent knows an address, but not yet which agent is there
            names.append(x509.DNSName(PeerIdentity(identity.job, ANY_AGENT).dns_name))
        certificate = (
            self._begin(name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_USES[identity.role.kind]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return KeyPair(
            certificate.public_bytes(serialization.Encoding.PEM),
            Secret(
                key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                )
            ),
        )

    def _begin(self, name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        """Return a builder with the common fields of the job's certificates."""
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._begins)
            .not_valid_after(self.expires)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(signer, critical=False)
        )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


MOST_DAYS = 3650
MOST_RANKS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateOrder:
    """Settings of new certificates: for ``job``, with ``ranks_per_host`` ranks on each host, valid for ``days``."""

    job: str
    ranks_per_host: tuple[int, ...]
    days: int = 90

    def __post_init__(self) -> None:
        check_job_name(self.job)
        ranks = sum(self.ranks_per_host)
        if not 1 <= ranks <= MOST_RANKS:
            raise UsageError(f"--ranks: expected 1..{MOST_RANKS}, got {ranks}")
        if min(self.ranks_per_host) < 1:
            raise UsageError(f"--hosts: expected at least one rank on each, got {self.ranks_per_host}")
        if not 1 <= self.days <= MOST_DAYS:
            raise UsageError(f"--days: expected 1..{MOST_DAYS}, got {self.days}")


def share_ranks(ranks: int, hosts: str | None) -> tuple[int, ...]:
    """Return the number of ranks on each host; ``hosts`` is the number of hosts (``2``) or their shares (``4,2``).

    Raises ``UsageError`` if ``ranks`` do not divide evenly.
    """
    if ranks < 1:
        raise UsageError(f"--ranks: expected at least 1, got {ranks}")
    parts = ["1"] if hosts is None else hosts.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--hosts: expected how many hosts, or the ranks of each such as 4,2, got {hosts!r}")
    numbers = tuple(map(int, parts))
    if len(numbers) > 1:
        if sum(numbers) != ranks:
            raise UsageError(f"--hosts: expected shares that add up to --ranks {ranks}, got {hosts}")
        return numbers
    if ranks % numbers[0]:
        raise UsageError(f"--hosts: {ranks} ranks on {numbers[0]} hosts do not come out even; give the ranks of each")
    return (ranks // numbers[0],) * numbers[0]


def issue_certificates(directory: Path, order: CertificateOrder, *, now: datetime) -> list[Path]:
    """Create ``directory`` with the certificates of ``order`` and return the directory of each host.

    Directories are for this user only (0700), and so are keys and the secret (0600).  Raises ``UsageError`` if
    ``directory`` exists or cannot be created; then nothing is left behind.
    """
    if directory.is_symlink() or directory.exists():
        raise UsageError(f"{directory}: it exists, and certificates are never overwritten; name a new directory")
    draft = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}")
    try:
        draft.mkdir(mode=0o700)
        try:
            homes = _write_hosts(draft, order, now)
            draft.rename(directory)
        except BaseException:
            shutil.rmtree(draft)
            raise
    except OSError as error:
        raise UsageError(f"{directory}: it cannot be made: {os_reason(error)}") from error
    return [directory / home.relative_to(draft) for home in homes]


def _write_hosts(draft: Path, order: CertificateOrder, now: datetime) -> list[Path]:
    authority = Authority(order.job, now=now, days=order.days)
    secret = Secret(secrets.token_bytes(SECRET_BYTES))
    homes = []
    for host, roles in enumerate(_roles(order)):
        home = draft if len(order.ranks_per_host) == 1 else draft / host_directory(host)
        home.mkdir(mode=0o700, exist_ok=True)
        _write(home / AUTHORITY_FILE, authority.certificate, mode=0o644)
        _write(home / SECRET_FILE, secret, mode=0o600)
        for role in roles:
            pair = authority.issue(PeerIdentity(order.job, role))
            _write(home / certificate_file(role), pair.certificate, mode=0o644)
            _write(home / key_file(role), pair.key, mode=0o600)
        homes.append(home)
    return homes


def _roles(order: CertificateOrder) -> Iterator[list[Role]]:
    """Yield the roles on each host."""
    offset = 0
    for host, count in enumerate(order.ranks_per_host):
        ranks = [rank_role(rank) for rank in range(offset, offset + count)]
        yield [agent_role(host), *([COORDINATOR] if host == 0 else []), *ranks]
        offset += count


def _write(path: Path, content: bytes, *, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(content)
