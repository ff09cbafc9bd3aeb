"""The certificates of one party of a job.  (``reading`` makes these; this module is quick to import.)"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from asyncpar.core.system_errors import os_reason
from asyncpar.errors import UsageError
from asyncpar.net.security.identity import PeerIdentity, Role, parse_label


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """The credentials by which one party authenticates itself and checks the others: PEM, and the source files."""

    identity: PeerIdentity
    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    certificate_path: Path
    key_path: Path
    expires: datetime


def list_roles(directory: Path) -> list[Role]:
    """Return the roles with certificates in ``directory``, in order.  Raises ``UsageError`` if it cannot be read."""
    try:
        names = os.listdir(directory)
    except OSError as error:
        raise UsageError(f"certificates: {directory} cannot be read: {os_reason(error)}") from error
    roles = [role for name in names if (role := role_of(name)) is not None]
    return sorted(roles, key=lambda role: (role.kind, role.number or 0))


AUTHORITY_FILE = "ca.crt"
SECRET_FILE = "secret"
_CERTIFICATE_SUFFIX = ".crt"


def certificate_file(role: Role) -> str:
    """Return the name of the file with the certificate of ``role``."""
    return role.label + _CERTIFICATE_SUFFIX


def key_file(role: Role) -> str:
    """Return the name of the file with the private key of ``role``."""
    return f"{role.label}.key"


def host_directory(host: int) -> str:
    """Return the name of the directory for the host number ``host``."""
    return f"host-{host}"


def role_of(name: str) -> Role | None:
    """Return the role whose certificate is in the file called ``name``, None if it is no such file."""
    return parse_label(name.removesuffix(_CERTIFICATE_SUFFIX)) if name.endswith(_CERTIFICATE_SUFFIX) else None
