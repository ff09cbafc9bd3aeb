"""The arena as a rank uses it: ringing, and what it is told of the others."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import struct
import sys
from dataclasses import replace

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.net.arena.arena import Arena, ArenaPeer, DoorbellMessage
from asyncpar.net.arena.formation import contribute
from asyncpar.net.arena.segment import HEADER_BYTES, SLEEPING, Segment
from asyncpar.net.arena.settings import ArenaSettings
from tests.net.arena.conftest import SETTINGS, Events, Ranks, Run, settle

DOORBELLS = replace(SETTINGS, polls=False)
MANY = 20_000


class Receiver:
    """Collects what an arena reads."""

    def __init__(self, arena: Arena) -> None:
        self.messages: Events[DoorbellMessage] = Events()
        arena.on_ring = self._take

    def _take(self, messages: list[DoorbellMessage]) -> None:
        for message in messages:
            self.messages.append(message)

    async def wait_for(self, message: DoorbellMessage) -> None:
        """Wait until ``message`` is the last one."""
        while message not in self.messages[-1:]:
            await self.messages.until(len(self.messages) + 1)


@pytest.mark.parametrize("settings", [SETTINGS, DOORBELLS], ids=["poll", "doorbell"])
def test_a_message_arrives_with_what_was_stored_before_it(run: Run, settings: ArenaSettings) -> None:
    async def main() -> None:
        arenas = await Ranks(3, settings=settings).form_all()
        received = [Receiver(arena) for arena in arenas]
        arenas[1].segments[1].words(HEADER_BYTES, 1)[0] = 9
        arenas[1].ring(2, 5, 6)
        await received[2].wait_for((1, 5, 6))
        assert arenas[2].segments[1].words(HEADER_BYTES, 1)[0] == 9
        assert received[0].messages == received[1].messages == []
        for arena in arenas:
            arena.close()

    run(main())


def test_messages_wait_for_a_listener(run: Run) -> None:
    async def main() -> None:
        one, other = await Ranks(2, settings=DOORBELLS).form_all()
        for word in range(MANY):
            one.ring(1, 0, word)
        received = Receiver(other)
        await received.wait_for((0, 0, MANY - 1))
        assert received.messages == [(0, 0, word) for word in range(MANY)]
        one.close()
        other.close()

    run(main())


def test_with_polling_a_flood_is_cut_but_the_sleeper_wakes(run: Run) -> None:
    async def main() -> None:
        one, other = await Ranks(2).form_all()
        for word in range(MANY):
            one.ring(1, 0, word)
        received = Receiver(other)
        await received.messages.until(1)
        assert 0 < len(received.messages) < MANY
        one.ring(1, 0, MANY)
        await received.wait_for((0, 0, MANY))
        one.close()
        other.close()

    run(main())


def test_the_sleeping_word_is_seen_by_peers(run: Run) -> None:
    async def main() -> None:
        one, other = await Ranks(2).form_all()
        one.segments[0].words(8 * SLEEPING, 1)[0] = 1
        assert other.segments[0].words(8 * SLEEPING, 1)[0] == 1
        one.close()
        other.close()

    run(main())


@pytest.mark.parametrize("settings", [SETTINGS, DOORBELLS], ids=["poll", "doorbell"])
def test_a_rank_that_closes_is_seen_as_leaving_once_and_never_as_lost(run: Run, settings: ArenaSettings) -> None:
    async def main() -> None:
        ranks = Ranks(3, settings=settings)
        arenas = await ranks.form_all()
        received = [Receiver(arena) for arena in arenas]
        arenas[1].ring(0, 1, 2)
        arenas[1].close()
        arenas[1].close()
        await ranks.left.until(2)
        assert sorted(ranks.left) == [(0, 1), (2, 1)]
        assert received[0].messages == [(1, 1, 2)], "what it said before comes first, and its farewell is no message"
        arenas[0].ring(1, 0, 0)
        arenas[0].ring(2, 7, 7)
        await received[2].wait_for((0, 7, 7))
        arenas[0].close()
        await ranks.left.until(3)
        arenas[2].close()
        assert (ranks.left[2:], ranks.lost) == ([(2, 0)], [])

    run(main())


@pytest.mark.parametrize("settings", [SETTINGS, DOORBELLS], ids=["poll", "doorbell"])
@pytest.mark.parametrize("unread", [1, 2000, MANY])
def test_a_departure_is_seen_however_full_the_pipe_is(run: Run, settings: ArenaSettings, unread: int) -> None:
    async def main() -> None:
        ranks = Ranks(3, settings=settings)
        arenas = await ranks.form_all()
        for word in range(unread):
            arenas[2].ring(0, 0, word)
        arenas[1].close()
        Receiver(arenas[0])
        await ranks.left.until(1)
        assert ranks.left == [(0, 1)]
        for arena in arenas:
            arena.close()

    run(main())


def test_memory_of_a_rank_that_left_stays_readable(run: Run) -> None:
    async def main() -> None:
        ranks = Ranks(2)
        one, other = await ranks.form_all()
        Receiver(other)
        array = one.empty(4, np.int8)
        array[:] = 3
        one.segments[0].words(HEADER_BYTES, 1)[0] = 8
        one.close()
        await ranks.left.until(1)
        assert other.segments[0].words(HEADER_BYTES, 1)[0] == 8
        assert other.segments[0].heap_array(0, 4, np.int8).tolist() == [3] * 4
        other.close()

    run(main())


def test_views_do_not_keep_an_arena_from_closing(run: Run) -> None:
    async def main() -> None:
        one, other = await Ranks(2).form_all()
        words = one.segments[1].words(HEADER_BYTES, 1)
        numbers = one.segments[0].array(HEADER_BYTES, 4, np.int32)
        buffer = one.empty(4, np.int8)
        one.close()
        other.close()
        numbers[:] = buffer[:] = 1
        assert (words[0], numbers.sum(), buffer.sum()) == (0, 4, 4)
        assert one.segments == {}
        assert one.locate(buffer) is None
        with pytest.raises(UsageError, match="arena: it is closed"):
            one.empty(4, np.int8)

    run(main())


def test_an_arena_may_be_closed_inside_what_it_calls(run: Run) -> None:
    async def main() -> None:
        ranks = Ranks(3)
        arenas = await ranks.form_all()
        arenas[0].on_ring = lambda _: arenas[0].close()
        arenas[1].ring(0, 0, 0)
        arenas[1].close()
        Receiver(arenas[2])
        await ranks.left.until(2)
        assert sorted(ranks.left) == [(2, 0), (2, 1)], "rank 0 was closed before it could be told"
        arenas[2].close()

    run(main())


# -- death -------------------------------------------------------------------------------------------------------------


class Mortal:
    """An arena of rank 0 in this process, whose peer, rank 1, is a process that only waits to be killed."""

    def __init__(self) -> None:
        self.ends: Events[tuple[str, int]] = Events()
        self.causes: list[str] = []

    async def live(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "print('up', flush=True); input()", stdin=-1, stdout=-1
        )
        own, theirs = contribute(0, SETTINGS), contribute(1, SETTINGS)
        self._own_doorbell = own.doorbell
        self.pidfd = os.pidfd_open(self.process.pid)
        own.lent.close()
        theirs.lent.close()
        self.segment, self.doorbell = theirs.segment, theirs.doorbell
        peer = Segment.open(
            self.segment.open_for_peers(),
            control_bytes=theirs.offer.control_bytes,
            heap_bytes=theirs.offer.heap_bytes,
            nonce=theirs.offer.nonce,
        )
        self.arena = Arena(
            rank=0,
            segment=own.segment,
            doorbell=own.doorbell,
            peers={1: ArenaPeer(segment=peer, doorbell=os.dup(self.doorbell.write_end), process=self.pidfd)},
            may_spin=True,
            polls=True,
            on_lost=self._lose,
            on_left=lambda rank: self.ends.append(("left", rank)),
        )
        self.arena.watch()

    def _lose(self, rank: int, cause: str) -> None:
        self.ends.append(("lost", rank))
        self.causes.append(cause)

    def speak(self, group: int) -> None:
        """Write a message as the peer would."""
        os.write(self._own_doorbell.write_end, struct.pack("<QQQ", 1, group, 0))

    async def die(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()
        await self.ends.until(1)

    async def end(self) -> None:
        self.arena.close()
        self.segment.close()
        self.doorbell.close()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


def test_a_rank_whose_process_ends_is_lost(run: Run) -> None:
    async def main() -> None:
        mortal = Mortal()
        await mortal.live()
        await mortal.die()
        mortal.arena.ring(1, 0, 0)
        await settle()
        assert (mortal.ends, mortal.causes) == ([("lost", 1)], ["its process ended"])
        await mortal.end()

    run(main())


def test_an_end_that_is_seen_in_two_ways_is_reported_once(run: Run) -> None:
    async def main() -> None:
        mortal = Mortal()
        await mortal.live()
        mortal.process.kill()
        select.select([mortal.pidfd], [], [])
        mortal.doorbell.close()
        mortal.arena.ring(1, 0, 0)
        await settle()
        assert mortal.ends == [("lost", 1)]
        await mortal.end()

    run(main())


def test_a_rank_that_left_before_its_process_ended_is_not_lost(run: Run) -> None:
    async def main() -> None:
        mortal = Mortal()
        await mortal.live()
        mortal.segment.leave()
        await mortal.die()
        assert mortal.ends == [("left", 1)]
        await mortal.end()

    run(main())


def test_what_a_rank_sent_before_its_process_ended_comes_first(run: Run) -> None:
    async def main() -> None:
        mortal = Mortal()
        await mortal.live()
        received: list[tuple[DoorbellMessage, int]] = []
        mortal.process.kill()
        select.select([mortal.pidfd], [], [])  # its end is there to see before the loop looks
        mortal.speak(7)
        mortal.arena.on_ring = lambda messages: received.append((messages[0], len(mortal.ends)))
        await mortal.ends.until(1)
        assert received == [((1, 7, 0), 0)], "nobody was told of the end before"
        await mortal.end()

    run(main())


def test_a_rank_that_does_not_read_its_doorbell_any_more_is_lost(run: Run) -> None:
    async def main() -> None:
        mortal = Mortal()
        await mortal.live()
        mortal.doorbell.close()
        mortal.arena.ring(1, 0, 0)
        assert mortal.ends == [], "not inside ring"
        await settle()
        assert (mortal.ends, mortal.causes) == ([("lost", 1)], ["nobody reads its doorbell any more"])
        await mortal.end()

    run(main())


def test_nothing_is_reported_after_the_end(run: Run) -> None:
    async def main() -> None:
        mortal = Mortal()
        await mortal.live()
        mortal.doorbell.close()
        mortal.arena.ring(1, 0, 0)
        mortal.arena.close()
        mortal.process.kill()
        await mortal.process.wait()
        await settle()
        assert mortal.ends == []
        await mortal.end()

    run(main())
