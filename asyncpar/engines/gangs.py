"""Gangs on shared workers: the workers that each holds, and the order of their turns.  Pure.

A gang gets all its workers at once or none, so two gangs never wait for each other.  Gangs are served in the order in
which they asked; one whose owner is gone gives back its workers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

TICKET_SECONDS = 30.0
"""Seconds after which a waiting gang that has not asked again has lost its turn."""


@dataclass(slots=True, kw_only=True)
class Gang:
    """A gang of ``size`` workers: those that it holds, none while it waits."""

    job: str
    owner: str
    size: int
    wanted: tuple[str, ...]
    asked_at: float
    since: float = 0.0
    workers: tuple[str, ...] = ()


@dataclass(slots=True)
class GangLedger:
    """All gangs of a cluster, in the order of their first requests."""

    gangs: dict[str, Gang] = field(default_factory=dict)

    def ask(
        self, job: str, owner: str, wanted: Sequence[str], size: int, *, owners: Collection[str], now: float
    ) -> tuple[str, ...]:
        """Give ``job`` ``size`` free ones of the workers ``wanted``, and return them; () to ask again soon.

        ``owners`` are those that are alive.
        """
        self._forget(owners, now)
        gang = self.gangs.get(job)
        if gang is None:
            gang = self.gangs[job] = Gang(
                job=job, owner=owner, size=size, wanted=tuple(wanted), asked_at=now, since=now
            )
        gang.asked_at, gang.wanted = now, tuple(wanted)
        if gang.workers:
            return gang.workers
        if any(not other.workers for other in self._before(job)):
            return ()
        held = {worker for other in self.gangs.values() for worker in other.workers}
        free = [worker for worker in wanted if worker not in held]
        if len(free) >= size:
            gang.workers, gang.since = tuple(free[:size]), now
        return gang.workers

    def extend(
        self, job: str, wanted: Sequence[str], count: int, *, owners: Collection[str], now: float
    ) -> tuple[str, ...]:
        """Give ``job`` up to ``count`` of the workers ``wanted`` that are free and that no gang awaits; return them.

        A worker that ``job`` holds already, and has lost, is given again.
        """
        self._forget(owners, now)
        gang = self.gangs.get(job)
        if gang is None or not gang.workers:
            return ()
        others = [other for other in self.gangs.values() if other is not gang]
        taken = {worker for other in others for worker in (other.workers or other.wanted)}
        found = tuple([worker for worker in wanted if worker not in taken][:count])
        gang.workers = (*gang.workers, *(worker for worker in found if worker not in gang.workers))
        return found

    def give_back(self, job: str, worker: str) -> None:
        """Give back one worker that ``job`` holds."""
        gang = self.gangs.get(job)
        if gang is not None:
            gang.workers = tuple(held for held in gang.workers if held != worker)

    def release(self, job: str) -> None:
        """Give back the workers of ``job``, or its turn."""
        self.gangs.pop(job, None)

    def _before(self, job: str) -> list[Gang]:
        names = list(self.gangs)
        return [self.gangs[name] for name in names[: names.index(job)]]

    def _forget(self, owners: Collection[str], now: float) -> None:
        for name, gang in list(self.gangs.items()):
            is_late = not gang.workers and now > gang.asked_at + TICKET_SECONDS
            if gang.owner not in owners or is_late:
                del self.gangs[name]
