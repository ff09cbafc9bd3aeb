"""All-reduces whose completion is defined by a policy: a rank's part in one, and its state between them.

Theory of operation.  Ranks agree on the contributors (see ``completion.machine``), which then reduce in the ordinary
way: in the whole group if all are present, so that nothing differs then, else in the group of the contributors.  A late
rank gets the result from one of them, which keeps a copy for it, in a background broadcast between the two.  A
contributor that owes a rank ``_KEPT`` results waits for it before its next reduction ends, so memory is bounded, and a
rank cannot fall behind forever.

The calls with a policy of one group and ``key`` are a series, numbered on each rank as they are called.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

from asyncpar.collectives import reductions, rooted
from asyncpar.collectives.arrays import Array, check_array, check_key, collective_reduction
from asyncpar.collectives.completion.machine import CalledHere, FailChoice
from asyncpar.collectives.completion.policies import LateCounts, Reduced, Until, check_policy, wanted
from asyncpar.collectives.completion.service import ChoiceFailedError
from asyncpar.collectives.control_calls import Place
from asyncpar.collectives.engine import Engine, describe_array
from asyncpar.collectives.ledger import hash64
from asyncpar.collectives.subgroups import make_engine
from asyncpar.core.observe.reporting import text_of
from asyncpar.core.observe.waits import WaitNotice
from asyncpar.errors import AsyncparError, OperationMismatch, PeerCancelled, PeerLost, PeerTimeout
from asyncpar.net.transport.links import Links

_KEPT: Final = 4
"""Number of results that a rank keeps for a late one."""

_NAME: Final = "all_reduce"
_REFUSED: Final = "refused: "


class PolicySeries:
    """The calls with a policy of one group and key, on one rank."""

    def __init__(self, group: int, key: str | None) -> None:
        self.number = hash64("until", group, key)
        self.last = 0
        self.counts = LateCounts()
        self.late: Array | None = None
        """The late part, which is added to the next."""
        self._groups: dict[tuple[int, ...], Engine] = {}
        self._owed: dict[int, deque[asyncio.Task[None]]] = {}

    def next_place(self) -> Place:
        """Return the place of the next call."""
        self.last += 1
        return self.number, self.last

    def group(self, engine: Engine, ranks: tuple[int, ...]) -> Engine:
        """Return the engine of ``ranks`` (of the world), a subset of the ranks of ``engine``."""
        if ranks == engine.ranks:
            return engine
        found = self._groups.get(ranks)
        if found is None:
            number = hash64("contributors", self.number, ranks)
            found = self._groups[ranks] = make_engine(engine, ranks, number, None, engine.group.limits)
        return found

    async def make_room(self, ranks: Sequence[int]) -> None:
        """Wait until no rank of ``ranks`` is owed too many results."""
        for rank in ranks:
            owed = self._owed.get(rank)
            while owed and len(owed) >= _KEPT:
                await asyncio.wait([owed[0]])
                owed.popleft()

    def owe(self, links: Links, rank: int, call: Coroutine[Any, Any, object]) -> None:
        """Run ``call``, which delivers a result to ``rank``, in the background."""
        task = links.start_task(_carried_out(call), name=f"late result for rank {rank}")
        self._owed.setdefault(rank, deque()).append(task)


def series_of(engine: Engine, key: str | None) -> PolicySeries:
    """Return the series of this ``key`` in the group of ``engine``."""
    series: PolicySeries | None = engine.series.get(check_key(key))
    if series is None:
        series = engine.series[key] = PolicySeries(engine.group.number, key)
    return series


async def _carried_out(call: Coroutine[Any, Any, object]) -> None:
    """Run ``call``, and ignore its errors.

    They concern the late rank: it is lost, or was absent for so long that its result is dropped, as it learns when it
    comes.
    """
    with suppress(AsyncparError):
        await call


def all_reduce_until(
    engine: Engine,
    x: object,
    *,
    op: str,
    out: object,
    algorithm: str | None,
    key: str | None,
    until: object,
    late: object,
) -> Coroutine[Any, Any, Reduced]:
    """See ``AllReduce``."""
    engine.table.context.check_home_loop(_NAME)
    engine.group.check_open()
    series = series_of(engine, key)
    place = series.next_place()
    try:
        policy = check_policy(until, late, op)
        source = check_array(x)
        target = reductions.target_of(source, x, out)
        collective_reduction(op, source.dtype)
        chosen = engine.algorithm(_NAME, source.nbytes, algorithm, arena=True)
    except Exception as error:
        engine.table.choices.refuse(place, engine.ranks, f"{_REFUSED}{text_of(error)}"[:2048])
        raise
    text = describe_array(_NAME, source.dtype, source.shape, (op, str(policy)), chosen).text
    label = f"{_NAME} #{place[1]} until {policy}" + ("" if key is None else f' "{key}"')
    call = _PolicyCall(
        engine,
        series,
        place,
        source,
        target,
        op=op,
        algorithm=algorithm,
        policy=policy,
        carries=late == "next",
        label=label,
    )
    return call.run(text)


class _PolicyCall:
    """One call on this rank."""

    def __init__(
        self,
        engine: Engine,
        series: PolicySeries,
        place: Place,
        source: Array,
        target: Array,
        *,
        op: str,
        algorithm: str | None,
        policy: Until,
        carries: bool,
        label: str,
    ) -> None:
        self._engine = engine
        self._series = series
        self._place = place
        self._source = source
        self._target = target
        self._op = op
        self._algorithm = algorithm
        self._policy = policy
        self._carries = carries
        self._label = label

    async def run(self, text: str) -> Reduced:
        """Return the result.  ``text`` describes the call to other ranks."""
        engine = self._engine
        contributors = await self._choose(text)
        me = engine.table.links.rank
        late = [rank for rank in engine.ranks if rank not in contributors]
        if me in contributors:
            await self._contribute(contributors, late)
        else:
            await self._take_late(contributors, late.index(me))
        return self._count(contributors)

    async def _choose(self, text: str) -> tuple[int, ...]:
        """Return the ranks of the world that contribute."""
        engine = self._engine
        limits, choices = engine.group.limits, engine.table.choices
        need, wait = wanted(self._policy, engine.size)
        future = choices.call(self._place, engine.ranks, CalledHere(text, need, wait, limits.timeout))
        try:
            if future.done():
                return future.result()
            with engine.table.links.observer.reporting(self._notice_wait):
                return await future
        except ChoiceFailedError as error:
            choices.leave(self._place, self._abort)
            raise self._error_of(error.failed, text) from None
        except asyncio.CancelledError:
            choices.leave(self._place, self._abort)
            raise
        except AsyncparError as error:
            if engine.group.is_closed:
                choices.refuse(self._place, engine.ranks, f"{_REFUSED}{text_of(error)}"[:2048])
            raise

    def _notice_wait(self, seconds: float) -> WaitNotice:
        """Return the notice of the wait for contributors, which names the first rank that has not called."""
        links, group = self._engine.table.links, self._engine.group
        missing = self._engine.table.choices.missing(self._place)
        rank = missing[0] if missing else None
        return WaitNotice(
            operation=self._label if group.name == "world" else f"{self._label} of group {group.name}",
            seconds=seconds,
            culprit=rank,
            host="" if rank is None else links.world.members[rank].host,
            where="" if rank is None else links.observer.conditions.get(rank, "has not called it"),
        )

    def _error_of(self, failed: FailChoice, text: str) -> AsyncparError:
        links = self._engine.table.links
        host = links.world.members[failed.rank].host
        about = f"rank {links.rank}: {self._label}"
        if failed.fault == "mismatch" and failed.text.startswith(_REFUSED):
            cause = failed.text.removeprefix(_REFUSED)
            message = f"{about}: the call was refused on rank {failed.rank}: {cause}"
            return PeerCancelled(message, rank=failed.rank, host=host, operation=self._label, cause=cause)
        if failed.fault == "mismatch":
            return OperationMismatch(
                f"{about}: rank {links.rank} calls {text} where rank {failed.rank} calls {failed.text}", call=text
            )
        message = f"{about}: {failed.text}; rank {failed.rank} on {host} is missing"
        kind = PeerLost if failed.fault == "lost" else PeerTimeout
        return kind(message, rank=failed.rank, host=host, operation=self._label, cause=failed.text)

    def _abort(self, contributors: tuple[int, ...]) -> None:
        """End this rank's part on the other ranks, if it has failed after it was chosen."""
        engine = self._engine
        if engine.table.links.rank in contributors and engine.group.given_up is None:
            with suppress(AsyncparError, asyncio.CancelledError):
                self._reduction(contributors, self._source).throw(asyncio.CancelledError())
            self._abandon(contributors, [rank for rank in engine.ranks if rank not in contributors])

    # -- contributing --------------------------------------------------------------------------------------------------

    async def _contribute(self, contributors: tuple[int, ...], late: list[int]) -> None:
        """Reduce with the other contributors, and owe the result to those that are late."""
        series, part = self._series, self._source
        if self._carries and series.late is not None and series.late.shape == part.shape:
            part = (part + series.late).astype(part.dtype, copy=False)
        owed = self._owed_by_me(contributors, late)
        try:
            await series.make_room(owed)
            await self._reduction(contributors, part)
        except BaseException:
            self._abandon(contributors, late)
            raise
        series.late = None if self._carries else series.late
        kept = self._target.copy() if owed else self._target
        for rank in owed:
            series.owe(self._engine.table.links, rank, self._delivery(self._engine.table.links.rank, rank, kept))

    def _reduction(self, contributors: tuple[int, ...], part: Array) -> Coroutine[Any, Any, Array]:
        group = self._series.group(self._engine, contributors)
        algorithm = self._algorithm
        if group is not self._engine and algorithm is None:  # shared memory is for the whole group
            algorithm = group.policy.choose(_NAME, part.nbytes)
        return reductions.start_all_reduce(
            group,
            part,
            self._target,
            op=self._op,
            algorithm=algorithm,
            key=f"until {self._place[0]:x} #{self._place[1]}",
        )

    def _owed_by_me(self, contributors: tuple[int, ...], late: list[int]) -> list[int]:
        """Return the late ranks to which this one sends the result."""
        engine = self._engine
        me, lost = engine.table.links.rank, engine.table.links.lost
        sources = ((rank, contributors[place % len(contributors)]) for place, rank in enumerate(late))
        return [rank for rank, source in sources if source == me and rank not in lost]

    def _abandon(self, contributors: tuple[int, ...], late: list[int]) -> None:
        """End, on late ranks, their waits for this rank's result."""
        me = self._engine.table.links.rank
        for rank in self._owed_by_me(contributors, late):
            with suppress(AsyncparError, asyncio.CancelledError):
                self._delivery(me, rank, self._target).throw(asyncio.CancelledError())

    # -- late ranks ----------------------------------------------------------------------------------------------------

    async def _take_late(self, contributors: tuple[int, ...], index: int) -> None:
        """Receive the result of the others; keep this rank's part for the next, if that is wanted."""
        series = self._series
        late = None
        if self._carries:
            late = self._source.copy()
            if series.late is not None and series.late.shape == late.shape:
                late += series.late
        source = contributors[index % len(contributors)]
        await self._delivery(source, self._engine.table.links.rank, self._target)
        if late is not None:
            series.late = late

    def _delivery(self, source: int, rank: int, result: Array) -> Coroutine[Any, Any, Array]:
        group = self._series.group(self._engine, (source, rank))
        algorithm = group.policy.choose("broadcast", result.nbytes)
        return rooted.broadcast(group, result, root=0, algorithm=algorithm, key=f"late #{self._place[1]}")

    # -- the result ----------------------------------------------------------------------------------------------------

    def _count(self, contributors: tuple[int, ...]) -> Reduced:
        series, engine = self._series, self._engine
        was_late = engine.table.links.rank not in contributors
        counts = series.counts
        series.counts = LateCounts(
            counts.calls + 1,
            counts.complete + (len(contributors) == engine.size),
            counts.late + was_late,
            counts.carried + (was_late and self._carries),
            counts.dropped + (was_late and not self._carries),
        )
        return Reduced(
            self._target,
            tuple(engine.ranks.index(rank) for rank in contributors),
            engine.size,
            was_late,
            max(0, engine.table.choices.last_decided(self._place[0]) - self._place[1]),
        )
