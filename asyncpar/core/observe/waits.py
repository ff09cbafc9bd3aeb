"""Waits between ranks in sentences: culprits, cycles, and waits of many ranks in one line.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

JOINING: Final = "joining the world"
"""How the operation of a rank is called that waits for its world to be complete."""

_LONGEST: Final = 300


class WaitEdge(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rank ``rank`` waits for rank ``awaited`` in ``operation``, which was called at ``site`` ("": not known).

    Waits with the same ``key`` are in the same operation.  Of asks, ``actor`` is the one that waits ("": none, but the
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
    """A rank has waited for ``seconds`` in ``operation``, which was called at ``site``.

    ``culprit`` is the rank that holds it up, ``host`` where that runs, and ``where`` says what it does: ``is in user
    code at train.py:57``; without a culprit it is what is waited for.  ``cycle`` describes a deadlock, "" if there is
    none.  Of asks, ``actor`` is the one that holds it up.
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
        text = f"{self.operation}{at} has waited {self.seconds:.3g} s for {self.name_culprit()}"
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


def find_cycle(waits: Iterable[WaitEdge], start: int) -> list[WaitEdge]:
    """Return the waits that begin and end with rank ``start``, in at least two operations; none if there are none."""
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
    """Return a cycle of waits as text, the same on all its ranks; long ones do not say all that their ranks do."""
    first = min(range(len(cycle)), key=lambda place: (cycle[place].rank, cycle[place].actor, cycle[place].key))
    cycle = [*cycle[first:], *cycle[:first]]
    if len(cycle) <= 4:
        return f"deadlock: {', '.join(map(str, cycle))}"
    ranks = " -> ".join(str(wait.rank) for wait in (*cycle, cycle[0]))
    text = f"deadlock of {len(cycle)} ranks, each waits for the next: {ranks}; {cycle[0]}"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def sum_up(notices: Mapping[int, WaitNotice], *, only: Iterable[int] | None = None) -> list[str]:
    """Return a sentence for each rank that others wait for, and for each deadlock; ``notices`` are by waiting rank.

    A rank that is waited for, and waits itself, is no culprit: the one behind it is.  ``only`` are the waiting ranks
    that are told of (None: all).
    """
    sentences, told = [], set[str]()
    by_culprit: dict[int | None, list[int]] = {}
    for rank in sorted(notices if only is None else only):
        by_culprit.setdefault(find_root(rank, notices), []).append(rank)
    for culprit, ranks in by_culprit.items():
        notice = next((each for rank in ranks if (each := notices[rank]).culprit == culprit), notices[ranks[0]])
        cycle = next((notices[rank].cycle for rank in ranks if notices[rank].cycle), "")
        if cycle:
            if cycle not in told:
                told.add(cycle)
                sentences.append(cycle)
            continue
        whom = msgspec.structs.replace(notice, culprit=culprit).name_culprit()
        at = f" at {notice.site}" if notice.site else ""
        one = len(ranks) == 1
        sentences.append(
            f"{'rank' if one else 'ranks'} {spell_ranks(ranks)} {'waits' if one else 'wait'} for {whom}; "
            f"{notice.operation}{at} has waited {notice.seconds:.3g} s"
        )
    return sentences


def find_root(rank: int, notices: Mapping[int, WaitNotice]) -> int | None:
    """Return the rank at the end of the waits that begin with that of ``rank``."""
    seen = {rank}
    culprit = notices[rank].culprit
    while culprit is not None and culprit in notices and culprit not in seen:
        seen.add(culprit)
        behind = notices[culprit].culprit
        if behind is None or behind in seen:
            break
        culprit = behind
    return culprit


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
