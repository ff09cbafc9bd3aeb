"""The ranks of a host as its agent knows them: their own reports once a second, and what only the agent sees.

A rank that is stopped reports nothing: then its last report is shown, with its state in ``/proc``.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from asyncpar.core.concurrency.streams import close_stream
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.observe.waits import CONDITION_WORDS
from asyncpar.launch.stack_files import StackFile, state_of
from asyncpar.launch.vitals import Condition, RankState
from asyncpar.net.arena.limits import MemoryUse, count_memory_kills, read_memory_use
from asyncpar.observe.service import LENGTH, MOST_BYTES, ObserverReply, ObserverRequest, frame
from asyncpar.observe.stack_views import ProcessStacks, ThreadView
from asyncpar.observe.summary import (
    MOST_PAST,
    HostSummary,
    MemorySummary,
    PastGeneration,
    RankAnswer,
    RankReport,
    RankSummary,
    pack,
    spell_bytes,
    unpack,
)

EVERY_SECONDS: Final = 1.0
RECENT_SECONDS: Final = 5.0
"""The age in seconds up to which a counted kill may be that of a rank that is found dead."""

_MOST_SIZES: Final = 8


LOOK_SECONDS: Final = 1.0
"""Seconds between requests to the ranks for their summaries."""

_ANSWER_SECONDS: Final = 0.4
_COLLECT_SECONDS: Final = 0.7
"""Seconds that a rank may take to return its stacks or its events."""

_FROM_MEMORY: Final = "it does not answer; this was read from its memory"
ENDED: Final = "ended"
NOTHING: Final = "there is none"
"""The reason why a rank that was asked has nothing to report."""

_STOPPED_STATES: Final = ("T", "t")
_MOST_UNANSWERED = 8
"""The most requests that a rank may leave unanswered; one that is stopped gets no more."""


class _MemorySample(NamedTuple):
    time: float
    kills: int | None
    use: MemoryUse | None


class MemoryWatch:
    """Records whether the kernel has killed a rank for lack of memory, and the resident bytes of all ranks before."""

    def __init__(
        self,
        count_kills: Callable[[], int | None] = count_memory_kills,
        read_use: Callable[[], MemoryUse | None] = read_memory_use,
    ) -> None:
        self._count_kills = count_kills
        self._read_use = read_use
        self._samples: deque[_MemorySample] = deque()
        self._sizes: dict[int, int] = {}

    def update(self, sizes: Mapping[int, int], *, now: float) -> None:
        """Record the resident bytes of the ranks that live; read the kernel's files once a second."""
        self._sizes |= {rank: size for rank, size in sizes.items() if size}
        if self._samples and now - self._samples[-1].time < EVERY_SECONDS:
            return
        self._samples.append(_MemorySample(now, self._count_kills(), self._read_use()))
        while now - self._samples[0].time > RECENT_SECONDS:
            self._samples.popleft()

    def forget(self, rank: int) -> None:
        """Drop the size of a rank whose place another process takes."""
        self._sizes.pop(rank, None)

    @property
    def use(self) -> MemorySummary | None:
        """The nearest limit, its use at the last inspection, and how fast that grows."""
        if not self._samples or self._samples[-1].use is None:
            return None
        first, last, use = self._samples[0], self._samples[-1], self._samples[-1].use
        growth = 0.0
        if first.use is not None and first.use.limit == use.limit and last.time > first.time:
            growth = max(0.0, (use.used - first.use.used) / (last.time - first.time))
        return MemorySummary(used=use.used, limit=use.limit, is_group=use.is_group, growth=growth)

    def explain(self, *, now: float) -> str:
        """Explain why a rank was killed by SIGKILL just now, if the kernel did it for lack of memory; else ""."""
        kills = self._count_kills()
        before = [
            sample.kills for sample in self._samples if sample.kills is not None and now - sample.time <= RECENT_SECONDS
        ]
        if kills is None or not before or kills <= before[0]:
            return ""
        largest = sorted(self._sizes.items(), key=lambda item: (-item[1], item[0]))
        sizes = [f"rank {rank} {spell_bytes(size)}" for rank, size in largest[:_MOST_SIZES]]
        if len(largest) > _MOST_SIZES:
            sizes.append(f"{len(largest) - _MOST_SIZES} more of {spell_bytes(largest[_MOST_SIZES][1])} at most")
        use = self.use
        limit = "" if use is None else f"; the limit is {spell_bytes(use.limit)} of {use.owner}"
        resident = f"; resident last: {', '.join(sizes)}" if sizes else ""
        return f"was killed by the kernel (SIGKILL), which was out of memory{limit}{resident}"


class _WatchedRank(msgspec.Struct):
    place: LaunchEnvironment
    pid: int
    channel: RankChannel
    answers: Mapping[str, Callable[[], bytes]] = msgspec.field(default_factory=dict)
    stacks: StackFile | None = None
    on_place: Callable[[str], None] = lambda _: None
    state: RankState | None = None
    state_at: float = 0.0
    summary: RankSummary | None = None
    received_at: float = 0.0
    ending: str = ""
    ended_at: float = 0.0
    failure: str = ""
    blames: int | None = None
    call: str = ""
    restarts: int = 0
    """The number of its predecessors that failed by themselves."""
    seen: ThreadView | None = None
    """Its main thread, as far as it could be read while the rank did not answer."""

    def find_main(self) -> ThreadView | None:
        """Return the current state of the main thread, read from the rank's memory; None if that cannot be read."""
        threads = () if self.stacks is None or self.ending else self.stacks.read()
        return threads[0] if threads and threads[0].is_main else None

    @property
    def rank(self) -> int:
        return self.place.rank if self.summary is None else self.summary.rank


@dataclass
class HostWatch:
    """Watches the ranks of one host.  ``on_summary`` gets their summaries once a second, and when one ends."""

    host: str
    on_summary: Callable[[HostSummary], None] = lambda _: None
    memory: MemoryWatch = field(default_factory=MemoryWatch)
    """The kernel's view of the host's memory, and the ranks' sizes; fed by the observer of their processes."""
    _ranks: dict[int, _WatchedRank] = field(default_factory=dict)
    """By local rank."""
    _closing: set[asyncio.Task[None]] = field(default_factory=set)
    _past: list[PastGeneration] = field(default_factory=list)
    _restarts: int = 0
    _is_due: bool = False

    def add(
        self,
        place: LaunchEnvironment,
        pid: int,
        connection: socket.socket,
        answers: Mapping[str, Callable[[], bytes]] | None = None,
        stacks: StackFile | None = None,
        on_place: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Watch a new process, which answers over ``connection``; it replaces its predecessor.

        The agent answers requests for the kinds in ``answers``, also for ranks that are stopped or have ended.
        ``stacks`` is used to read the process's stacks when it cannot answer; ``on_place`` then gets the place of its
        program.
        """
        before = self._ranks.get(place.local_rank)
        if before is not None and before.failure:
            self._restarts += 1
            past = PastGeneration(generation=before.place.generation, time=time.time(), reason=before.failure)
            self._past = [*self._past, past][-MOST_PAST:]
        self._forget(place.local_rank)
        self.memory.forget(place.rank)
        known = _WatchedRank(place, pid, RankChannel(connection), answers or {}, stacks, on_place)
        if before is not None:
            known.restarts = before.restarts + (1 if before.failure else 0)
        self._ranks[place.local_rank] = known

    def begin_job(self) -> None:
        """Forget the failures of the previous job."""
        self._past, self._restarts = [], 0
        for known in self._ranks.values():
            known.failure, known.restarts = "", 0

    def take_state(self, place: LaunchEnvironment, state: RankState) -> None:
        """Record the agent's observation of a rank."""
        known = self._ranks.get(place.local_rank)
        if known is not None:
            known.state, known.state_at = state, time.monotonic()

    def ended(
        self,
        place: LaunchEnvironment,
        ending: str,
        failure: str = "",
        *,
        at: float | None = None,
        blames: int | None = None,
        call: str = "",
    ) -> None:
        """Record the end of a process at ``at`` (None: now); its last report is kept.

        ``failure`` is why another one may take its place; "" if that would not be for a failure of its own.
        ``blames`` is the rank that it names as the cause, ``call`` its call where others made a different one.
        """
        known = self._ranks.get(place.local_rank)
        if known is not None and not known.ending:
            known.ending, known.ended_at, known.failure = ending, time.monotonic() if at is None else at, failure
            known.blames, known.call = blames, call
            self._notify_soon()
            self._close(known)

    def _notify_soon(self) -> None:
        """Report ended ranks, those of one moment together: the job may end before the next round of requests."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._notify)

    def _notify(self) -> None:
        self._is_due = False
        self.on_summary(self.summary())

    async def run(self) -> None:
        """Ask all ranks once a second, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.refresh()
            self._notify()

    def find_place(self, place: LaunchEnvironment) -> str:
        """Return the current place of the program of a rank that does not answer; "" if that cannot be read."""
        known = self._ranks.get(place.local_rank)
        main = None if known is None else known.find_main()
        return "" if main is None else main.place

    async def refresh(self) -> None:
        """Ask all ranks for their summaries now."""
        await asyncio.gather(*(self._refresh(known) for known in self._living()))

    async def _refresh(self, known: _WatchedRank) -> None:
        reply = await known.channel.ask("summary", within=_ANSWER_SECONDS)
        known.seen = known.find_main() if reply is None else None
        if known.seen is not None and known.seen.place:
            known.on_place(known.seen.place)
        if reply is not None and reply.content:
            with suppress(msgspec.DecodeError):
                known.summary, known.received_at = unpack(reply.content, RankSummary), time.monotonic()

    def summary(self) -> HostSummary:
        """Return the current summary."""
        ranks = sorted((_report(known) for known in self._ranks.values()), key=lambda report: report.rank)
        return HostSummary(
            host=self.host,
            ranks=tuple(ranks),
            memory=self.memory.use,
            restarts=self._restarts,
            past=tuple(self._past),
        )

    async def collect(self, kind: str, ranks: Iterable[int] | None = None) -> list[RankAnswer]:
        """Return the reports of ``kind`` of ``ranks`` (None: all that live); each may take a short time only."""
        wanted = None if ranks is None else set(ranks)
        living = {known.rank for known in self._living()}
        asked = [
            known
            for known in self._ranks.values()
            if (wanted is None or known.rank in wanted)
            and (not known.ending or (kind in known.answers and known.rank not in living))
        ]
        return list(await asyncio.gather(*(self._collect_from(known, kind) for known in asked)))

    async def _collect_from(self, known: _WatchedRank, kind: str) -> RankAnswer:
        def failed(error: str) -> RankAnswer:
            return RankAnswer(rank=known.rank, host=self.host, error=error)

        if kind in known.answers:
            content = known.answers[kind]()
            return RankAnswer(rank=known.rank, host=self.host, content=content) if content else failed(NOTHING)
        is_stopped = _is_stopped(known.pid)
        reply: ObserverReply | None = None if is_stopped else await known.channel.ask(kind, within=_COLLECT_SECONDS)
        if reply is None:
            if known.ending:
                return failed(f"it {known.ending}")
            is_stopped = is_stopped or _is_stopped(known.pid)
            if kind == "stacks" and known.stacks is not None and (threads := known.stacks.read()):
                text = f"it {CONDITION_WORDS['stopped']}; {_FROM_MEMORY}" if is_stopped else _FROM_MEMORY
                stacks = ProcessStacks(pid=known.pid, rank=known.rank, time=time.time(), threads=threads, text=text)
                return RankAnswer(rank=known.rank, host=self.host, content=pack(stacks))
            if is_stopped:
                return failed(f"it {CONDITION_WORDS['stopped']}")
            return failed(_why_silent(known))
        if reply.error:
            return failed(reply.error)
        return RankAnswer(rank=known.rank, host=self.host, content=reply.content)

    def _living(self) -> list[_WatchedRank]:
        return [known for known in self._ranks.values() if not known.ending]

    def _forget(self, local_rank: int) -> None:
        known = self._ranks.pop(local_rank, None)
        if known is not None:
            self._close(known)

    def _close(self, known: _WatchedRank) -> None:
        task = asyncio.ensure_future(known.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End the connections to all ranks; their last reports are kept."""
        for known in self._ranks.values():
            self._close(known)
        if self._closing:
            await asyncio.wait(self._closing)


def _report(known: _WatchedRank) -> RankReport:
    now = time.monotonic()
    condition, seconds = Condition.WELL.value, 0.0
    if known.state is not None and known.state.condition is not Condition.WELL:  # reported when it changes
        condition, seconds = known.state.condition.value, known.state.seconds + now - known.state_at
    if known.ending:
        condition, seconds = ENDED, now - known.ended_at
    elif condition != Condition.STOPPED and _is_stopped(known.pid):
        condition, seconds = Condition.STOPPED.value, now - known.received_at if known.received_at else 0.0
    phase = "" if known.state is None or known.state.phase is None else known.state.phase.value
    return RankReport(
        rank=known.rank,
        host=known.place.host,
        pid=known.pid,
        local_rank=known.place.local_rank,
        condition=condition,
        seconds=seconds,
        phase=phase,
        age=now - known.received_at if known.received_at else 0.0,
        summary=known.summary,
        ending=known.ending,
        blames=known.blames,
        call=known.call,
        place="" if known.seen is None else known.seen.place,
        doing="" if known.seen is None else known.seen.doing,
        job=known.place.job,
        restarts=max(known.restarts, known.place.restart_count),
    )


def _is_stopped(pid: int) -> bool:
    return state_of(pid) in _STOPPED_STATES


def _why_silent(known: _WatchedRank) -> str:
    if known.summary is None:
        return "it has not answered: it does not use asyncpar, or has not come so far"
    return "it does not answer: something holds its interpreter lock"


class RankChannel:
    """Asks the thread of the observer of one rank (see ``observe/service.py``).  Owns ``connection``; ``close`` it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[ObserverReply | None]] = {}
        self._unanswered: set[int] = set()
        self._opening: asyncio.Task[asyncio.StreamWriter] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_over = False

    async def ask(self, kind: str, *, within: float) -> ObserverReply | None:
        """Return the rank's answer; None if it does not answer within so many seconds, or has ended."""
        if self._is_over or len(self._unanswered) >= _MOST_UNANSWERED:
            return None
        number = next(self._numbers)
        answer: asyncio.Future[ObserverReply | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._unanswered.add(number)
        try:
            async with asyncio.timeout(within):
                if self._opening is None:
                    self._opening = asyncio.create_task(self._open(), name="asyncpar open a rank's line")
                await asyncio.wait({self._opening})
                if self._opening.cancelled():  # by close
                    return None
                writer = self._opening.result()
                if writer.is_closing():  # the rank has ended, which no read has noticed so far
                    return None
                writer.write(frame(ObserverRequest(number, kind)))
                return await answer
        except (TimeoutError, OSError):
            return None
        finally:
            self._waiting.pop(number, None)

    async def _open(self) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(sock=self._connection)
        self._reading = asyncio.create_task(self._read(reader), name="asyncpar read a rank's line")
        return writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, OSError, msgspec.DecodeError):
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > MOST_BYTES:
                    break
                reply = msgspec.msgpack.decode(await reader.readexactly(length), type=ObserverReply)
                self._unanswered.discard(reply.number)
                answer = self._waiting.pop(reply.number, None)
                if answer is not None and not answer.done():
                    answer.set_result(reply)
        self._end()

    def _end(self) -> None:
        self._is_over = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_result(None)
        self._waiting.clear()

    async def close(self) -> None:
        """Stop asking.  Idempotent."""
        self._end()
        tasks = [task for task in (self._opening, self._reading) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._opening is not None and not self._opening.cancelled() and self._opening.exception() is None:
            await close_stream(self._opening.result())
        else:
            self._connection.close()
