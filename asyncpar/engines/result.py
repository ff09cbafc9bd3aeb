"""The one result of a job over places: values by rank, or an ``ExceptionGroup`` with the first failure first.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncpar.engines.interface import Place, PlaceReport
from asyncpar.engines.machine import PlacesMachine
from asyncpar.errors import AsyncparError, LaunchError, PeerLost, RemoteError
from asyncpar.launch.failure import RankEnd

if TYPE_CHECKING:
    from asyncpar.launch.agents.job_record import JobEnd


def settle(
    machine: PlacesMachine,
    places: Sequence[Place],
    counts: Sequence[int],
    *,
    decode: Callable[[bytes], Any],
    decode_error: Callable[[bytes], BaseException | None],
) -> list[Any]:
    """Return the results of the ranks, in their order.

    Raises an ``ExceptionGroup``: of ``RemoteError`` for a rank whose function raised (its ``__cause__`` is the
    exception itself, where that could travel), ``PeerLost`` for a rank that was killed or lost with its place, and
    ``LaunchError`` where no rank is to blame.  The first one explains the others.
    """
    errors = [*_losses(machine, places, counts), *_failures(machine, decode_error)]
    errors = errors or _others(machine, places)
    if errors:
        raise ExceptionGroup(_first_line(errors[0]), errors)
    encoded = {rank: value for report in machine.reports.values() for rank, value in report.values.items()}
    missing = [rank for rank in range(sum(counts)) if rank not in encoded]
    if missing:
        texts = f"rank {missing[0]} ended without a result: its function left by os._exit or sys.exit"
        raise ExceptionGroup(texts, [LaunchError(texts)])
    return [decode(encoded[rank]) for rank in range(sum(counts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceEnd:
    """The end of a place of an elastic job: its report, or the ``cause`` of its loss.

    ``host`` is its name among the agents.
    """

    place: Place
    host: str
    report: PlaceReport | None = None
    cause: str = ""


def settle_elastic(
    ends: Mapping[int, PlaceEnd],
    end: JobEnd,
    *,
    decode: Callable[[bytes], Any],
    decode_error: Callable[[bytes], BaseException | None],
) -> list[Any]:
    """Return the results of the ranks that were there at the end, in the order in which their places came.

    Raises an ``ExceptionGroup`` if the job did not complete: of ``RemoteError`` and ``PeerLost`` for ranks that
    crashed, ``PeerLost`` for places that were lost, ``LaunchError`` where nothing else explains it.
    """
    reports = [(number, found.report) for number, found in sorted(ends.items()) if found.report is not None]
    message = end.message
    if end.is_complete:
        values = [report.values[slot] for _, report in reports for slot in sorted(report.values)]
        if values:
            return [decode(value) for value in values]
        message = "no rank has a result: their function left by os._exit or sys.exit"
    errors: list[Exception] = []
    for _, report in reports:
        for crash in report.failures:
            pickled = report.errors.get(crash.local_rank)
            errors.append(_error(crash, None if pickled is None else decode_error(pickled)))
    for _, found in sorted(ends.items()):
        if found.cause:
            text = f"{found.place.name} {found.cause}"
            errors.append(PeerLost(text, host=found.place.host, cause=found.cause))
    errors = errors or [LaunchError(message or f"the job ended with code {end.exit_code}")]
    raise ExceptionGroup(_first_line(errors[0]), errors)


def _losses(machine: PlacesMachine, places: Sequence[Place], counts: Sequence[int]) -> list[Exception]:
    """Return an error for each rank that was lost with its place."""
    errors: list[Exception] = []
    for lost in machine.lost:
        first, place = sum(counts[: lost.place]), places[lost.place]
        for rank in range(first, first + counts[lost.place]):
            cause = f"{place.name} {lost.cause}"
            errors.append(
                PeerLost(f"rank {rank} on {place.host} is lost: {cause}", rank=rank, host=place.host, cause=cause)
            )
    return errors


def _failures(machine: PlacesMachine, decode_error: Callable[[bytes], BaseException | None]) -> list[Exception]:
    first_report = machine.reports.get(0)
    if first_report is None:
        return []
    pickled = {rank: error for report in machine.reports.values() for rank, error in report.errors.items()}
    gone = {place.place for place in machine.lost}
    ends = [end for end in first_report.failures if not (gone and end.pid == 0)]
    return [_error(end, decode_error(pickled[end.rank]) if end.rank in pickled else None) for end in ends]


def _error(end: RankEnd, cause: BaseException | None) -> Exception:
    if end.report is None:
        tail = f"; end of its stderr:\n{end.stderr_tail.strip()[-1000:]}" if end.stderr_tail.strip() else ""
        message = f"rank {end.rank} on {end.host} {end.ending}{tail}"
        return PeerLost(message, rank=end.rank, host=end.host, cause=end.ending)
    report = end.report
    error = RemoteError(report.message, rank=end.rank, type_name=report.type_name, remote_traceback=report.traceback)
    error.__cause__ = cause
    return error


def _others(machine: PlacesMachine, places: Sequence[Place]) -> list[Exception]:
    """Return the errors of places that failed although none of their ranks did."""
    errors: list[Exception] = [
        LaunchError(f"{places[number].name}: {report.message or f'it ended with code {report.exit_code}'}")
        for number, report in sorted(machine.reports.items())
        if report.exit_code
    ]
    errors += [LaunchError(f"{places[number].name} did not end when it was told to") for number in machine.unreported]
    return errors


def _first_line(error: Exception) -> str:
    line = str(error).partition("\n")[0]
    is_named = isinstance(error, AsyncparError) and line.startswith("rank ")
    return f"{line} (the first failure)" if is_named else line
