"""Schedules: rounds of sends, receives and copies, in chunk numbers.

A schedule refers to one buffer per rank, cut into numbered chunks, and to ranks of the group.  It is a sequence of
rounds; the steps of a round run at the same time, and a round begins when the one before it is over on this rank.  The
n-th ``Send`` from one rank to another matches the n-th ``Recv`` there, and both name equally many chunks, in the same
order.  Within a round no step may write chunks that another step of the round reads or writes, with one exception:
chunks that are sent may be reduced into, and the sends then carry their content from before the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


class Span(NamedTuple):
    """Chunks from ``start`` to below ``stop``."""

    start: int
    stop: int


Spans = tuple[Span, ...]


class Send(msgspec.Struct, frozen=True):
    """Send the chunks, one after another, to ``peer``."""

    peer: int
    chunks: Spans


class Recv(msgspec.Struct, frozen=True):
    """Receive the chunks from ``peer``; ``reduce`` combines them with the local ones instead of replacing those."""

    peer: int
    chunks: Spans
    reduce: bool = False


class Copy(msgspec.Struct, frozen=True):
    """Copy chunks within this rank."""

    source: Span
    target: Span


Step = Send | Recv | Copy
Round = tuple[Step, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSchedule:
    """The rounds of one rank over a buffer of ``chunks`` chunks."""

    chunks: int
    rounds: tuple[Round, ...]


def schedule(chunks: int, rounds: Iterable[Round]) -> RankSchedule:
    """Return the schedule of ``rounds``, without the empty ones."""
    return RankSchedule(chunks=chunks, rounds=tuple(steps for steps in rounds if steps))


def emptied(rounds: Iterable[Round]) -> tuple[Round, ...]:
    """Return the messages of ``rounds`` without payload."""
    return tuple(
        tuple(
            Send(step.peer, ()) if isinstance(step, Send) else Recv(step.peer, ())
            for step in steps
            if not isinstance(step, Copy)
        )
        for steps in rounds
    )


def one(chunk: int) -> Spans:
    """Return the spans of a single chunk."""
    return (Span(chunk, chunk + 1),)


def span(start: int, stop: int) -> Spans:
    """Return the spans of chunks ``start`` to ``stop``; empty if there are none."""
    return (Span(start, stop),) if start < stop else ()


def wrapped(start: int, count: int, size: int) -> Spans:
    """Return the spans of ``count`` chunks from ``start`` on, wrapping around to 0 after ``size - 1``."""
    start %= size
    stop = start + count
    return span(start, stop) if stop <= size else span(start, size) + span(0, stop - size)


def joined(chunks: Sequence[int]) -> Spans:
    """Return the spans of ``chunks`` in the given order; ascending neighbours become one span."""
    spans: list[Span] = []
    for chunk in chunks:
        if spans and spans[-1].stop == chunk:
            spans[-1] = Span(spans[-1].start, chunk + 1)
        else:
            spans.append(Span(chunk, chunk + 1))
    return tuple(spans)


def relabelled(rounds: Iterable[Round], *, ranks: Sequence[int], scale: int = 1, offset: int = 0) -> Iterable[Round]:
    """Yield ``rounds`` of a sub-group for the whole group: peers through ``ranks``, chunks ``scale`` times as many.

    Its first chunk is chunk ``offset`` of the whole group.
    """

    def scaled(spans: Spans) -> Spans:
        return tuple(Span(start * scale + offset, stop * scale + offset) for start, stop in spans)

    def moved(step: Step) -> Step:
        match step:
            case Send(peer, chunks):
                return Send(ranks[peer], scaled(chunks))
            case Recv(peer, chunks, reduce):
                return Recv(ranks[peer], scaled(chunks), reduce)
            case Copy(source, target):
                return Copy(scaled((source,))[0], scaled((target,))[0])

    for steps in rounds:
        yield tuple(moved(step) for step in steps)
