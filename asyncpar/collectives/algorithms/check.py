"""Proofs of schedules, by symbolic runs of all ranks.  Pure.

Theory of operation.  A chunk's content is the list of contributions ``(rank, chunk)`` that were combined into it; None
is memory that holds nothing yet.  All ranks run at once under the strictest rules that a transport may have: a message
moves only when its receive is posted, and a round is over when all its messages have moved.  A schedule that passes
under these rules passes under any.  ``verify`` compares the final content of every chunk with the promise of the
operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from asyncpar.collectives.algorithms.steps import Copy, RankSchedule, Recv, Send, Span, Spans
from asyncpar.errors import AsyncparError

Contribution = tuple[int, int]
Content = tuple[Contribution, ...] | None


class ScheduleError(AsyncparError):
    """A schedule is wrong; the message names the rank, the round and the fault."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a checked set of schedules.

    ``steps`` is the number of message times from the first send to the last receive if all messages take equally long;
    ``messages`` and ``chunks_sent`` count by rank.
    """

    steps: int
    messages: tuple[int, ...]
    chunks_sent: tuple[int, ...]
    chunks: int

    def bytes_sent(self, payload: int) -> tuple[int, ...]:
        """Return the bytes that each rank sends when the buffer of all chunks has ``payload`` bytes."""
        return tuple(sent * payload // self.chunks if self.chunks else 0 for sent in self.chunks_sent)


class _Message(msgspec.Struct):
    contents: tuple[Content, ...]
    knowledge: frozenset[int]
    time: int
    sender: _Rank


class _Rank(msgspec.Struct):
    rank: int
    schedule: RankSchedule
    chunks: list[Content]
    knows: frozenset[int]
    round: int = -1
    time: int = 0
    ready: int = 0
    open_sends: int = 0
    receives: list[tuple[Recv, _Message | None]] = msgspec.field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.round >= len(self.schedule.rounds)

    def fault(self, what: str) -> ScheduleError:
        return ScheduleError(f"rank {self.rank}, round {self.round}: {what}")


Initial = Callable[[int, int], Content]
"""Content of (rank, chunk) before the operation."""


class ScheduleRun:
    """All ranks of one operation, run to the end or to the first fault."""

    def __init__(self, schedules: Sequence[RankSchedule], initial: Initial) -> None:
        self.ranks = [
            _Rank(rank, plan, [initial(rank, chunk) for chunk in range(plan.chunks)], frozenset({rank}))
            for rank, plan in enumerate(schedules)
        ]
        self.messages = [0] * len(schedules)
        self.chunks_sent = [0] * len(schedules)
        self._sent: dict[tuple[int, int], deque[_Message]] = {}

    def run(self) -> None:
        """Run until all ranks have finished.

        Raises ``ScheduleError`` when no rank can proceed, when messages are left over, and for any conflict.
        """
        for rank in self.ranks:
            self._begin_next(rank)
        while any(not rank.is_over for rank in self.ranks):
            moved = [self._match(rank) for rank in self.ranks]
            finished = [self._finish(rank) for rank in self.ranks]
            if not any(moved) and not any(finished):
                raise self._deadlock()
        for (source, to), left in self._sent.items():
            if left:
                raise ScheduleError(f"rank {to} never receives {len(left)} messages of rank {source}")

    def _begin_next(self, rank: _Rank) -> None:
        rank.round += 1
        if rank.is_over:
            return
        steps = rank.schedule.rounds[rank.round]
        _check_conflicts(rank)
        rank.receives = [(step, None) for step in steps if isinstance(step, Recv)]
        sends = [step for step in steps if isinstance(step, Send)]
        rank.open_sends = len(sends)
        rank.ready = rank.time
        for step in sends:
            self._send(rank, step)

    def _send(self, rank: _Rank, step: Send) -> None:
        if not 0 <= step.peer < len(self.ranks) or step.peer == rank.rank:
            raise rank.fault(f"sends to rank {step.peer}")
        contents = tuple(_read(rank, chunk) for chunk in _flat(step.chunks))
        message = _Message(contents, rank.knows, rank.time, rank)
        self._sent.setdefault((rank.rank, step.peer), deque()).append(message)
        self.messages[rank.rank] += 1
        self.chunks_sent[rank.rank] += len(contents)

    def _match(self, rank: _Rank) -> bool:
        if rank.is_over:
            return False
        has_moved = False
        for index, (step, arrived) in enumerate(rank.receives):
            waiting = self._sent.get((step.peer, rank.rank))
            if arrived is not None or not waiting:
                continue
            message = waiting.popleft()
            if len(message.contents) != len(list(_flat(step.chunks))):
                raise rank.fault(f"expects another number of chunks than rank {step.peer} sends")
            rank.receives[index] = (step, message)
            message.sender.open_sends -= 1
            rank.ready = max(rank.ready, message.time + 1, rank.time + 1)
            message.sender.ready = max(message.sender.ready, rank.time + 1, message.time + 1)
            has_moved = True
        return has_moved

    def _finish(self, rank: _Rank) -> bool:
        if rank.is_over or rank.open_sends or any(arrived is None for _, arrived in rank.receives):
            return False
        for step, message in rank.receives:
            assert message is not None
            rank.knows |= message.knowledge
            for chunk, content in zip(_flat(step.chunks), message.contents, strict=True):
                rank.chunks[chunk] = _combine(rank, chunk, content) if step.reduce else content
        for copy in rank.schedule.rounds[rank.round]:
            if isinstance(copy, Copy):
                _copy(rank, copy)
        rank.time = rank.ready
        self._begin_next(rank)
        return True

    def _deadlock(self) -> ScheduleError:
        stuck = [f"rank {rank.rank} in round {rank.round}" for rank in self.ranks if not rank.is_over]
        return ScheduleError(f"deadlock: no rank can proceed; waiting are {', '.join(stuck)}")


def _flat(spans: Spans) -> Iterable[int]:
    for start, stop in spans:
        yield from range(start, stop)


def _read(rank: _Rank, chunk: int) -> Content:
    if not 0 <= chunk < len(rank.chunks):
        raise rank.fault(f"chunk {chunk} is not one of {len(rank.chunks)}")
    content = rank.chunks[chunk]
    if content is None:
        raise rank.fault(f"chunk {chunk} is sent but holds nothing yet")
    return content


def _combine(rank: _Rank, chunk: int, content: Content) -> Content:
    return tuple(sorted((*(_read(rank, chunk) or ()), *(content or ()))))


def _copy(rank: _Rank, step: Copy) -> None:
    contents = [_read(rank, chunk) for chunk in range(*step.source)]
    if len(contents) != step.target.stop - step.target.start:
        raise rank.fault(f"copies {step.source} to {step.target}, which has another length")
    rank.chunks[step.target.start : step.target.stop] = contents


def _check_conflicts(rank: _Rank) -> None:
    """Raise unless the steps of the round may run at the same time (see ``algorithms.steps``)."""
    read: set[int] = set()
    reduced: set[int] = set()
    written: set[int] = set()

    def write(spans: Iterable[Span], into: set[int]) -> None:
        for chunk in _flat(tuple(spans)):
            if not 0 <= chunk < len(rank.chunks):
                raise rank.fault(f"chunk {chunk} is not one of {len(rank.chunks)}")
            if chunk in written or chunk in reduced:
                raise rank.fault(f"chunk {chunk} is written twice")
            into.add(chunk)

    for step in rank.schedule.rounds[rank.round]:
        match step:
            case Send(_, chunks):
                read.update(_flat(chunks))
            case Recv(_, chunks, reduce):
                write(chunks, reduced if reduce else written)
            case Copy(source, target):
                read.update(range(*source))
                write((target,), written)
    if read & written:
        raise rank.fault(f"chunks {sorted(read & written)} are read and written")


_FULL_AT_START = frozenset({"all_reduce", "reduce", "reduce_scatter"})
_OWN_AT_START = frozenset({"all_gather", "gather"})
_ROOT_AT_START = frozenset({"broadcast", "scatter"})


def initial_content(operation: str, size: int, root: int, rank: int, chunk: int) -> Content:
    """Return the content of ``chunk`` of ``rank`` before ``operation``."""
    holds = (
        operation in _FULL_AT_START
        or (operation in _OWN_AT_START and chunk == rank)
        or (operation in _ROOT_AT_START and rank == root)
        or (operation == "all_to_all" and chunk < size)
    )
    return ((rank, chunk),) if holds else None


def goal(operation: str, size: int, root: int, rank: int, chunks: int) -> Iterator[tuple[int, Content]]:
    """Yield the chunks of ``rank`` that matter after ``operation``, with their required content."""
    every = range(chunks)
    match operation:
        case "all_reduce":
            yield from ((chunk, _sum(chunk, size)) for chunk in every)
        case "reduce" if rank == root:
            yield from ((chunk, _sum(chunk, size)) for chunk in every)
        case "reduce_scatter":
            yield rank, _sum(rank, size)
        case "all_gather":
            yield from ((chunk, ((chunk, chunk),)) for chunk in every)
        case "gather" if rank == root:
            yield from ((chunk, ((chunk, chunk),)) for chunk in every)
        case "broadcast":
            yield from ((chunk, ((root, chunk),)) for chunk in every)
        case "scatter":
            yield rank, ((root, rank),)
        case "all_to_all":
            yield from ((size + source, ((source, rank),)) for source in range(size))


def verify(operation: str, schedules: Sequence[RankSchedule], *, root: int = 0) -> Report:
    """Run the schedules of all ranks and return their costs.

    Raises ``ScheduleError`` for a deadlock, a conflict inside a round, and any chunk whose final content is not each
    rank exactly once (reductions) or the right origin (all others).
    """
    size = len(schedules)
    simulation = ScheduleRun(schedules, lambda rank, chunk: initial_content(operation, size, root, rank, chunk))
    simulation.run()
    for state in simulation.ranks:
        for chunk, expected in goal(operation, size, root, state.rank, state.schedule.chunks):
            if state.chunks[chunk] != expected:
                raise ScheduleError(
                    f"rank {state.rank}: chunk {chunk} must hold {expected} after {operation}, "
                    f"it holds {state.chunks[chunk]}"
                )
        if operation == "barrier" and len(state.knows) != size:
            missing = sorted(set(range(size)) - state.knows)
            raise ScheduleError(
                f"rank {state.rank} leaves the barrier without knowing that ranks {missing} have entered it"
            )
    return Report(
        steps=max(state.time for state in simulation.ranks),
        messages=tuple(simulation.messages),
        chunks_sent=tuple(simulation.chunks_sent),
        chunks=max(plan.chunks for plan in schedules) if operation != "all_to_all" else size,
    )


def _sum(chunk: int, size: int) -> Content:
    return tuple((rank, chunk) for rank in range(size))
