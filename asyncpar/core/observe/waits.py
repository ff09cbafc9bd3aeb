"""Descriptions of waits between ranks: culprits, cycles, and waits of many ranks in one line.  Pure.

Every description of who waits for whom is made by ``sum_up``: launchers pass it the reports of their ranks, commands
and the dashboard the summaries of a job (``observe/holdups.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

JOINING: Final = "joining the world"
"""The operation of a rank that waits for its world to be complete."""

CONDITION_WORDS: Final = {
    "well": "",
    "stopped": "is stopped (SIGSTOP, or a debugger)",
    "hung": "runs no Python code (something holds its interpreter lock)",
    "busy": "runs no Python code (a C call holds its interpreter lock, and computes)",
    "uninterruptible": "waits in the kernel (uninterruptible: its disk or network file system does not answer)",
}
"""Descriptions of the conditions of a rank that its agent sees (``launch/vitals.py``), used everywhere."""


def describe_place(place: str, *, is_inside: bool) -> str:
    """Describe a program at ``place``: ``is in user code at train.py:57``, or it waits inside asyncpar.

    Returns "" if the place is not known.
    """
    return f"{'waits' if is_inside else 'is in user code'} at {place}" if place else ""


_LONGEST: Final = 300
_LONGEST_WAY: Final = 6


class WaitEdge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A wait of ``rank`` for rank ``awaited`` in ``operation``, which was called at ``site`` ("": not known).

    Waits with the same ``key`` are in the same operation.  For asks, ``actor`` is the one that waits ("": none, but the
    program of the rank), and ``awaited_actor`` the one that is waited for.
    """

    rank: int
    awaited: int
    operation: str
    key: tuple[int, int] = (0, 0)
    site: str = ""
    actor: str = ""
    awaited_actor: str = ""

    def __str__(self) -> str:
        at = f" at {self.site}" if self.site else ""
        waiting, awaited = name_actor(self.actor, self.rank), name_actor(self.awaited_actor, self.awaited)
        return f"{waiting} waits for {awaited} in {self.operation}{at}"


class WaitNotice(msgspec.Struct, frozen=True, kw_only=True):
    """A wait of a rank for ``seconds`` in ``operation``, which was called at ``site``.

    ``culprit`` is the rank that holds it up, ``host`` where that runs, and ``where`` describes what it does: ``is in
    user code at train.py:57``; without a culprit it is what is waited for.  ``cycle`` describes a deadlock, "" if there
    is none.  For asks, ``actor`` is the one that holds it up.
    """

    operation: str
    seconds: float
    site: str = ""
    culprit: int | None = None
    host: str = ""
    where: str = ""
    cycle: str = ""
    actor: str = ""

    def __str__(self) -> str:
        at = f" (called at {self.site})" if self.site else ""
        text = f"{self.operation}{at} has waited {spell_seconds(self.seconds)} for {self.name_culprit()}"
        return f"{text}; {self.cycle}" if self.cycle else text

    def name_culprit(self) -> str:
        """Return ``rank 2 (host-b), which is in user code at train.py:57``."""
        if self.culprit is None:
            return self.where or "any rank"
        named = name_actor(self.actor, self.culprit) + (f" ({self.host})" if self.host else "")
        return f"{named}, which {self.where}" if self.where else named


def name_actor(actor: str, rank: int) -> str:
    """Return ``actor 'loader' on rank 2``; ``rank 2`` if there is no ``actor``."""
    return f"actor {actor!r} on rank {rank}" if actor else f"rank {rank}"


def follow_waits(waits: Mapping[int, WaitEdge], start: int) -> list[WaitEdge]:
    """Return the waits that lead from ``start`` to a rank that does not wait; ``waits`` are by waiting rank.

    Returns none if ``start`` does not wait itself; of ranks that wait for each other, each occurs once.
    """
    path: list[WaitEdge] = []
    seen, rank = set[int](), start
    while rank not in seen and (wait := waits.get(rank)) is not None:
        seen.add(rank)
        path.append(wait)
        rank = wait.awaited
    return path


def describe_way(way: Sequence[WaitEdge]) -> str:
    """Return ``rank 1 waits for rank 2, which waits for rank 3``; only the two ends of a long way."""
    first, *others = way
    text = f"rank {first.rank} waits for rank {first.awaited}"
    if len(others) > _LONGEST_WAY:
        last = others[-1]
        return f"{text}, and so on over {len(others) - 1} ranks; rank {last.rank} waits for rank {last.awaited}"
    return text + "".join(f", which waits for rank {wait.awaited}" for wait in others)


def find_cycle(waits: Iterable[WaitEdge], start: int) -> list[WaitEdge]:
    """Return the waits that begin and end with rank ``start``, in at least two operations; none without a cycle."""
    by_rank = {wait.rank: wait for wait in waits}
    path: list[WaitEdge] = []
    rank = start
    while (wait := by_rank.get(rank)) is not None and len(path) < len(by_rank):
        path.append(wait)
        rank = wait.awaited
        if rank == start:
            return path if len({each.key for each in path}) > 1 else []
    return []


def describe_cycle(cycle: Sequence[WaitEdge]) -> str:
    """Return a cycle of waits as text, the same on all its ranks; for a long one not every wait is described."""
    first = min(range(len(cycle)), key=lambda place: (cycle[place].rank, cycle[place].actor, cycle[place].key))
    cycle = [*cycle[first:], *cycle[:first]]
    if len(cycle) <= 4:
        return f"deadlock: {', '.join(map(str, cycle))}"
    ranks = " -> ".join(str(wait.rank) for wait in (*cycle, cycle[0]))
    text = f"deadlock of {len(cycle)} ranks, each waits for the next: {ranks}; {cycle[0]}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def sum_up(notices: Mapping[int, WaitNotice], *, only: Iterable[int] | None = None) -> list[str]:
    """Return a sentence for each rank that others wait for, and for each deadlock; ``notices`` are by waiting rank.

    A rank that is waited for, but waits itself, is not the culprit: the one at the end is.  An actor is one, whatever
    the program of its rank waits for.  The sentence about most ranks comes first.  ``only`` are the waiting ranks to be
    reported (None: all).
    """
    by_end: dict[tuple[int | None, str], list[int]] = {}
    for rank in sorted(notices if only is None else only):
        by_end.setdefault(_find_end(rank, notices), []).append(rank)
    ends = sorted(by_end, key=lambda end: -len(by_end[end]))
    return list(dict.fromkeys(_sum_up(root, actor, by_end[root, actor], notices) for root, actor in ends))


def _sum_up(root: int | None, actor: str, ranks: Sequence[int], notices: Mapping[int, WaitNotice]) -> str:
    """Return the sentence about ``ranks``, which all ultimately wait for ``root``, or for an ``actor`` there."""
    if cycle := next((notices[rank].cycle for rank in ranks if notices[rank].cycle), ""):
        return cycle
    reported = (notices[rank] for rank in ranks)
    notice = next((each for each in reported if (each.culprit, each.actor) == (root, actor)), notices[ranks[0]])
    at = f" at {notice.site}" if notice.site else ""
    how_long = f"{notice.operation}{at} has waited {spell_seconds(notice.seconds)}"
    circle = [] if root is None or actor else _find_circle(root, notices)
    if circle:
        others = [rank for rank in ranks if rank not in circle]
        behind = f", {name_ranks(others)} for them" if others else ""
        link = _name_dead_link(circle, notices)
        return f"ranks {spell_ranks(circle)} wait for each other{link}{behind}; {how_long}"
    whom = msgspec.structs.replace(notice, culprit=root).name_culprit()
    return f"{name_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for {whom}; {how_long}"


def _name_dead_link(circle: Sequence[int], notices: Mapping[int, WaitNotice]) -> str:
    """Return the cause if a circle of ranks all wait in one operation: a link between them is dead; else ""."""
    if len({notices[rank].operation for rank in circle}) > 1:
        return ""
    return f" in one operation: {'the link' if len(circle) == 2 else 'a link'} between them carries nothing"


def find_root(rank: int, notices: Mapping[int, WaitNotice]) -> int | None:
    """Return the rank at the end of the chain of waits that starts with ``rank``.

    Of ranks that wait for each other it is the lowest; None: ``rank`` does not wait for a rank.
    """
    return _find_end(rank, notices)[0]


def _find_end(rank: int, notices: Mapping[int, WaitNotice]) -> tuple[int | None, str]:
    """Return the result of ``find_root``, and the actor there that is waited for ("": the program of the rank)."""
    path = [rank]
    while (notice := notices.get(path[-1])) is not None and notice.culprit is not None:
        if notice.actor:
            return notice.culprit, notice.actor
        if notice.culprit in path:
            return min(path[path.index(notice.culprit) :]), ""
        path.append(notice.culprit)
    return (path[-1] if len(path) > 1 else None), ""


def _find_circle(start: int, notices: Mapping[int, WaitNotice]) -> list[int]:
    """Return the ranks that wait for each other, ``start`` among them; none if ``start`` is not in a circle."""
    path, rank = [start], start
    while (notice := notices.get(rank)) is not None and notice.culprit is not None and not notice.actor:
        rank = notice.culprit
        if rank in path:
            return sorted(path) if rank == start and len(path) > 1 else []
        path.append(rank)
    return []


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 2``, or ``ranks 0, 2-5`` of several in order."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spell_ranks(ranks)}"


def spell_seconds(seconds: float) -> str:
    """Return ``0.3 s``, ``12 s``, ``3 min 4 s``, ``2 h 5 min``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def spell_ranks(ranks: Sequence[int]) -> str:
    """Return ``0, 2-5, 7`` for ordered ``ranks``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(
        str(run[0]) if len(run) == 1 else f"{run[0]}{', ' if len(run) == 2 else '-'}{run[-1]}" for run in runs
    )
