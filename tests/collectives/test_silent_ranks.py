"""A rank that stops in the middle of an operation is named by every other rank, in any order of waiting.

Generated: operations x algorithms x the silent rank x the moment at which it stops.  All on virtual time.
``--soak`` runs every moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.algorithms.catalog import ALGORITHMS, known_algorithms
from asyncpar.collectives.communicator import Communicator
from asyncpar.collectives.inquiry import Answer, Culprit, Inquiry
from asyncpar.collectives.protocol import Status
from asyncpar.core.config.world import Member, World
from asyncpar.errors import PeerError, PeerLost
from asyncpar.net.transport.inproc import InprocLane
from asyncpar.net.transport.links import Connector, Links
from asyncpar.net.wire.frame import FrameHeader, Payload
from asyncpar.testing import run_virtual
from tests.soak import chosen, is_soak

SIZE = 5
HOSTS = ("a", "a", "b", "b", "b")
Call = Callable[[Communicator], Coroutine[Any, Any, Any]]


class Stops:
    """Counts the frames that the silent rank gets, and says when it has stopped."""

    def __init__(self, rank: int, after: int) -> None:
        self.rank = rank
        self.left = after


class StoppableLane(InprocLane):
    """A lane whose owner may be stopped: then nothing is taken from it, and nothing leaves."""

    def __init__(self, owner: int, stops: Stops) -> None:
        super().__init__()
        self._owner = owner
        self._stops = stops

    def send(self, header: FrameHeader, payload: Payload) -> Any:
        return None if self._is_stopped else super().send(header, payload)

    @property
    def _is_stopped(self) -> bool:
        return self._owner == self._stops.rank and self._stops.left <= 0

    def _arrive(self, header: FrameHeader, payload: Payload) -> None:
        if self._owner == self._stops.rank:
            self._stops.left -= 1
        if not self._is_stopped:
            super()._arrive(header, payload)


class StoppableConnector(Connector):
    """Joins the ranks of ``members`` by stoppable lanes."""

    def __init__(self, members: dict[int, Links], stops: Stops) -> None:
        self._members = members
        self._stops = stops

    async def connect(self, links: Links, rank: int) -> None:
        if links.is_up(rank):
            return
        peer = self._members[rank]
        if peer.is_closing:
            raise PeerLost("gone", rank=rank, cause="gone")
        one, other = StoppableLane(links.rank, self._stops), StoppableLane(rank, self._stops)
        one._peer, other._peer = other, one  # noqa: SLF001  # two lanes of the fake fabric are joined by hand, as its connector does with its own class
        links.adopt(rank, one)
        peer.adopt(links.rank, other)

    def default_lane(self, rank: int) -> str:
        return "inproc"


@asynccontextmanager
async def stoppable_ranks(stops: Stops, *, timeout: float) -> AsyncIterator[list[Communicator]]:
    members: dict[int, Links] = {}
    world = World(members=tuple(Member(rank=rank, host=name, host_id=name) for rank, name in enumerate(HOSTS)))
    async with AsyncExitStack() as stack:
        communicators = []
        for rank in range(SIZE):
            connector = StoppableConnector(members, stops)
            links = await stack.enter_async_context(Links(world=world, rank=rank, connector=connector))
            members[rank] = links
            communicators.append(Communicator.world(links, timeout=timeout))
        yield communicators


def calls(operation: str, algorithm: str) -> Call:
    """Return the call on each rank; roots are in the middle."""
    rows = np.ones((SIZE, 6))

    def root_only(c: Communicator) -> Any:
        return rows if c.rank == 2 else None

    return {
        "all_reduce": lambda c: c.all_reduce(np.ones(SIZE * 4), algorithm=algorithm),
        "reduce_scatter": lambda c: c.reduce_scatter(np.ones(SIZE * 4), algorithm=algorithm),
        "all_gather": lambda c: c.all_gather(np.ones(4), algorithm=algorithm),
        "broadcast": lambda c: c.broadcast(np.ones(4), root=2, algorithm=algorithm),
        "reduce": lambda c: c.reduce(np.ones(4), root=2, algorithm=algorithm),
        "gather": lambda c: c.gather(np.ones(4), root=2, algorithm=algorithm),
        "scatter": lambda c: c.scatter(root_only(c), root=2, out=np.zeros(6), algorithm=algorithm),
        "all_to_all": lambda c: c.all_to_all(np.ones((SIZE, 2)), algorithm=algorithm),
        "barrier": lambda c: c.barrier(algorithm=algorithm),
    }[operation]


CASES = [
    (operation, algorithm)
    for operation, names in ((name, known_algorithms(name)) for name in ALGORITHMS)
    for algorithm in names
]
EVERY_TURN = [(silent, moment) for silent in range(SIZE) for moment in range(1, 12)]
TURNS: dict[float, list[tuple[int, int]]] = {
    1.0: chosen([(silent, 1) for silent in range(0, SIZE, 2)], soak=EVERY_TURN),
    10.0: chosen([(silent, 3) for silent in range(1, SIZE, 2)], soak=EVERY_TURN),
}
"""By the timeout: the silent rank, and the moment at which it stops."""


def turns_of(operation: str, algorithm: str, timeout: float) -> list[tuple[int, int]]:
    """Return one of them, by turns of the algorithms, so that each rank is silent in many; all with ``--soak``."""
    turns = TURNS[timeout]
    return turns if is_soak() else [turns[CASES.index((operation, algorithm)) % len(turns)]]


async def _survivors(call: Call, silent: int, moment: int, timeout: float) -> list[PeerError]:
    """Repeat ``call`` everywhere until rank ``silent`` stops; return what the others get, none for those it let go."""
    stops = Stops(silent, moment)
    async with stoppable_ranks(stops, timeout=timeout) as communicators:

        async def repeat(communicator: Communicator) -> None:
            for _ in range(40):  # far more than the moments: everybody comes to need the silent rank
                await call(communicator)
                await communicator.barrier(algorithm="tree")

        running = [asyncio.ensure_future(repeat(communicator)) for communicator in communicators]
        others = [task for rank, task in enumerate(running) if rank != silent]
        await asyncio.wait(others, timeout=20 * timeout)
        assert all(task.done() for task in others), "a survivor hangs"
        errors = [task.exception() for task in others]
        running[silent].cancel()
        await asyncio.wait({running[silent]})
        assert all(isinstance(error, PeerError) for error in errors), errors
        return errors  # type: ignore[return-value]  # just checked


@pytest.mark.parametrize("timeout", TURNS)
@pytest.mark.parametrize(("operation", "algorithm"), CASES)
def test_every_survivor_names_the_silent_rank(operation: str, algorithm: str, timeout: float) -> None:
    for silent, moment in turns_of(operation, algorithm, timeout):
        errors = run_virtual(_survivors(calls(operation, algorithm), silent, moment, timeout))
        blamed = [error.rank for error in errors]
        assert blamed == [silent] * (SIZE - 1), (silent, moment, [str(error) for error in errors])


@pytest.mark.parametrize("silent", [0, 2, 4])
def test_a_chain_of_messages_leads_to_the_silent_rank(silent: int) -> None:
    """Each rank receives from the one before it and passes on, as stages of a pipeline do."""

    async def pass_on(communicator: Communicator) -> None:
        if communicator.rank > 0:
            await communicator.recv(communicator.rank - 1)
        if communicator.rank < SIZE - 1:
            await communicator.send(np.ones(8), communicator.rank + 1)

    errors = run_virtual(_survivors(pass_on, silent, 2, 10.0))
    assert [error.rank for error in errors] == [silent] * (SIZE - 1), [str(error) for error in errors]


def test_a_rank_that_answers_but_does_not_come_is_named_by_those_that_wait_for_those_that_wait_for_it() -> None:
    async def main() -> list[BaseException]:
        async with stoppable_ranks(Stops(-1, 0), timeout=10.0) as communicators:
            others = [c.all_reduce(np.ones(10), algorithm="ring") for c in communicators if c.rank != 3]
            return await asyncio.gather(*others, return_exceptions=True)  # type: ignore[return-value]

    errors = run_virtual(main())
    assert [getattr(error, "rank", None) for error in errors] == [3] * (SIZE - 1), errors


def test_an_answer_clears_a_rank_and_the_longest_silence_counts() -> None:
    inquiry = Inquiry(0.0)
    inquiry.ask([1, 2, 3], 1.0)
    inquiry.record_answer(1, Answer(1.0, "in that operation too", Culprit(4, 0.5)))
    assert inquiry.find_culprit([1, 2, 3], me=0, now=1.125) == Culprit(4, 0.625)
    assert inquiry.find_culprit([1, 2, 3], me=0, now=3.0) == Culprit(4, 2.5)
    inquiry.record_answer(4, Answer(3.0, "in that operation too"))
    assert inquiry.find_culprit([1, 2, 3], me=0, now=3.0) == Culprit(2, 2.0)
    inquiry.record_answer(2, Answer(3.0, "in no operation", Culprit(2)))
    assert inquiry.find_culprit([1, 2], me=0, now=3.0) == Culprit(2)
    assert inquiry.find_culprit([1], me=4, now=3.0) is None
    assert Status("text").culprit is None
