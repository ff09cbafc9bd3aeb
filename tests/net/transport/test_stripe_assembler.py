"""Connections of one lane come in one by one."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

from asyncpar.net.transport.acceptor import StripeAssembler
from asyncpar.net.transport.stream import StreamLane
from asyncpar.net.transport.striped import StripedLane
from tests.net.transport.pairs import TERMS, open_tcp_pair

AGREED = replace(TERMS, connections=3)


async def connections(stack: AsyncExitStack, count: int) -> list[StreamLane]:
    return [(await stack.enter_async_context(open_tcp_pair()))[0] for _ in range(count)]


async def test_a_lane_is_there_when_its_last_connection_is_whatever_their_order() -> None:
    async with AsyncExitStack() as stack:
        gathering, made = StripeAssembler(), await connections(stack, 3)
        assert gathering.add(replace(AGREED, connection=2), made[2]) is None
        assert gathering.add(AGREED, made[0]) is None
        lane = gathering.add(replace(AGREED, connection=1), made[1])
        assert isinstance(lane, StripedLane)
        assert lane.connections == tuple(made)


async def test_a_single_connection_is_a_lane_by_itself() -> None:
    async with AsyncExitStack() as stack:
        (made,) = await connections(stack, 1)
        assert StripeAssembler().add(TERMS, made) is made


async def test_a_second_connection_of_one_number_is_closed() -> None:
    async with AsyncExitStack() as stack:
        gathering, made = StripeAssembler(), await connections(stack, 2)
        gathering.add(AGREED, made[0])
        assert gathering.add(AGREED, made[1]) is None
        assert [connection._is_open for connection in made] == [True, False]  # noqa: SLF001  # a connection tells its events that it is over, and these have none


async def test_what_is_dropped_is_closed_and_lanes_of_other_agreements_are_not() -> None:
    async with AsyncExitStack() as stack:
        gathering, made = StripeAssembler(), await connections(stack, 3)
        gathering.add(AGREED, made[0])
        gathering.add(replace(AGREED, connection=1), made[1])
        gathering.add(replace(AGREED, token=b"u" * 16), made[2])
        gathering.drop(AGREED.token)
        assert [connection._is_open for connection in made] == [False, False, True]  # noqa: SLF001  # a connection tells its events that it is over, and these have none
        gathering.drop_all()
        assert not made[2]._is_open  # noqa: SLF001  # a connection tells its events that it is over, and these have none
