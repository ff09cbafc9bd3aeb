"""The simulated lane keeps the promises of every lane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

from asyncpar.net.transport.lane import Lane
from asyncpar.net.wire.handshake import LinkTerms
from asyncpar.testing.lanes import LaneConformance, LanePair, RecordingEvents, frame, on_loop, pattern
from asyncpar.testing.simulation.lane import SimLane
from asyncpar.testing.simulation.loop import SimulationLoop
from asyncpar.testing.simulation.network import Conditions, SimulatedNetwork
from asyncpar.testing.simulation.process import SimulatedProcess
from asyncpar.testing.simulation.trace import Trace


class TestSimLane(LaneConformance):
    def new_event_loop(self) -> SimulationLoop:
        self.trace = Trace()
        return SimulationLoop(1, self.trace)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[LanePair]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulationLoop)
        self.network = SimulatedNetwork(loop, self.trace, 1, Conditions())
        terms = LinkTerms(job="test", generation=0, dialer=0, listener=1, token=bytes(16))
        ends = [
            SimLane(self.network, SimulatedProcess(f"node {n}", number=n + 1, node=n), Random("lanes"), terms, rank=n)
            for n in (0, 1)
        ]
        SimLane.join(self.network, *ends)

        async def sever() -> None:
            self.network.reset(0, 1)

        one, other = ends
        yield LanePair(one=one, other=other, sever=sever)

    async def receive(self, pair: LanePair, count: int, *, sender: Lane | None = None) -> RecordingEvents:
        """Send ``count`` frames from the one to the other; return what the other gets of them and the lane's end."""
        events = RecordingEvents()
        pair.one.start(RecordingEvents())
        pair.other.start(events)
        for tag in range(count):
            pair.one.send(*frame(tag, pattern(100, tag)))
        return events

    @on_loop
    async def test_what_a_clog_holds_up_comes_in_order_after_it(self) -> None:
        async with self.connect() as pair:
            events = await self.receive(pair, 10)
            self.network.clog(0, 1)
            pair.one.send(*frame(10, b"late"))
            await asyncio.sleep(100.0)
            assert events.tags == []
            self.network.unclog(0, 1)
            await events.until_tag(10)
            assert events.tags == list(range(11))
            assert events.losses == []

    @on_loop
    async def test_a_silence_ends_both_ends_after_the_link_timeout(self) -> None:
        async with self.connect() as pair:
            here, there = RecordingEvents(), RecordingEvents()
            pair.one.start(here)
            pair.other.start(there)
            self.network.silence(0, 1)
            await asyncio.sleep(4.9)
            assert here.losses + there.losses == []
            await asyncio.sleep(0.2)
            assert here.losses == there.losses == ["the peer's host does not answer"]

    @on_loop
    async def test_a_short_silence_is_only_a_delay(self) -> None:
        async with self.connect() as pair:
            self.network.silence(0, 1)
            events = await self.receive(pair, 5)
            await asyncio.sleep(4.0)
            self.network.end_silence(0, 1)
            await asyncio.sleep(10.0)
            assert events.tags == list(range(5))
            assert events.losses == []

    @on_loop
    async def test_of_a_half_open_connection_the_other_end_learns_when_it_sends(self) -> None:
        async with self.connect() as pair:
            here, there = RecordingEvents(), RecordingEvents()
            pair.one.start(here)
            pair.other.start(there)
            self.network.clog(0, 1)  # what the first end says about it does not come
            self.network.reset(0, 1, is_half=True)
            await here.until_lost()
            assert there.losses == []

    @on_loop
    async def test_a_frame_that_comes_again_is_found(self) -> None:
        async with self.connect() as pair:
            events = await self.receive(pair, 3)
            await events.until_tag(2)
            self.network.replay(0, 1)
            await events.until_lost()
            assert events.tags == [0, 1, 2]
            assert "frame 3 was expected" in events.losses[0]

    @on_loop
    async def test_a_bit_that_changes_is_found(self) -> None:
        async with self.connect() as pair:
            self.network.damage(0, 1)
            events = await self.receive(pair, 1)
            await events.until_lost()
            assert events.tags == []
            assert "damaged link: sim lane" in events.losses[0]
