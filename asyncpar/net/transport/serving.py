"""Services of the program on a node's gRPC server, their reflection, and the address to which the server is bound.

Every call needs the job's token, whatever service it is for, unless the program named that service public.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import grpc.aio

from asyncpar._proto import POOL
from asyncpar.core.addresses import loopback, split_address
from asyncpar.core.config.transport import LINK_SECONDS
from asyncpar.errors import UsageError
from asyncpar.net.transport.rpc import Credentials, RpcServer

Register = Callable[[grpc.aio.Server], object]
"""Adds a servicer to the given server: ``lambda server: add_GreeterServicer_to_server(Greeter(), server)``."""

_OUR_SERVICES: Final = "asyncpar."
_HEALTH: Final = "grpc.health.v1.Health"
REFLECTION: Final = "grpc.reflection.v1alpha.ServerReflection"
_DESCRIBED: Final = ("asyncpar.v1.Actors", _HEALTH)
"""Services of the node for programs in any language; those by which ranks meet and link are internal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """The address of a node's server, and its services besides links.

    ``address`` is a ``host:port`` (port 0: any free one; None: no preference), ``services`` register servicers of the
    program, and ``public`` has the full names of the services whose calls need no token: the program's, or the health
    service.
    """

    address: str | None = None
    services: tuple[Register, ...] = ()
    public: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.address is not None:
            self._split(self.address)
        for register in self.services:
            if not callable(register):
                raise UsageError(f"services: expected functions that are given a grpc.aio.Server, got {register!r}")
        for name in sorted(self.public):
            if name.startswith(_OUR_SERVICES):
                raise UsageError(f"public_services: {name} is how ranks trust each other, so it is never public")

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to serve, even without links."""
        return self.address is not None or bool(self.services)

    def place(self, *, bind: str) -> tuple[str, int]:
        """Return the host and the port to bind; without a preference ``bind``, and any port."""
        if self.address is None:
            return bind, 0
        host, port = self._split(self.address)
        return loopback() if host == "localhost" else host, port

    def open_server(
        self, credentials: Credentials, *, bind: str, port: int = 0, link_timeout: float = LINK_SECONDS
    ) -> RpcServer:
        """Return a server, not started yet, that lets anyone call the public services."""
        return RpcServer(credentials, bind=bind, port=port, public=self.public, link_timeout=link_timeout)

    def register(self, server: RpcServer) -> None:
        """Add the program's services, after our own: the first one registered is served.

        Raises ``UsageError`` for a service that would replace a built-in one, and for a public one that is not added.
        """
        registrar = Registrar(server.server)
        for register in self.services:
            register(registrar)
        if REFLECTION not in registrar.names:  # the program may have its own
            _add_reflection(server.server, {*_DESCRIBED, *registrar.names})
        missing = self.public - registrar.names - {_HEALTH}
        if missing and registrar.names_are_known:
            raise UsageError(
                f"public_services: no service is called {', '.join(sorted(missing))}; "
                f"services added: {', '.join(sorted(registrar.names)) or 'none'}"
            )

    @staticmethod
    def _split(address: str) -> tuple[str, int]:
        return split_address(str(address), name="serve", expected="host:port, such as 127.0.0.1:0")


class Registrar(grpc.aio.Server):
    """The part of a node's server that adds services; the node itself starts and stops it."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.names: set[str] = set()
        """The full names of the added services."""
        self.names_are_known = True

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler[Any, Any]]) -> None:
        handlers = tuple(generic_rpc_handlers)
        for handler in handlers:
            if isinstance(handler, grpc.ServiceRpcHandler):
                self._add(str(handler.service_name()))
            else:
                self.names_are_known = False
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None:
        """Add one service."""
        self._add(service_name)
        self._server.add_registered_method_handlers(service_name, method_handlers)  # type: ignore[attr-defined]

    def _add(self, name: str) -> None:
        if name.startswith(_OUR_SERVICES) or name == _HEALTH:
            raise UsageError(f"services: {name} is a service of the node itself; choose another name")
        self.names.add(name)

    def add_insecure_port(self, address: str) -> NoReturn:
        self._refuse("add_insecure_port", f"an address such as {address} is given as serve=")

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> NoReturn:  # noqa: ARG002
        self._refuse("add_secure_port", f"an address such as {address} is given as serve=")

    async def start(self) -> NoReturn:
        self._refuse("start", "the node starts its server")

    async def stop(self, grace: float | None = None) -> NoReturn:  # noqa: ARG002
        self._refuse("stop", "the node stops its server")

    async def wait_for_termination(self, timeout: float | None = None) -> NoReturn:  # noqa: ARG002
        self._refuse("wait_for_termination", "the node stops its server")

    def _refuse(self, method: str, why: str) -> NoReturn:
        raise UsageError(f"services: expected a function that only adds a servicer, it called {method}(); {why}")


def _add_reflection(server: grpc.aio.Server, names: Collection[str]) -> None:
    """Have ``server``, which must not be started yet, describe the services ``names`` to generic clients (grpcurl).

    The implementation is imported by the first call: no rank waits for it.  Without grpcio-reflection callers receive
    the advice to install it.
    """
    served = tuple(sorted({*names, REFLECTION}))

    async def answer(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        try:
            from grpc_reflection.v1alpha import reflection, reflection_pb2
        except ImportError:
            why = "reflection needs grpcio-reflection where the node runs: pip install 'asyncpar[reflection]'"
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, why)
        servicer = reflection.aio.ReflectionServicer(served, pool=_BothPools())  # type: ignore[attr-defined]

        async def read() -> AsyncIterator[Any]:
            async for request in requests:
                yield reflection_pb2.ServerReflectionRequest.FromString(request)

        async with aclosing(servicer.ServerReflectionInfo(read(), context)) as answers:
            async for found in answers:
                yield found.SerializeToString()

    handlers: Any = {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION, handlers),))


class _BothPools:
    """The descriptors of our messages, and the default ones, which include those of the program's services."""

    def __getattr__(self, name: str) -> Any:
        from google.protobuf import descriptor_pool

        def find(*arguments: Any) -> Any:
            try:
                return getattr(POOL, name)(*arguments)
            except (KeyError, TypeError):  # it is not there, or belongs to a message of the other pool
                return getattr(descriptor_pool.Default(), name)(*arguments)

        return find
