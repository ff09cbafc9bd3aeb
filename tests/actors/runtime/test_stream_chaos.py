"""Whatever happens to a stream, in whatever order: it ends, both ends clean up, and what was read is a prefix."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.errors import PeerError, RemoteError
from asyncpar.testing.loop import run_virtual
from tests.soak import chosen

PLACES = st.one_of(st.none(), st.integers(0, 80))


class Trouble(Exception):
    """The caller's own."""


@dataclass
class Ends:
    """What began and what ended."""

    begun: int = 0
    ended: int = 0
    read: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Script:
    """Where things happen, in items; and the event that comes from outside, after so many turns of the loop."""

    rank: int
    input_ends: int | None
    input_fails: int | None
    input_waits: int | None
    endpoint_fails: int | None
    endpoint_returns: int | None
    reader_leaves: int | None
    reader_pause: int
    event: str
    turns: int


SCRIPTS = st.builds(
    Script,
    rank=st.integers(0, 1),
    input_ends=PLACES,
    input_fails=PLACES,
    input_waits=PLACES,
    endpoint_fails=PLACES,
    endpoint_returns=PLACES,
    reader_leaves=PLACES,
    reader_pause=st.sampled_from([0, 0, 1, 3]),
    event=st.sampled_from(
        ["cancel", "cancel twice", "kill rank", "close here", "close there", "kill actor", "stop actor"]
    ),
    turns=st.integers(0, 120),
)


async def numbers(script: Script, ends: Ends) -> AsyncIterator[int]:
    ends.begun += 1
    try:
        i = 0
        while i != script.input_ends:
            if i == script.input_fails:
                raise Trouble
            if i == script.input_waits:
                await asyncio.Event().wait()
            yield i
            i += 1
            if i % 7 == 0:
                await asyncio.sleep(0)
    finally:
        ends.ended += 1
        await asyncio.sleep(0)


class Echo(Actor):
    def __init__(self, script: Script, ends: Ends) -> None:
        self.script = script
        self.ends = ends

    @endpoint
    async def echo(self, items: AsyncIterator[int]) -> AsyncIterator[int]:
        self.ends.begun += 1
        try:
            async for n in items:
                if n == self.script.endpoint_fails:
                    raise ZeroDivisionError
                if n == self.script.endpoint_returns:
                    return
                yield n
        finally:
            self.ends.ended += 1
            await asyncio.sleep(0)


async def read(ref: Any, script: Script, ends: Ends) -> None:
    async for n in ref.echo.stream(numbers(script, ends)):
        if len(ends.read) == script.reader_leaves:
            break
        ends.read.append(n)
        for _ in range(script.reader_pause):
            await asyncio.sleep(0)


async def strike(ranks: Any, script: Script, reading: asyncio.Task[None]) -> None:
    """Let the event happen."""
    match script.event:
        case "cancel":
            reading.cancel()
        case "cancel twice":
            reading.cancel()
            await asyncio.sleep(0)
            reading.cancel()
        case "kill rank":
            ranks.kill(1)
        case "close here":
            await ranks.systems[0].close()
        case "close there":
            await ranks.systems[script.rank].close()
        case "kill actor":
            await ranks.systems[script.rank].kill(ranks.systems[script.rank].ref("e"))
        case "stop actor":
            stopping = asyncio.ensure_future(ranks.systems[script.rank].stop(ranks.systems[script.rank].ref("e")))
            for _ in range(script.turns):
                await asyncio.sleep(0)
            reading.cancel()
            await stopping


@settings(max_examples=chosen(50, soak=150), deadline=None)
@given(SCRIPTS)
def test_whatever_happens_a_stream_ends_and_leaves_nothing(open_ranks: Any, script: Script) -> None:
    """On virtual time a hang is an error at once; the fixture sees to what may be left behind."""
    here, there = Ends(), Ends()

    async def main() -> None:
        async with open_ranks(2) as ranks:
            await ranks.systems[script.rank].spawn(Echo, script, there, name="e")
            ref = ranks.systems[0].ref("e", rank=script.rank)
            reading = asyncio.create_task(read(ref, script, here))
            for _ in range(script.turns):
                await asyncio.sleep(0)
            await strike(ranks, script, reading)
            for _ in range(2000):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait({reading})
            if not reading.cancelled():
                assert isinstance(reading.exception(), PeerError | RemoteError | Trouble | None)
            del reading  # and with it the iterator, which the loop closes; that takes some turns
            for _ in range(50):
                await asyncio.sleep(0)

    run_virtual(main())
    assert here.read == list(range(len(here.read)))
    assert (here.begun, there.begun) == (here.ended, there.ended)
