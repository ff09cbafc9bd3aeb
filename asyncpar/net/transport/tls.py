"""Mutual TLS for gRPC, and the identity of the peer according to its certificate.

A server requires a certificate of the job's authority from every client, before the first HTTP/2 byte.  A client
requires one that names exactly the party it means to reach: the server of rank 2 cannot pass for rank 3, although both
have certificates of the same authority.
"""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from asyncpar.errors import AuthenticationError
from asyncpar.net.security.certificates import Certificates
from asyncpar.net.security.identity import PeerIdentity, Role


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return a server's TLS credentials; clients have to authenticate themselves, too."""
    return grpc.ssl_server_credentials(
        [(bytes(certificates.key), certificates.certificate)],
        root_certificates=certificates.authority,
        require_client_auth=True,
    )


def channel_credentials(certificates: Certificates) -> grpc.ChannelCredentials:
    """Return a client's TLS credentials."""
    return grpc.ssl_channel_credentials(certificates.authority, bytes(certificates.key), certificates.certificate)


def check_caller(context: grpc.aio.ServicerContext[Any, Any], job: str, role: Role) -> None:
    """Check that the caller's certificate is one of ``role`` in ``job``; without TLS every caller passes.

    (In a job with certificates, every connection uses TLS.)  Raises ``AuthenticationError`` that names both.
    """
    shown = context.auth_context()
    if "ssl" not in map(_text, shown.get("transport_security_type", ())):
        return
    uris = [_text(uri) for uri in shown.get("peer_uri", ())]
    identity = PeerIdentity.parse(uris[0]) if len(uris) == 1 else None
    claimed = PeerIdentity(job, role)
    if identity is None or identity.job != job or not role.includes(identity.role):
        raise AuthenticationError(f"it calls as {claimed}, but its certificate is for {identity or 'nobody of a job'}")


def _text(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.decode(errors="replace")
