"""The gRPC server and its credentials."""

import asyncio
import gc
import os
import subprocess
import sys
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from asyncpar.errors import UsageError
from asyncpar.net.transport.rpc import Credentials, RpcServer, open_channel


@pytest.fixture
def credentials() -> Credentials:
    return Credentials(os.urandom(32))


async def test_health_is_served_on_a_port_of_the_systems_choosing(credentials: Credentials) -> None:
    server = RpcServer(credentials)
    await server.start()
    async with open_channel(server.address, credentials) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    await server.stop(grace=0)
    assert server.port > 0
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("other", [None, Credentials(b"x" * 32)])
@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_calls_without_the_jobs_token_are_refused(
    credentials: Credentials, other: Credentials | None, method: str
) -> None:
    server = RpcServer(credentials)
    await server.start()
    async with open_channel(server.address, other) as channel:
        call = getattr(health_pb2_grpc.HealthStub(channel), method)(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call if method == "Check" else call.read())
    await server.stop(grace=0)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_stranger_is_refused_before_any_of_its_message_is_read(credentials: Credentials) -> None:
    server = RpcServer(credentials)
    await server.start()
    async with open_channel(server.address, None) as channel, asyncio.timeout(30):
        untyped: Any = channel  # the stubs do not know raw bytes
        call = untyped.stream_unary("/grpc.health.v1.Health/Check")()  # which sends headers, and nothing more
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
    await server.stop(grace=0)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_port_in_use_is_named(credentials: Credentials) -> None:
    server = RpcServer(credentials)
    await server.start()
    with pytest.raises(UsageError, match=f"127.0.0.1:{server.port} cannot be bound: Address already in use"):
        await RpcServer(credentials, port=server.port).start()
    await server.stop(grace=0)


async def test_a_server_that_is_cancelled_while_it_starts_is_stopped(credentials: Credentials) -> None:
    """gRPC's own start complains in a background task later when it is cancelled."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    server = RpcServer(credentials)
    starting = asyncio.create_task(server.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    del server, starting
    gc.collect()
    other = RpcServer(credentials)
    await other.start()
    await other.stop(grace=0)
    assert complaints == []


async def test_a_public_bind_without_a_secret_is_refused() -> None:
    with pytest.raises(UsageError, match=r"0\.0\.0\.0 is not loopback"):
        RpcServer(None, bind="0.0.0.0")


def test_short_secrets_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 32 bytes, got 4"):
        Credentials(b"abcd")


def test_credentials_do_not_show_the_secret(credentials: Credentials) -> None:
    assert credentials.secret.hex() not in repr(credentials)
    assert repr(credentials) == "Credentials(<secret>)"


def test_the_secret_itself_is_not_sent(credentials: Credentials) -> None:
    sent = "".join(key + value for key, value in credentials.metadata())
    assert credentials.secret.hex() not in sent


ENDS_WITH_A_SERVER = """
import asyncio, atexit, gc, threading

def pollers():
    return sum("_poll_wrapper" in thread.name for thread in threading.enumerate())

def at_end():
    before = pollers()
    gc.collect()  # as the interpreter does in its finalization, too late for a thread that is then to end
    print(before, pollers())

atexit.register(at_end)  # first, so it runs last
gc.disable()
from asyncpar.net.transport.rpc import Credentials, RpcServer

async def main():
    server = RpcServer(Credentials(bytes(32)))
    await server.start()
    await server.stop(grace=0)

asyncio.run(main())
"""


ENDS_AMID_A_CALL = """
import asyncio, time
from grpc_health.v1 import health_pb2, health_pb2_grpc
from asyncpar.net.transport.rpc import Credentials, RpcServer, open_channel

async def main():
    credentials = Credentials(bytes(32))
    server = RpcServer(credentials)
    await server.start()
    channel = open_channel(server.address, credentials)
    call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    await call
    await server.stop(grace=0)
    call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    await asyncio.sleep(0)
    return channel, call

loop = asyncio.new_event_loop()
kept = loop.run_until_complete(main())
time.sleep(0.3)  # the call ends, and nobody takes that
loop.close()
"""


def test_a_call_that_outlives_its_loop_is_no_error_at_the_end_of_the_process() -> None:
    command = [sys.executable, "-c", ENDS_AMID_A_CALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr, done.stderr


def test_no_thread_of_grpc_ends_in_the_finalization_of_the_interpreter() -> None:
    command = [sys.executable, "-c", ENDS_WITH_A_SERVER]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 1\n", "")
