"""What is called how in a directory of certificates."""

from __future__ import annotations

from asyncpar.security.identity import Role, parse_label

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
    """Return whose certificate is in the file called ``name``, None if it is no such file."""
    return parse_label(name.removesuffix(_CERTIFICATE_SUFFIX)) if name.endswith(_CERTIFICATE_SUFFIX) else None
