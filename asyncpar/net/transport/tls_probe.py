"""Diagnosis of failed TLS connections: gRPC only reports UNAVAILABLE, as for a server that is not there.

A separate connection is made with Python's ssl module, which reports the reason.  A server that refuses the client's
certificate closes the connection silently after the handshake; one that accepts it speaks first (HTTP/2 SETTINGS).
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from asyncpar.core.addresses import split_address
from asyncpar.core.concurrency.streams import close_stream
from asyncpar.errors import AuthenticationError
from asyncpar.net.security.certificates import Certificates
from asyncpar.net.security.identity import PeerIdentity, Role
from asyncpar.net.transport.rpc import Credentials

PROBE_SECONDS = 3.0
"""Seconds that one probe may take; after that it has found nothing."""

_AGAIN_SECONDS = 0.05
_EXPIRED, _NOT_YET_VALID = 10, 9  # X509_V_ERR_*
_SAME_RUN = "all hosts need certificates of the same `asyncpar certs init`"


async def check_tls(address: str, credentials: Credentials | None, peer: Role) -> None:
    """Raise ``AuthenticationError`` if TLS is the reason why ``peer`` cannot be called at ``address``.

    Returns if it is not, or if that cannot be determined.  Without certificates we speak no TLS.
    """
    certificates = None if credentials is None else credentials.certificates
    host, port = split_address(address)
    where = f"{peer} at {address}"
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            if certificates is None:
                await _look_without(host, port, where)
            elif not await _look(host, port, certificates, peer, where):
                await asyncio.sleep(_AGAIN_SECONDS)  # it may have been shutting down
                if not await _look(host, port, certificates, peer, where):
                    raise AuthenticationError(
                        f"{where} did not accept our certificate, of {certificates.identity}: for it, that is of "
                        f"another authority or not valid now; {_SAME_RUN}, and clocks that are right"
                    )
    except OSError:  # unreachable, which others report; TimeoutError and ssl.SSLError are OSErrors, too
        return


async def _look(host: str, port: int, certificates: Certificates, peer: Role, where: str) -> bool:
    """Connect as gRPC does; return whether the server kept talking to us."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # compared below, for a message that names both
    context.load_verify_locations(cadata=certificates.authority.decode())
    context.load_cert_chain(certificates.certificate_path, certificates.key_path)
    context.set_alpn_protocols(["h2"])
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLCertVerificationError as error:
        raise AuthenticationError(f"{where} shows a certificate that {_distrust(error)}") from error
    except ssl.SSLEOFError:  # it hung up, as a server with too many connections does
        raise
    except ssl.SSLError as error:
        raise AuthenticationError(
            f"{where} does not answer in TLS ({error.reason or error}), and this side has certificates; give all hosts "
            "--certs"
        ) from error
    try:
        _check_name(writer.get_extra_info("peercert") or {}, PeerIdentity(certificates.identity.job, peer), where)
        return bool(await reader.read(1))
    except ssl.SSLError as error:
        raise AuthenticationError(
            f"{where} did not accept our certificate, of {certificates.identity} ({error.reason or error}); {_SAME_RUN}"
        ) from error
    except ConnectionResetError:
        return False
    finally:
        await _abort(writer)


async def _look_without(host: str, port: int, where: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: the question is only whether it speaks TLS
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    await _abort(writer)
    raise AuthenticationError(
        f"{where} wants certificates, and this side has none; give all hosts --certs (ranks read ASYNCPAR_CERTS)"
    )


async def _abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    await close_stream(writer)


def _check_name(shown: dict[str, Any], expected: PeerIdentity, where: str) -> None:
    names = [value for _, value in shown.get("subjectAltName", ())]
    if expected.dns_name not in names:
        found = next((identity for name in names if (identity := PeerIdentity.parse(name)) is not None), None)
        raise AuthenticationError(f"{where} shows the certificate of {found or 'nobody of a job'}, not of {expected}")


def _distrust(error: ssl.SSLCertVerificationError) -> str:
    if error.verify_code == _EXPIRED:
        return "has expired; make new ones with `asyncpar certs init`, for all hosts"
    if error.verify_code == _NOT_YET_VALID:
        return "is not valid yet; set the clocks of both hosts"
    return f"is not of this side's authority ({error.verify_message}); {_SAME_RUN}"
