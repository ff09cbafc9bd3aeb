"""What every operation must leave behind, said symbolically, and the check of schedules against it.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncpar.collectives.algorithms.steps import Schedule
from asyncpar.collectives.check import Content, Report, ScheduleError, Simulation

_FULL_AT_START = frozenset({"all_reduce", "reduce", "reduce_scatter"})
_OWN_AT_START = frozenset({"all_gather", "gather"})
_ROOT_AT_START = frozenset({"broadcast", "scatter"})


def initial_content(operation: str, size: int, root: int, rank: int, chunk: int) -> Content:
    """Return what ``chunk`` of ``rank`` holds before ``operation``."""
    holds = (
        operation in _FULL_AT_START
        or (operation in _OWN_AT_START and chunk == rank)
        or (operation in _ROOT_AT_START and rank == root)
        or (operation == "all_to_all" and chunk < size)
    )
    return ((rank, chunk),) if holds else None


def goal(operation: str, size: int, root: int, rank: int, chunks: int) -> Iterator[tuple[int, Content]]:
    """Yield the chunks of ``rank`` that matter after ``operation``, with what they must hold."""
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


def verify(operation: str, schedules: Sequence[Schedule], *, root: int = 0) -> Report:
    """Run the schedules of all ranks and return what they cost.

    Raises ``ScheduleError`` for a deadlock, a conflict inside a round, and any chunk that does not end where it must,
    holding each rank exactly once (reductions) or the right origin (all others).
    """
    size = len(schedules)
    simulation = Simulation(schedules, lambda rank, chunk: initial_content(operation, size, root, rank, chunk))
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
            raise ScheduleError(f"rank {state.rank} leaves the barrier before it has heard of ranks {missing}")
    return Report(
        steps=max(state.time for state in simulation.ranks),
        messages=tuple(simulation.messages),
        chunks_sent=tuple(simulation.chunks_sent),
        chunks=max(plan.chunks for plan in schedules) if operation != "all_to_all" else size,
    )


def _sum(chunk: int, size: int) -> Content:
    return tuple((rank, chunk) for rank in range(size))
