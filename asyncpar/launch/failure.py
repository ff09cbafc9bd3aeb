"""The ends of ranks, the first failure among them, and its text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from asyncpar.core.observe.rank_reports import FailureReport
from asyncpar.core.observe.waits import spell_ranks
from asyncpar.core.signals import signal_name
from asyncpar.errors import PeerLost
from asyncpar.observe.holdups import find_odd_calls, follow_blames
from asyncpar.observe.stack_views import crash_line

_MOST_OTHERS = 8
_TAIL_LINES = 4
_LONGEST_REASON = 800
_LONGEST_CONSEQUENCE = 240
_NOTICEABLE = 0.05
"""Seconds between two failures that are worth mentioning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """The end of the process of a rank.

    ``returncode`` is negative for a signal; ``at`` is the time of the failure, on the clock of the process that holds
    this; ``lost`` is the reason when the rank's whole agent disappeared, the launcher or the kernel killed the rank, or
    it left those that needed it.  ``stderr_file`` is the file on its host with all of its stderr, "" if there is none.
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
    stderr_file: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code of the launcher for this failure, as in a shell.

        It is 1 for a program that has reported an exception (it would have ended with that code, whatever signal came
        first), and for a rank that left the others with code 0.
        """
        return 1 if self._was_overtaken else exit_code_of(self.returncode) or 1

    @property
    def is_peer_error(self) -> bool:
        """Whether the rank names another rank as the cause."""
        return self.report is not None and self.report.is_peer_error

    @property
    def blames(self) -> int | None:
        """The rank that this one names as the cause, None if it names none."""
        return None if self.report is None else self.report.blames

    @property
    def call(self) -> str:
        """The rank's call where others made a different one, "" if that is not why it failed."""
        return "" if self.report is None else self.report.call

    @property
    def ending(self) -> str:
        """``exited with code 3``, ``was killed by SIGKILL``, and where it crashed, if it did."""
        if self._was_overtaken:
            return f"{describe_ending(self.returncode)} while it ended with an exception"
        crash = crash_line(self.stderr_tail) if self.returncode < 0 else ""
        return self.lost or describe_ending(self.returncode) + (f" ({crash})" if crash else "")

    @property
    def account(self) -> str:
        """``ending``, and the exception that was the cause: ``exited with code 1: ValueError: no more data``."""
        return self.ending if self.report is None else f"{self.ending}: {_reason(self)}"

    @property
    def _was_overtaken(self) -> bool:
        return self.report is not None and self.returncode < 0


def exit_code_of(returncode: int) -> int:
    """Return the shell's code for a subprocess' return code: 128 plus the signal's number when a signal ended it."""
    return 128 - returncode if returncode < 0 else returncode


def describe_ending(returncode: int) -> str:
    """Return "exited with code 3" or "was killed by SIGKILL"."""
    return f"exited with code {returncode}" if returncode >= 0 else f"was killed by {signal_name(-returncode)}"


_NEEDED = "while other ranks still needed it"
LEFT_EARLY = f"left the world {_NEEDED}"


def add_leavers(failures: Sequence[RankEnd], ended: Iterable[RankEnd]) -> list[RankEnd]:
    """Return ``failures``, and those of the ranks ``ended`` with code 0 that they name as their cause.

    A rank that ends by ``os._exit(0)`` or ``sys.exit(0)`` while others need it explains their failures, as one that
    crashes does.
    """
    blamed = {failure.blames for failure in failures} - {failure.rank for failure in failures}
    left = [replace(end, lost=f"{end.ending} {_NEEDED}") for end in ended if end.rank in blamed]
    return [*failures, *left]


def choose_first(failures: Sequence[RankEnd], late: Sequence[RankEnd] = ()) -> RankEnd:
    """Return the failure that explains the others, including those that came ``late``.

    It is the earliest, except that a rank that blames another rank explains nothing as long as there is one that does
    not, and, among ranks that do, one that blames a rank that failed too explains less.  Of ranks that have lost each
    other it is the lowest, and of ranks whose calls differ, the one with the odd call.
    """
    failed = {failure.rank for failure in failures}
    first = min(
        failures, key=lambda failure: (failure.is_peer_error, failure.blames in failed, failure.at, failure.rank)
    )
    ends = {failure.rank: failure for failure in (*failures, *late)}
    if first.is_peer_error:
        cause = follow_blames(first.rank, {rank: end.blames for rank, end in ends.items()})
        return ends[cause] if cause in ends and _is_mutual(first, ends[cause]) else first
    odd = find_odd_calls({rank: end.call for rank, end in ends.items() if end.call}) if first.call else []
    return first if first.rank in odd or not odd else min((ends[rank] for rank in odd), key=lambda each: each.at)


def _is_mutual(one: RankEnd, other: RankEnd) -> bool:
    """Return whether both have lost a rank, each in the same way.  In other cycles (deadlocks) the first says most."""
    reports = (one.report, other.report)
    return all(report is not None and report.type_name == PeerLost.__name__ for report in reports)


def describe(failures: Sequence[RankEnd], late: Sequence[RankEnd] = ()) -> str:
    """Return the summary for the user: the first failing rank, its traceback, then the other failures.

    ``late`` are those that failed after all were asked to end.  Last comes the log file of the first one, if any.
    """
    first = choose_first(failures, late)
    lines = [f"rank {first.rank} failed first: {_reason(first)}", f"  on {first.host} ({_place(first)})"]
    lines += _evidence(first)
    others = [failure for failure in (*failures, *late) if failure is not first]
    others.sort(key=lambda failure: (failure.at, failure.rank))
    groups = _grouped(others)
    lines += [_consequence(group, first) for group in groups[:_MOST_OTHERS]]
    if left_out := sum(len(group) for group in groups[_MOST_OTHERS:]):
        lines.append(f"  then {left_out} more ranks")
    if first.stderr_file:
        lines.append(f"  more: {first.stderr_file} (on {first.host})")
    return "\n".join(lines)


def describe_cause(failures: Sequence[RankEnd]) -> str:
    """Return the failure that explains the others in one line: ``rank 2 on host-b: ValueError: no more data``."""
    first = choose_first(failures)
    between = " " if first.report is None else ": "
    return f"rank {first.rank} on {first.host}{between}{_cut(_reason(first), _LONGEST_CONSEQUENCE)}"


def _place(failure: RankEnd) -> str:
    parts = [f"local rank {failure.local_rank}"]
    parts += [f"pid {failure.pid}"] if failure.pid else []
    parts += [failure.ending] if failure.report is not None else []
    return ", ".join(parts)


def _grouped(failures: Sequence[RankEnd]) -> list[list[RankEnd]]:
    """Group ``failures`` by host and reason."""
    groups: dict[tuple[str, str], list[RankEnd]] = {}
    for failure in failures:
        groups.setdefault((failure.host, _common(failure)), []).append(failure)
    return list(groups.values())


def _common(failure: RankEnd) -> str:
    """Return the reason of ``failure`` without the name of its rank."""
    return _reason(failure).replace(f" rank {failure.rank}:", "", 1)


def _consequence(group: Sequence[RankEnd], first: RankEnd) -> str:
    late = max(0.0, group[0].at - first.at)
    after = f" ({late:.1f} s later)" if late >= _NOTICEABLE else ""
    ranks = sorted(failure.rank for failure in group)
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spell_ranks(ranks)}"
    reason = _reason(group[0]) if len(ranks) == 1 else _common(group[0])
    reason = "the same" if reason == _reason(first) else _cut(reason, _LONGEST_CONSEQUENCE)
    return f"  then {who} on {group[0].host}{after}: {reason}"


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 3] + "..."


def _reason(failure: RankEnd) -> str:
    if failure.report is None:
        return failure.ending
    message = failure.report.message.strip().splitlines()
    text = f"{failure.report.type_name}: {message[0]}" if message else failure.report.type_name
    return _cut(text, _LONGEST_REASON)


def _evidence(failure: RankEnd) -> list[str]:
    """Return the traceback or the end of stderr, quoted."""
    if failure.report is not None:
        return [f"    {line}" for line in failure.report.traceback.strip().splitlines()]
    crash = crash_line(failure.stderr_tail)  # named with the ending already
    tail = [line for line in failure.stderr_tail.strip().splitlines() if line != crash or not crash][-_TAIL_LINES:]
    return ["  end of its stderr:", *(f"    {line}" for line in tail)] if tail else []
