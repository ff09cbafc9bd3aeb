"""Server reflection: generic clients (grpcurl, Postman) query the server for its services and their messages.

Calls need the job's token, as all others do.  The implementation is imported by the first call: no rank waits for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from typing import Any, Final

import grpc
import grpc.aio

from asyncpar._proto import POOL

REFLECTION: Final = "grpc.reflection.v1alpha.ServerReflection"
_METHOD: Final = "ServerReflectionInfo"


def add_reflection(server: grpc.aio.Server, names: Collection[str]) -> None:
    """Have ``server``, which must not be started yet, describe the services ``names`` to callers.

    Without grpcio-reflection callers receive the advice to install it.
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

    handlers: Any = {_METHOD: grpc.stream_stream_rpc_method_handler(answer)}
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
