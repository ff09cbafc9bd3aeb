"""Every operation of a rank is in its event ring: what it is, where it was called, and how it went."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from asyncpar.core.observe.records import EventKind, EventState
from asyncpar.errors import PeerCancelled
from asyncpar.node import Node
from asyncpar.observe.image import Event, RankImage, read_image
from asyncpar.testing.world import local_world


def image_of(node: Node) -> RankImage:
    return read_image(node.links.recorder.snapshot())


def recorded(node: Node, name: str) -> list[Event]:
    return [event for event in image_of(node).events if event.name == name]


async def on_all(nodes: tuple[Node, ...], call: object) -> None:
    await asyncio.gather(*(call(node) for node in nodes))  # type: ignore[operator]


@pytest.mark.parametrize("transport", ["inproc", "shm", "tcp"])
async def test_operations_are_recorded_alike_on_all_ranks(transport: str) -> None:
    async with local_world(2, transport=transport) as nodes:

        async def run(node: Node) -> None:
            x = np.zeros(3, np.float32)
            for _ in range(9):
                await node.world.all_reduce(x)
            await node.world.broadcast(np.zeros((2, 1 << 18), np.float64), root=1)
            await node.world.all_gather(x, key="mine")
            await node.world.barrier()

        await on_all(nodes, run)
        ones = [event for event in image_of(nodes[0]).events if event.is_operation]
        others = [event for event in image_of(nodes[1]).events if event.is_operation]
        assert [(event.group, event.sequence, event.fingerprint) for event in ones] == [
            (event.group, event.sequence, event.fingerprint) for event in others
        ]
        assert [event.name for event in ones] == ["all_reduce"] * 9 + ["broadcast", "all_gather", "barrier"]
        assert {event.state for event in ones} == {EventState.COMPLETED}
        assert {event.site.file for event in ones if event.site} == {__file__}
        assert all(event.ended is not None and event.created <= event.ended for event in ones)
        broadcast = ones[9]
        assert (broadcast.root, broadcast.arrays, broadcast.nbytes) == (1, [("float64", (2, 1 << 18))], 1 << 22)
        assert ones[10].is_keyed
        assert image_of(nodes[0]).groups[broadcast.group].ranks == (0, 1)


@pytest.mark.parametrize("transport", ["inproc", "shm"])
async def test_an_operation_that_waits_is_there_while_it_waits(transport: str) -> None:
    async with local_world(2, transport=transport) as nodes:
        x = np.zeros(3, np.float32)
        for number in range(6):
            waiting = asyncio.create_task(nodes[0].world.all_reduce(x, key="late" if number % 2 else None))
            await asyncio.sleep(0.01)
            (event,) = image_of(nodes[0]).pending
            assert (event.name, event.state, event.is_keyed) == ("all_reduce", EventState.STARTED, bool(number % 2))
            await nodes[1].world.all_reduce(np.zeros(3, np.float32), key="late" if number % 2 else None)
            await waiting
            assert image_of(nodes[0]).pending == ()


async def test_an_operation_that_is_not_awaited_has_been_called() -> None:
    async with local_world(2) as nodes:
        call = nodes[0].world.barrier()
        (event,) = image_of(nodes[0]).pending
        assert (event.name, event.state) == ("barrier", EventState.CALLED)
        call.close()


async def test_ends_of_operations_that_fail_or_are_cancelled_differ() -> None:
    async with local_world(2) as nodes:
        waiting = [asyncio.create_task(node.world.all_reduce(np.zeros(2), key="x")) for node in nodes[:1]]
        await asyncio.sleep(0.01)
        waiting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        with pytest.raises(PeerCancelled):
            await nodes[1].world.all_reduce(np.zeros(2), key="x")
        assert [event.state for event in recorded(nodes[0], "all_reduce")] == [EventState.CANCELLED]
        assert [event.state for event in recorded(nodes[1], "all_reduce")] == [EventState.FAILED]


@pytest.mark.parametrize("source", [0, None])
async def test_both_ends_of_a_message_have_the_same_number(source: int | None) -> None:
    async with local_world(2) as nodes:
        receiving = asyncio.create_task(nodes[1].world.recv(source))
        await asyncio.sleep(0.01)
        (event,) = image_of(nodes[1]).pending
        assert (event.kind, event.peer) == (EventKind.RECEIVE, source)
        await nodes[0].world.send(np.zeros((4, 5), np.int16), 1)
        await receiving
        (sent,), (received,) = (image_of(node).operations for node in nodes)
        assert (sent.kind, received.kind) == (EventKind.SEND, EventKind.RECEIVE)
        assert (sent.group, sent.sequence, sent.nbytes) == (received.group, received.sequence, received.nbytes)
        assert (sent.peer, received.peer, sent.nbytes, sent.arrays) == (1, 0, 40, [("int16", (4, 5))])
        channel = image_of(nodes[0]).groups[sent.group]
        assert channel.ranks == (0, 1)
        assert channel.parent in image_of(nodes[0]).groups
