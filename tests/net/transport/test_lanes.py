"""Every lane passes the shipped conformance suite; those over sockets under both event loops."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import uvloop

from asyncpar.net.transport.grpc_lane import GrpcLane
from asyncpar.net.transport.inproc import InprocLane, ThreadLane
from asyncpar.net.transport.stream import StreamLane
from asyncpar.net.transport.striped import StripedLane
from asyncpar.testing.lanes import LaneConformance, LanePair
from tests.net.transport.pairs import open_grpc_pair, open_striped_pair, open_tcp_pair, open_unix_pair

MIB = 1024 * 1024


class TestInprocLane(LaneConformance):
    large = 1 * MIB
    has_back_pressure = False

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        one, other = InprocLane.pair()

        async def sever() -> None:
            one.cut("the test cut it")

        yield LanePair(one=one, other=other, sever=sever)


class TestThreadLane(LaneConformance):
    large = 1 * MIB
    has_back_pressure = False

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        loop = asyncio.get_running_loop()
        one, other = ThreadLane.pair(loop, loop)

        async def sever() -> None:
            one.cut("the test cut it")

        yield LanePair(one=one, other=other, sever=sever)


class TestUnixLane(LaneConformance):
    large = 10 * MIB

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        async with open_unix_pair() as (one, other):

            async def sever() -> None:
                one._socket.shutdown(socket.SHUT_RDWR)  # noqa: SLF001  # a connection that is cut from outside: the lane has no call that ends it as a broken network would

            yield LanePair(one=one, other=other, sever=sever)


class TestUnixLaneOnUvloop(TestUnixLane):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()


class TestTcpLane(LaneConformance):
    large = 6 * MIB

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        async with open_tcp_pair() as (one, other):

            async def sever() -> None:
                one._socket.shutdown(socket.SHUT_RDWR)  # noqa: SLF001  # a connection that is cut from outside: the lane has no call that ends it as a broken network would

            yield LanePair(one=one, other=other, sever=sever)


class TestTcpLaneOnUvloop(TestTcpLane):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()


class TestStripedLane(LaneConformance):
    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        async with open_striped_pair() as (one, other):

            async def sever() -> None:
                last = one.connections[-1]
                assert isinstance(last, StreamLane)
                last._socket.shutdown(socket.SHUT_RDWR)  # noqa: SLF001  # a connection that is cut from outside: the lane has no call that ends it as a broken network would

            yield LanePair(one=one, other=other, sever=sever)


class TestStripedLaneOnUvloop(TestStripedLane):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()


class TestGrpcLane(LaneConformance):
    large = 10 * MIB

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        async with open_grpc_pair() as (one, other, server):
            assert isinstance(one, GrpcLane)

            async def sever() -> None:
                await server.stop(grace=0)

            yield LanePair(one=one, other=other, sever=sever)


class TestStripedGrpcLane(LaneConformance):
    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        async with AsyncExitStack() as stack:
            pairs = [await stack.enter_async_context(open_grpc_pair()) for _ in range(3)]
            one, other = StripedLane([pair[0] for pair in pairs]), StripedLane([pair[1] for pair in pairs])

            async def sever() -> None:
                await pairs[-1][2].stop(grace=0)

            yield LanePair(one=one, other=other, sever=sever)


class TestGrpcLaneOnUvloop(TestGrpcLane):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return uvloop.new_event_loop()
