"""How ranks ended, which one failed first, and the text about it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from asyncpar.core.observe.reporting import Phase

_MOST_OTHERS = 8


class FailureReport(msgspec.Struct, frozen=True, kw_only=True, tag="failure", tag_field="kind"):
    """The exception that ended a rank, as it reported it.

    ``time`` is on the clock of its host; ``blames`` is the rank that a ``PeerError`` names.
    """

    type_name: str = msgspec.field(name="type")
    message: str
    traceback: str
    time: float = 0.0
    is_peer_error: bool = False
    blames: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How the process of a rank ended.

    ``returncode`` is negative for a signal; ``at`` is the time of the failure, on the clock of the process that holds
    this; ``lost`` says why when the rank's whole agent disappeared or the launcher killed the rank.
    """

    generation: int
    rank: int
    local_rank: int
    host: str
    pid: int
    returncode: int
    at: float
    report: FailureReport | None = None
    stderr_tail: str = ""
    lost: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code of the launcher for this failure, as a shell's.

        A program that has reported an exception would have ended with code 1, whichever signal came before that.
        """
        return 1 if self._was_overtaken else exit_code_of(self.returncode)

    @property
    def is_peer_error(self) -> bool:
        """Does the rank name another rank as the cause?"""
        return self.report is not None and self.report.is_peer_error

    @property
    def blames(self) -> int | None:
        """The rank that this one names as the cause, None if it names none."""
        return None if self.report is None else self.report.blames

    @property
    def ending(self) -> str:
        """``exited with code 3``, ``was killed by SIGKILL``."""
        if self._was_overtaken:
            return f"{describe_ending(self.returncode)} while it ended with an exception"
        return self.lost or describe_ending(self.returncode)

    @property
    def _was_overtaken(self) -> bool:
        return self.report is not None and self.returncode < 0


def exit_code_of(returncode: int) -> int:
    """Return the shell's code for a subprocess' return code: 128 plus the signal's number when a signal ended it."""
    return 128 - returncode if returncode < 0 else returncode


def describe_ending(returncode: int) -> str:
    """Return "exited with code 3" or "was killed by SIGKILL"."""
    if returncode >= 0:
        return f"exited with code {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def choose_first(failures: Sequence[RankEnd]) -> RankEnd:
    """Return the failure that explains the others.

    The earliest one; but a rank that blames another rank explains nothing as long as there is one that does not, and
    among those that do, blaming a rank that failed too explains less.
    """
    failed = {failure.rank for failure in failures}
    return min(
        failures, key=lambda failure: (failure.is_peer_error, failure.blames in failed, failure.at, failure.rank)
    )


def describe(failures: Sequence[RankEnd]) -> str:
    """Return the summary that a person reads: the first failing rank, its traceback, then who else failed."""
    first = choose_first(failures)
    lines = [f"rank {first.rank} failed first: {_reason(first)}"]
    lines.append(f"  host: {first.host}, local rank {first.local_rank}" + (f", pid {first.pid}" if first.pid else ""))
    lines.append(f"  end: {first.ending}")
    lines += _evidence(first)
    others = sorted((failure for failure in failures if failure is not first), key=lambda failure: failure.at)
    for failure in others[:_MOST_OTHERS]:
        lines.append(f"  then rank {failure.rank} on {failure.host}: {_reason(failure)}")
    if len(others) > _MOST_OTHERS:
        lines.append(f"  then {len(others) - _MOST_OTHERS} more ranks")
    return "\n".join(lines)


def _reason(failure: RankEnd) -> str:
    if failure.report is None:
        return failure.ending
    message = failure.report.message.strip().splitlines()
    return f"{failure.report.type_name}: {message[0]}" if message else failure.report.type_name


def _evidence(failure: RankEnd) -> list[str]:
    """Return the traceback or the end of stderr, quoted."""
    if failure.report is not None:
        title, text = "traceback", failure.report.traceback
    elif failure.stderr_tail.strip():
        title, text = "end of its stderr", failure.stderr_tail
    else:
        return []
    return [f"  {title}:", *(f"    {line}" for line in text.strip().splitlines())]


class ProgressRecord(msgspec.Struct, frozen=True, tag="progress", tag_field="kind"):
    """The progress that a rank reports."""

    description: str
    completed: float
    total: float | None = None
    fields: dict[str, str] = {}


class PhaseRecord(msgspec.Struct, frozen=True, tag="phase", tag_field="kind"):
    """The phase of a rank in joining its world."""

    phase: Phase


class BeatRecord(msgspec.Struct, frozen=True, tag="beat", tag_field="kind"):
    """A heartbeat."""


Record = ProgressRecord | FailureReport | PhaseRecord | BeatRecord


def parse_record(line: bytes) -> Record | None:
    """Return the record in ``line``; None if it is none."""
    try:
        record: Record = msgspec.json.decode(line, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return record
