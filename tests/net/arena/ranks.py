"""Program of the rank processes of test_processes: form an arena, obey commands, and print events as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable

import uvloop

from asyncpar.core.config.world import Member, World
from asyncpar.net.arena.arena import Arena
from asyncpar.net.arena.formation import form_arena
from asyncpar.net.arena.segment import HEADER_BYTES
from asyncpar.net.arena.settings import ArenaSettings

RANK, SIZE = int(sys.argv[1]), int(sys.argv[2])
SETTINGS = ArenaSettings(bytes=1 << 20, polls=True, seconds=float(sys.argv[3]))


def report(**values: object) -> None:
    print(json.dumps(values), flush=True)


class Printer(logging.Handler):
    """Prints what is logged."""

    def emit(self, record: logging.LogRecord) -> None:
        report(log=record.getMessage())


async def form(generation: int, on_lost: Callable[[int, str], None]) -> Arena | None:
    world = World(members=tuple(Member(rank=rank) for rank in range(SIZE)), generation=generation, job=sys.argv[4])
    return await form_arena(
        world=world,
        rank=RANK,
        secret=b"s" * 32,
        settings=SETTINGS,
        on_lost=on_lost,
        on_left=lambda rank: report(left=rank),
    )


async def obey() -> None:
    """Form once, then do what is asked line by line."""
    arena = await form(0, lambda rank, cause: report(lost=rank, cause=cause))
    if arena is None:
        report(formed=False)
        return
    words = {rank: segment.words(HEADER_BYTES, 1) for rank, segment in arena.segments.items()}
    arena.on_ring = lambda messages: report(rang=messages, words=[word[0] for word in words.values()])
    report(formed=True, members=arena.members, may_spin=arena.may_spin)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        match line.decode().split():
            case ["write", word]:
                words[RANK][0] = int(word)
            case ["ring", rank]:
                arena.ring(int(rank), 7, 8)
            case ["close"]:
                arena.close()


async def repeat() -> None:
    """Form again and again until it does not work, or somebody is lost."""
    for generation in range(1_000_000):
        lost: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        arena = await form(generation, lambda rank, _: None if lost.done() else lost.set_result(rank))  # noqa: B023
        if arena is None:
            report(ended="no arena")
            return
        await asyncio.sleep(0)
        if lost.done():
            report(ended="lost", rank=lost.result())
            return
        arena.close()
        report(generation=generation)


def main() -> None:
    logging.getLogger("asyncpar.net.arena").addHandler(Printer())
    factory = uvloop.new_event_loop if RANK % 2 else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(repeat() if sys.argv[5] == "repeat" else obey())


main()
