"""Links over the inproc lane: eager and granted payloads, credit, messages, loss and leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from asyncpar.core.config.world import Member, World
from asyncpar.errors import OperationMismatch, PeerLost, UsageError
from asyncpar.net.transport.flow_control import EAGER_LIMIT, EAGER_WINDOW
from asyncpar.net.transport.inproc import InprocConnector, InprocFabric
from asyncpar.net.transport.lane import Sending
from asyncpar.net.transport.links import Connector, Links
from asyncpar.net.wire.frame import FrameHeader, FrameKind, Key

LARGE = EAGER_LIMIT + 1


@dataclass
class Operations:
    """Writes down what links say to the owner of operations."""

    mismatches: list[tuple[int, int]] = field(default_factory=list)
    controls: list[tuple[int, FrameKind, bytes]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    closings: list[PeerLost] = field(default_factory=list)
    stale: set[tuple[int, int]] = field(default_factory=set)

    def is_stale(self, group: int, sequence: int) -> bool:
        return (group, sequence) in self.stale

    def frame_mismatch(self, rank: int, header: FrameHeader) -> None:
        self.mismatches.append((rank, header.fingerprint))

    def control(self, rank: int, header: FrameHeader, payload: bytes) -> None:
        self.controls.append((rank, header.kind, payload))

    def peer_lost(self, rank: int, error: PeerLost) -> None:
        self.lost.append(rank)

    def job_ends(self, error: PeerLost) -> None: ...

    def closed(self, error: PeerLost) -> None:
        self.closings.append(error)


@asynccontextmanager
async def open_world(size: int) -> AsyncIterator[list[Links]]:
    world = World(members=tuple(Member(rank=rank, host=f"host{rank}") for rank in range(size)))
    fabric = InprocFabric()
    async with AsyncExitStack() as stack:
        ranks = []
        for rank in range(size):
            links = Links(world=world, rank=rank, connector=InprocConnector(fabric))
            links.operations = Operations()
            ranks.append(await stack.enter_async_context(links))
            fabric.join(links)
        yield ranks


def operations(links: Links) -> Operations:
    assert isinstance(links.operations, Operations)
    return links.operations


async def received(waiter: Awaitable[None] | None) -> None:
    if waiter is not None:
        async with asyncio.timeout(30):
            await waiter


async def sent(sending: Sending | None) -> None:
    if sending is not None:
        await received(sending.done)


async def link_up(one: Links, other: Links) -> None:
    """Bring the link up by an exchange of one byte each way."""
    for sender, receiver in ((one, other), (other, one)):
        sending = sender.link(receiver.rank).send(Key(99, 0, 0), 0, memoryview(b"x"))
        await received(receiver.link(sender.rank).post(Key(99, 0, 0), 0, memoryview(bytearray(1))))
        await sent(sending)


@pytest.mark.parametrize("length", [0, 1, EAGER_LIMIT, LARGE, 1_000_000])
@pytest.mark.parametrize("receiver_is_first", [True, False])
async def test_a_payload_meets_its_receive(length: int, receiver_is_first: bool) -> None:
    async with open_world(2) as (one, other):
        key, payload, buffer = Key(1, 2, 3), bytes(range(256)) * (length // 256 + 1), bytearray(length)
        await link_up(one, other)
        waiter = other.link(0).post(key, 7, memoryview(buffer)) if receiver_is_first else None
        sending = one.link(1).send(key, 7, memoryview(payload)[:length])
        if not receiver_is_first:
            waiter = other.link(0).post(key, 7, memoryview(buffer))
        await received(waiter)
        await sent(sending)
        assert buffer == payload[:length]


async def test_sends_wait_for_the_link_and_keep_their_memory_until_then() -> None:
    async with open_world(2) as (one, other):
        buffer = bytearray(3)
        sending = one.link(1).send(Key(1, 0, 0), 0, memoryview(b"abc"))
        assert sending is not None
        await sent(sending)
        assert other.link(0).post(Key(1, 0, 0), 0, memoryview(buffer)) is None
        assert buffer == b"abc"


async def test_small_payloads_without_credit_wait_for_their_receive() -> None:
    async with open_world(2) as (one, other):
        await link_up(one, other)
        payload = memoryview(bytes(EAGER_LIMIT))
        count = 2 * EAGER_WINDOW // EAGER_LIMIT
        sendings = [one.link(1).send(Key(1, number, 0), 0, payload) for number in range(count)]
        waiting = [sending for sending in sendings if sending is not None]
        assert 0 < len(waiting) < count
        assert other.link(0)._inbox.early_bytes <= EAGER_WINDOW  # noqa: SLF001  # a link tells nobody how much it keeps early; the bound of that is what is tested
        for number in range(count):
            await received(other.link(0).post(Key(1, number, 0), 0, memoryview(bytearray(EAGER_LIMIT))))
        for sending in waiting:
            await sent(sending)


async def test_credit_comes_back_whatever_becomes_of_the_payloads() -> None:
    async with open_world(2) as (one, other):
        await link_up(one, other)
        payload = memoryview(bytes(EAGER_LIMIT))
        for sequence in range(4 * EAGER_WINDOW // EAGER_LIMIT):
            key = Key(1, sequence, 0)
            assert one.link(1).send(key, 0, payload) is None, f"no credit is left at payload {sequence}"
            match sequence % 3:
                case 0:
                    other.forget(1, sequence)
                case 1:
                    operations(other).stale.add((1, sequence + 1))  # the next one is dropped on arrival
                    assert other.link(0).post(key, 0, memoryview(bytearray(EAGER_LIMIT))) is None
                case _:
                    other.forget(1, sequence)


async def test_large_payloads_in_another_order_than_their_receives_do_not_deadlock() -> None:
    async with open_world(2) as (one, other):
        payloads = [bytes([number]) * 200_000 for number in range(10)]
        sendings = [one.link(1).send(Key(1, n, 0), 0, memoryview(payload)) for n, payload in enumerate(payloads)]
        for number in reversed(range(10)):
            buffer = bytearray(200_000)
            await received(other.link(0).post(Key(1, number, 0), 0, memoryview(buffer)))
            assert buffer == payloads[number]
        for sending in sendings:
            await sent(sending)


async def test_a_withdrawn_receive_is_not_written_by_a_payload_that_was_granted() -> None:
    async with open_world(2) as (one, other):
        await link_up(one, other)
        buffer = bytearray(LARGE)
        waiter = other.link(0).post(Key(1, 0, 0), 0, memoryview(buffer))  # the grant is out
        other.link(0).withdraw(Key(1, 0, 0))
        buffer[:] = b"\1" * LARGE
        await sent(one.link(1).send(Key(1, 0, 0), 0, memoryview(bytes(LARGE))))
        assert buffer == b"\1" * LARGE
        assert waiter is not None
        assert not waiter.done()
        assert one.lost == other.lost == {}


async def test_a_receive_whose_future_was_cancelled_is_not_written() -> None:
    async with open_world(2) as (one, other):
        await link_up(one, other)
        buffer = bytearray(4)
        waiter = other.link(0).post(Key(1, 0, 0), 0, memoryview(buffer))
        assert waiter is not None
        waiter.cancel()
        one.link(1).send(Key(1, 0, 0), 0, memoryview(b"late"))
        assert buffer == bytes(4)


async def test_a_released_send_never_travels() -> None:
    async with open_world(2) as (one, other):
        await link_up(one, other)
        payload = bytearray(LARGE)
        sending = one.link(1).send(Key(1, 0, 0), 0, memoryview(payload))
        assert sending is not None
        assert sending.release() is False
        assert sending.done.cancelled()
        waiter = other.link(0).post(Key(1, 0, 0), 0, memoryview(bytearray(LARGE)))
        assert waiter is not None
        assert not waiter.done()
        other.link(0).withdraw(Key(1, 0, 0))


async def test_cancelling_the_wait_for_a_send_does_not_break_the_link() -> None:
    async with open_world(2) as (one, other):
        await link_up(one, other)
        sending = one.link(1).send(Key(1, 0, 0), 0, memoryview(bytes(LARGE)))
        assert sending is not None
        sending.done.cancel()
        await received(other.link(0).post(Key(1, 0, 0), 0, memoryview(bytearray(LARGE))))
        assert sending.release() is True


async def test_lengths_that_differ_are_an_error_on_the_side_that_notices() -> None:
    async with open_world(2) as (one, other):
        await link_up(one, other)
        waiter = other.link(0).post(Key(1, 0, 0), 0, memoryview(bytearray(3)))
        assert waiter is not None
        one.link(1).send(Key(1, 0, 0), 0, memoryview(b"four"))
        with pytest.raises(OperationMismatch, match="expects 3 bytes, the peer sent 4"):
            await waiter
        one.link(1).send(Key(1, 1, 0), 0, memoryview(b"four"))
        with pytest.raises(OperationMismatch, match="expects 3 bytes, the peer sent 4"):
            other.link(0).post(Key(1, 1, 0), 0, memoryview(bytearray(3)))
        other.link(0).post(Key(1, 2, 0), 0, memoryview(bytearray(LARGE)))
        with pytest.raises(OperationMismatch, match=f"sends {LARGE + 1} bytes, the peer expects {LARGE}"):
            one.link(1).send(Key(1, 2, 0), 0, memoryview(bytes(LARGE + 1)))


@pytest.mark.parametrize("length", [4, LARGE])
async def test_fingerprints_that_differ_are_reported_to_the_operations(length: int) -> None:
    async with open_world(2) as (one, other):
        await link_up(one, other)
        other.link(0).post(Key(1, 0, 0), 11, memoryview(bytearray(length)))
        one.link(1).send(Key(1, 0, 0), 22, memoryview(bytes(length)))
        noticed = (0, 22) in operations(other).mismatches if length == 4 else (1, 11) in operations(one).mismatches
        assert noticed, "the payload if it travels, else the grant, meets the other operation"
        one.link(1).send(Key(1, 1, 0), 22, memoryview(bytes(4)))
        other.link(0).post(Key(1, 1, 0), 11, memoryview(bytearray(4)))
        assert operations(other).mismatches.count((0, 22)) == (2 if length == 4 else 1)


# -- messages ----------------------------------------------------------------------------------------------------------


def collect(links: Links) -> tuple[list[bytes], list[Callable[[], None]]]:
    messages: list[bytes] = []
    releases: list[Callable[[], None]] = []

    def on_message(rank: int, payload: memoryview, release: Callable[[], None]) -> None:
        messages.append(bytes(payload[:8]))
        releases.append(release)

    links.on_message = on_message
    return messages, releases


async def test_messages_are_delivered_in_order_though_small_ones_overtake_large_ones() -> None:
    async with open_world(2) as (one, other):
        messages, releases = collect(other)
        budget = 64 << 20
        sendings = []
        for number in range(12):
            length = budget // 2 + 1 if number % 3 == 0 else 8
            sendings.append(one.send_message(1, memoryview(number.to_bytes(8, "little") + bytes(length - 8))))
        for _ in range(12):
            while releases:
                releases.pop(0)()
            await asyncio.sleep(0)
        for sending in sendings:
            await sent(sending)
        assert messages == [number.to_bytes(8, "little") for number in range(12)]


async def test_large_messages_wait_until_earlier_ones_are_consumed() -> None:
    async with open_world(2) as (one, other):
        messages, releases = collect(other)
        await link_up(one, other)
        large = memoryview(bytes(40 << 20))
        first, second = one.send_message(1, large), one.send_message(1, large)
        await sent(first)
        assert second is not None
        assert not second.done.done()
        assert len(messages) == 1
        releases[0]()
        await sent(second)
        assert len(messages) == 2


async def test_a_message_taken_back_does_not_hold_up_the_next_one() -> None:
    async with open_world(2) as (one, other):
        messages, releases = collect(other)
        await link_up(one, other)
        large = memoryview(bytes(40 << 20))
        one.send_message(1, large)
        waiting = one.send_message(1, large)
        one.send_message(1, memoryview(b"after..."))
        assert len(messages) == 1
        assert waiting is not None
        assert waiting.release() is False
        assert messages[1:] == [b"after..."]
        for release in releases:
            release()
        assert one.lost == other.lost == {}


async def test_a_message_taken_back_before_the_link_is_up_does_not_hold_up_the_next_one() -> None:
    async with open_world(2) as (one, other):
        messages, _ = collect(other)
        first, second = one.send_message(1, memoryview(b"first...")), one.send_message(1, memoryview(b"second.."))
        assert first is not None
        assert first.release() is False
        await sent(second)
        assert messages == [b"second.."]


async def test_releasing_a_message_that_is_gone_does_not_take_it_back() -> None:
    async with open_world(2) as (one, other):
        messages, _ = collect(other)
        first = one.send_message(1, memoryview(b"first..."))
        assert first is not None
        await sent(first)
        assert first.release() is True
        one.send_message(1, memoryview(b"second.."))
        assert messages == [b"first...", b"second.."]


async def test_a_message_that_is_too_long_is_refused_where_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncpar.net.transport.links.MAX_MESSAGE_BYTES", 100)
    async with open_world(2) as (one, _):
        with pytest.raises(UsageError, match="at most 100 bytes can be sent, got 101"):
            one.send_message(1, memoryview(bytes(101)))


# -- loss and leaving --------------------------------------------------------------------------------------------------


def cut(one: Links, rank: int) -> None:
    """Cut the link between ``one`` and ``rank`` as a failing network would."""
    lane = one.link(rank).lane
    assert lane is not None
    lane.cut("the cable is cut")  # type: ignore[attr-defined]


async def test_a_loss_ends_everything_that_pends_and_everything_new() -> None:
    async with open_world(2) as (one, other):
        await link_up(one, other)
        waiter = one.link(1).post(Key(1, 0, 0), 0, memoryview(bytearray(4)))
        sending = one.link(1).send(Key(1, 1, 0), 0, memoryview(bytes(LARGE)))
        assert waiter is not None
        assert sending is not None
        cut(one, 1)
        for pending in (waiter, sending.done):
            with pytest.raises(PeerLost, match="rank 1 on host1 is lost: the cable is cut") as caught:
                await pending
            assert (caught.value.rank, caught.value.host, caught.value.cause) == (1, "host1", "the cable is cut")
        with pytest.raises(PeerLost):
            one.link(1).post(Key(1, 2, 0), 0, memoryview(bytearray(4)))
        with pytest.raises(PeerLost):
            one.link(1).send(Key(1, 2, 0), 0, memoryview(bytes(4)))
        assert operations(one).lost == [1]
        assert operations(other).lost == [0]


async def test_when_a_link_breaks_everybody_agrees_which_side_is_lost_and_learns_it_once() -> None:
    async with open_world(4) as ranks:
        reported: list[tuple[int, int]] = []
        for links in ranks:
            links.add_loss_listener(lambda rank, _, links=links: reported.append((links.rank, rank)))  # type: ignore[misc]
            for other in ranks[links.rank + 1 :]:
                await link_up(links, other)
        cut(ranks[0], 3)  # rank 3 is the first to notice
        assert sorted(reported) == [(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0)]
        assert "reported by rank 3" in str(ranks[1].lost[0])
        assert "has declared this rank, 0, lost" in str(ranks[0].lost[1])


async def test_a_flood_of_notices_is_reported_once() -> None:
    async with open_world(3) as ranks:
        await link_up(ranks[0], ranks[1])
        reported: list[int] = []
        ranks[1].add_loss_listener(lambda rank, _: reported.append(rank))
        for _ in range(1000):
            ranks[0].control(1, FrameKind.NOTICE, Key(0, 2, 0), b"gone")
            ranks[0].control(1, FrameKind.NOTICE, Key(0, 77, 0), b"nobody")
        assert reported == [2]
        ranks[0].control(1, FrameKind.NOTICE, Key(0, 1, 0), b"you yourself")
        ranks[0].control(1, FrameKind.NOTICE, Key(0, 1, 0), b"you yourself")
        assert reported == [2, 0]


async def test_who_leaves_is_not_a_failure_and_what_it_sent_can_still_be_received() -> None:
    async with open_world(2) as (one, other):
        await link_up(one, other)
        reported: list[int] = []
        other.add_loss_listener(lambda rank, _: reported.append(rank))
        one.link(1).send(Key(1, 0, 0), 0, memoryview(b"last"))
        waiter = other.link(0).post(Key(1, 1, 0), 0, memoryview(bytearray(4)))
        await one.close()
        buffer = bytearray(4)
        assert other.link(0).post(Key(1, 0, 0), 0, memoryview(buffer)) is None
        assert buffer == b"last"
        assert waiter is not None
        with pytest.raises(PeerLost, match="it left the world"):
            await waiter
        with pytest.raises(PeerLost, match="it left the world"):
            other.link(0).send(Key(1, 2, 0), 0, memoryview(b"x"))
        assert reported == [0]
        assert operations(other).lost == []
        assert operations(one).lost == []


async def test_a_rank_that_is_not_there_is_lost() -> None:
    async with open_world(3) as ranks:
        await ranks[1].close()
        waiter = ranks[0].link(1).post(Key(1, 0, 0), 0, memoryview(bytearray(4)))
        assert waiter is not None
        with pytest.raises(PeerLost, match="rank 1 on host1 is lost"):
            await waiter


async def test_a_closed_node_refuses_everything_at_once() -> None:
    async with open_world(2) as (one, _):
        await one.close()
        with pytest.raises(PeerLost, match="this node is closed"):
            one.link(1).post(Key(1, 0, 0), 0, memoryview(bytearray(4)))
        with pytest.raises(PeerLost, match="this node is closed"):
            one.send_message(1, memoryview(b"x"))
        one.control(1, FrameKind.PROBE, Key(1, 0, 0))


async def test_the_owner_of_the_operations_is_notified_once_that_this_rank_leaves() -> None:
    async with open_world(2) as (one, _):
        await one.close()
        await one.close()
        assert operations(one).closings == [one.closed]


class Hanging(Connector):
    async def connect(self, links: Links, rank: int) -> None:
        await asyncio.get_running_loop().create_future()

    def default_lane(self, rank: int) -> str:
        return "hanging"


class Forgetful(Hanging):
    async def connect(self, links: Links, rank: int) -> None:
        return


async def test_closing_ends_links_that_are_still_opening() -> None:
    world = World(members=(Member(rank=0), Member(rank=1)))
    async with asyncio.timeout(30), Links(world=world, rank=0, connector=Hanging()) as links:
        sending = links.link(1).send(Key(1, 0, 0), 0, memoryview(b"x"))
        waiter = links.link(1).post(Key(1, 0, 1), 0, memoryview(bytearray(1)))
        await asyncio.sleep(0)
    assert sending is not None
    assert waiter is not None
    for pending in (sending.done, waiter):
        with pytest.raises(PeerLost, match="this node is closed"):
            await pending


async def test_a_connector_that_brings_no_lane_loses_the_peer() -> None:
    world = World(members=(Member(rank=0), Member(rank=1)))
    async with Links(world=world, rank=0, connector=Forgetful()) as links:
        sending = links.link(1).send(Key(1, 0, 0), 0, memoryview(b"x"))
        assert sending is not None
        with pytest.raises(PeerLost, match="closed before it was used"):
            await sending.done


@pytest.mark.parametrize(
    ("rank", "message"), [(2, "expected 0..1, got 2"), (-1, "expected 0..1"), (0, "this rank itself")]
)
async def test_ranks_that_cannot_be_linked_are_usage_errors(rank: int, message: str) -> None:
    async with open_world(2) as (one, _):
        with pytest.raises(UsageError, match=message):
            one.link(rank).send(Key(1, 0, 0), 0, memoryview(b"x"))


async def test_messages_answered_inside_their_delivery_do_not_exhaust_the_stack() -> None:
    async with open_world(2) as ranks:
        await link_up(ranks[0], ranks[1])
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def answer(links: Links) -> None:
            def on_message(rank: int, payload: memoryview, release: Callable[[], None]) -> None:
                release()
                left = int(bytes(payload))
                if left:
                    links.send_message(rank, memoryview(str(left - 1).encode()))
                else:
                    done.set_result(None)

            links.on_message = on_message

        for links in ranks:
            answer(links)
        ranks[0].send_message(1, memoryview(b"5000"))
        await received(done)
