"""The gRPC server of a node that is a world of one, for services of its own and for programs in other languages."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

from asyncpar.config.secret import SECRET_BYTES
from asyncpar.errors import UsageError
from asyncpar.membership.credentials import load_certificates
from asyncpar.membership.secret_file import read_secret
from asyncpar.security.identity import rank_role
from asyncpar.transport.rpc import Credentials, RpcServer, is_loopback
from asyncpar.transport.serving import Serving

_SECRET_FILE = "ASYNCPAR_SECRET_FILE"
_CERTS = "ASYNCPAR_CERTS"
_LOOPBACK = "127.0.0.1"


async def serve_alone(
    stack: AsyncExitStack,
    serving: Serving,
    environment: Mapping[str, str],
    *,
    register: Callable[[RpcServer], None],
) -> RpcServer | None:
    """Start the server that ``serving`` asks for, with our own services that ``register`` adds; ``stack`` stops it.

    None if nothing is to be served.  The secret is the one in the file that ``ASYNCPAR_SECRET_FILE`` names; without
    one it is made up, and then only loopback is served: nobody elsewhere could know it.  With certificates, in the
    directory that ``ASYNCPAR_CERTS`` names, the server speaks mutual TLS as rank 0.
    """
    if not serving.is_wanted:
        return None
    bind, port = serving.place(bind=_LOOPBACK)
    server = serving.open_server(_find_credentials(environment, bind), bind=bind, port=port)
    register(server)
    serving.register(server)
    await server.start()
    stack.push_async_callback(server.stop)
    return server


def _find_credentials(environment: Mapping[str, str], bind: str) -> Credentials:
    path, certs = environment.get(_SECRET_FILE), environment.get(_CERTS)
    certificates = load_certificates(certs, rank_role(0)) if certs else None
    if path:
        return Credentials(read_secret(path), certificates)
    if not is_loopback(bind):
        raise UsageError(
            f"serve: {bind} is not loopback, and without a secret that its clients know nobody could be told from "
            f"anyone; name a file with one in {_SECRET_FILE}, or serve on {_LOOPBACK}"
        )
    return Credentials(secrets.token_bytes(SECRET_BYTES), certificates)
