"""Reading of certificates, with all checks that need no other party.

Faults of a party's own certificate are found here, before the first connection: a failed TLS handshake looks to gRPC
like a server that is not there.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization

from asyncpar.core.config.secret import Secret, check_private_file
from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError
from asyncpar.net.security.certificates import AUTHORITY_FILE, Certificates, certificate_file, key_file, list_roles
from asyncpar.net.security.identity import ANY_AGENT, PeerIdentity, Role, RoleKind

_LONGEST_FILE = 1 << 20
_REMEDY = "make new ones with `asyncpar certs init`, for all hosts"


def read_certificates(directory: str | Path, role: Role, *, now: datetime) -> Certificates:
    """Return the certificates of ``role`` in ``directory``, which are valid at ``now``.

    Raises ``UsageError`` that names files that are missing, unreadable, open to others, expired, or do not belong
    together.
    """
    place = Path(directory)
    certificate_path, key_path = place / certificate_file(role), place / key_file(role)
    if not certificate_path.exists():
        raise UsageError(f"certificates: {place} has none for {role}{_others(place)}")
    authority_pem, certificate_pem = _read(place / AUTHORITY_FILE), _read(certificate_path)
    authority = _parse(place / AUTHORITY_FILE, authority_pem)
    certificate = _parse(certificate_path, certificate_pem)
    key_pem = _read(key_path, is_private=True)
    identity = identity_of(certificate)
    if identity is None or identity.role != role:
        raise UsageError(f"certificates: {certificate_path} is for {identity or 'nobody of ours'}, not for {role}")
    _check_belonging(certificate, authority, key_pem, certificate_path, key_path)
    for path, checked in ((place / AUTHORITY_FILE, authority), (certificate_path, certificate)):
        _check_dates(path, checked, now)
    return Certificates(
        identity=identity,
        authority=authority_pem,
        certificate=certificate_pem,
        key=key_pem,
        certificate_path=certificate_path,
        key_path=key_path,
        expires=certificate.not_valid_after_utc,
    )


def check_agent(certificates: Certificates) -> None:
    """Raise ``UsageError`` if an agent's certificate dates from when agents only called, and did not serve."""
    certificate = x509.load_pem_x509_certificate(certificates.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if PeerIdentity(certificates.identity.job, ANY_AGENT).dns_name not in names.get_values_for_type(x509.DNSName):
        raise UsageError(
            f"certificates: {certificates.certificate_path} was made by an older asyncpar and is not for agents that "
            f"serve others; {_REMEDY}"
        )


def read_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in ``path``.  Raises ``UsageError`` if there is none."""
    return _parse(path, _read(path))


def identity_of(certificate: x509.Certificate) -> PeerIdentity | None:
    """Return the identity in ``certificate``, None if it names no party of a job, or several."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return PeerIdentity.parse(uris[0]) if len(uris) == 1 else None


def _others(directory: Path) -> str:
    ranks = [role.number for role in list_roles(directory) if role.kind is RoleKind.RANK]
    if not ranks:
        return "; is it a directory that `asyncpar certs init` made for this host?"
    listed = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return (
        f" (only for the ranks {listed}); `asyncpar certs init` has to know how many ranks the job has, and how many "
        "each host runs"
    )


def _read(path: Path, *, is_private: bool = False) -> bytes:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = Secret(file.read(_LONGEST_FILE)) if is_private else file.read(_LONGEST_FILE)
    except OSError as error:
        raise UsageError(f"certificates: {path} cannot be read: {os_reason(error)}") from error
    if is_private:
        check_private_file("certificates", str(path), mode=status.st_mode, owner=status.st_uid, user=os.geteuid())
    return content


def _parse(path: Path, content: bytes) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(content)
    except ValueError as error:
        raise UsageError(f"certificates: {path} holds no certificate in PEM; {_REMEDY}") from error


def _check_belonging(
    certificate: x509.Certificate, authority: x509.Certificate, key_pem: bytes, path: Path, key_path: Path
) -> None:
    """Check that the certificate is the authority's, and the key the certificate's."""
    try:
        certificate.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError, TypeError) as error:
        raise UsageError(
            f"certificates: {path} was not issued by the authority in {path.with_name(AUTHORITY_FILE)}: they come from "
            f"two runs of `asyncpar certs init`; copy the whole directory of one"
        ) from error
    try:
        key = serialization.load_pem_private_key(key_pem, password=None)
    except (ValueError, TypeError) as error:
        raise UsageError(f"certificates: {key_path} holds no private key without a password; {_REMEDY}") from error
    if key.public_key() != certificate.public_key():
        raise UsageError(f"certificates: {key_path} is not the key of {path}; copy the whole directory")


def _check_dates(path: Path, certificate: x509.Certificate, now: datetime) -> None:
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now >= ends:
        raise UsageError(f"certificates: {path} expired on {ends:%Y-%m-%d %H:%M} UTC; {_REMEDY}")
    if now < begins:
        raise UsageError(
            f"certificates: {path} is valid from {begins:%Y-%m-%d %H:%M} UTC, and here it is {now:%Y-%m-%d %H:%M}; "
            "set the clock of this host"
        )
