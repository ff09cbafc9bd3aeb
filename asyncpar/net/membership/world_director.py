"""Decisions on the next world, from the reports and losses of members.  Pure.

Among agents the director is the leader's, and its decisions count once a quorum has logged them (``worlds.py``); the
next leader begins with ``resume``, and receives reports on the members from all hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from asyncpar.net.membership.lineage import (
    Decision,
    Lineage,
    MemberReport,
    differs_from_group,
    is_sound,
    lineage_at,
    target_step,
)
from asyncpar.net.membership.world_messages import WorldChange

READY_PATIENCE = 15.0
"""Seconds after a world was formed within which each member must be reachable, or it is declared lost.

They are more if members have more time to report in.
"""

LEFT_WELL = "left"
"""The reason of the loss of a member that needs no more worlds."""

QUARRELS = 2
"""Successive worlds without progress in which two members are mutually unreachable until one is declared lost."""

JOIN_PATIENCE = 5.0
"""Most seconds for which a world whose members are ready waits for newcomers, if they can be there by then."""

GATHER_SECONDS = 0.5
"""Seconds for which the agents' leader gathers newcomers that may join, from the first on: one change is for all."""

SHORT_PATIENCE = 3.0
"""Seconds for which a world of too few goes on after the newcomers for whose healing it was formed are gone."""

STOPPED_PATIENCE = 0.3
"""Seconds after which a stopped process (SIGSTOP, a debugger) is declared lost: the others wait for it.

That is about the time that they need to go on without it: a longer wait costs more than ending one that would have
resumed at once.
"""

LAST_PATIENCE = 30.0
"""Additional seconds for which late members are waited for if the state would be lost with them."""

REPORT_PATIENCE = 10.0
"""Seconds after a revoke within which each member must report, or it is declared lost."""


def _seated(before: Sequence[str], staying: Sequence[str], ready: Sequence[str]) -> tuple[str, ...]:
    """Return the members of a world in the order of their ranks: newcomers take the places of members that have left.

    So survivors keep their parts of the state, and their portions.
    """
    coming = iter(ready)
    seats = (member if member in staying else next(coming, None) for member in before)
    return (*(member for member in seats if member is not None), *coming)


@dataclass(frozen=True, slots=True)
class RevokeWorld:
    """Notify ``members`` that ``generation`` is over; ``is_planned``: one is ready for a change, and none is lost."""

    generation: int
    members: tuple[str, ...]
    why: str
    is_planned: bool = False


@dataclass(frozen=True, slots=True)
class FormWorld:
    """Announce the next world to its ``members``, in the order of their ranks."""

    generation: int
    members: tuple[str, ...]
    lineage: Lineage
    decision: Decision
    change: WorldChange


@dataclass(frozen=True, slots=True)
class StartWorld:
    """Notify ``members``, in the order of their ranks, that all of them are reachable."""

    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AnnouncePending:
    """Notify ``members`` that a change waits for the end of a step."""

    generation: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallMembers:
    """Notify members that wait for a place that those of ``generation`` are too few for another world."""

    generation: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Declare ``member`` lost: end it, and answer its requests with ``why``.

    A member that ``is_refused`` was to join, but does not compute the same as the others.
    """

    member: str
    why: str
    is_refused: bool = False


DirectorCommand = RevokeWorld | FormWorld | StartWorld | AnnouncePending | CallMembers | Evict


@dataclass
class _Newcomer:
    """A member that waits for a world; before the first world, every member does."""

    lineage: Lineage
    heard_at: float
    """The time at which it arrived, or last progressed."""
    patience: int = 0
    """Number of steps that it must follow before a world is changed for it; doubled when it is late."""
    followed: int = 0
    due_since: float | None = None
    """The time since which it could join after another step."""
    pace: float = 0.0
    """Seconds of its last step; 0: not known."""

    def arrived_again(self, lineage: Lineage, now: float) -> _Newcomer:
        """Return it as it arrives again with ``lineage``: its delay and pace stay."""
        return replace(self, lineage=lineage, heard_at=now, patience=0, followed=0)

    def seconds_behind(self, target: int) -> float:
        """Return the seconds until it is one step from ``target``; 0 if its pace is not known."""
        return (target - 1 - self.lineage.step) * self.pace

    def wait_longer(self) -> None:
        """Have it follow more steps before a world is changed for it again: it was late."""
        self.patience, self.followed = max(1, 2 * self.patience), 0


@dataclass
class _Current:
    generation: int
    members: tuple[str, ...]
    formed_at: float
    ready: set[str] = field(default_factory=set)
    """Members that are reachable."""
    lost: dict[str, str] = field(default_factory=dict)
    reports: dict[str, MemberReport] = field(default_factory=dict)
    revoked_at: float | None = None
    ready_at: float | None = None
    """The time at which all survivors had reported."""
    is_announced: bool = False
    has_called: bool = False
    """Whether further members were called."""
    is_judged: bool = False
    """Whether mutual unreachability of its members was judged."""
    why: str = ""

    @property
    def survivors(self) -> tuple[str, ...]:
        return tuple(member for member in self.members if member not in self.lost)


def _may_always_join(members: Sequence[str], newcomer: str) -> bool:  # noqa: ARG001
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldRules:
    """Rules on which members may make a world.

    ``may_form`` decides whether members are enough for one; ``may_join`` whether a newcomer has a place beside members:
    without one it waits, and no world is changed for it.

    A newcomer has the state once the others have ended a step.  So that it and too few survivors do not wait for each
    other, survivors make a world if they are enough together with those on the way, which ``may_settle`` decides:
    besides the given members, it counts those that fetch the state.
    """

    may_form: Callable[[Sequence[str]], bool] = bool
    may_settle: Callable[[Sequence[str]], bool] = bool
    may_join: Callable[[Sequence[str], str], bool] = _may_always_join
    may_end: Callable[[Sequence[str]], bool] = lambda _: False
    """Whether members are to leave together, if nobody else is there."""
    are_more_coming: Callable[[], bool] = lambda: False
    """Whether further members fetch the state."""
    is_heard: Callable[[str], bool] = lambda _: True
    """Whether the host of a member is heard from."""


class ElasticDirector:
    """Feed events, obey commands.  ``size`` members make the first world, which has the number ``generation``.

    ``report_within`` is the time in which members must report, ``gather_for`` that for which newcomers are gathered
    before a world is changed for them, both in seconds.
    """

    def __init__(
        self,
        size: int,
        *,
        generation: int = 0,
        rules: WorldRules | None = None,
        report_within: float = REPORT_PATIENCE,
        gather_for: float = 0.0,
    ) -> None:
        self._size = size
        self._first = generation
        self._rules = rules or WorldRules()
        self._report_within = report_within
        self._ready_within = max(READY_PATIENCE, report_within)
        self._newcomers: dict[str, _Newcomer] = {}
        self._gather_for = gather_for
        self._has_gathered_in_vain = False
        """Whether the last world was changed for newcomers that were too far behind at the change."""
        self._leaving: set[str] = set()
        self._stopped: dict[str, tuple[str, float]] = {}
        """Members whose processes are stopped: how, and since when this is known."""
        self._quarrels: dict[tuple[str, str], int] = {}
        """Pairs of mutually unreachable members, with the number of worlds since there was progress."""
        self._quarrels_at: Lineage | None = None
        self._world: _Current | None = None
        self._short_since: float | None = None
        """The time since which the current world is too small, and nobody is on the way to it."""
        self.trouble: str | None = None
        """The reason why there can be no further world."""

    def resume(self, generation: int, members: tuple[str, ...], now: float) -> None:
        """Resume from a world that another director has formed; its members report their states again."""
        self._world = _Current(generation, members, now)

    @property
    def has_begun(self) -> bool:
        return self._world is not None

    @property
    def generation(self) -> int:
        return -1 if self._world is None else self._world.generation

    @property
    def members(self) -> tuple[str, ...]:
        """The members of the current world that are not lost."""
        return () if self._world is None else self._world.survivors

    @property
    def all_members(self) -> tuple[str, ...]:
        """The members of the current world, lost ones included."""
        return () if self._world is None else self._world.members

    @property
    def have_all_left(self) -> bool:
        """Whether all members of the current world have left because they were done."""
        lost = {} if self._world is None else self._world.lost
        return len(lost) == len(self.all_members) and all(how == LEFT_WELL for how in lost.values())

    def arrive(self, member: str, lineage: Lineage, now: float) -> list[DirectorCommand]:
        """Add ``member``, which waits for its first world."""
        if self.trouble is not None:  # it had requested donors before, and was late
            return [Evict(member, self.trouble)]
        known = self._newcomers.get(member)
        newcomer = _Newcomer(lineage, now) if known is None else known.arrived_again(lineage, now)
        self._newcomers[member] = newcomer
        if self._world is None:
            return self._form_first(now)
        return self._consider(member, newcomer, now)

    def reconsider(self, now: float) -> list[DirectorCommand]:
        """Check again whether a world may be formed: a newcomer fetches the state."""
        return self._complete(now)

    def progress(self, member: str, lineage: Lineage, now: float) -> list[DirectorCommand]:
        """Record that ``member`` waits, and has reached ``lineage``."""
        newcomer = self._newcomers.get(member)
        if newcomer is None:
            return []
        newcomer.pace, newcomer.heard_at = now - newcomer.heard_at, now
        newcomer.lineage = lineage
        newcomer.followed += 1
        return self._consider(member, newcomer, now)

    def _consider(self, member: str, newcomer: _Newcomer, now: float) -> list[DirectorCommand]:
        """Change the world for a newcomer with its new lineage, unless it has to follow more steps."""
        if newcomer.followed >= newcomer.patience and newcomer.due_since is None:
            newcomer.due_since = now
        return [*self._announce_gathered(now, member), *self._complete(now)]

    def withdraw(self, member: str, now: float) -> list[DirectorCommand]:
        """Remove ``member``, which has to be healed anew, from all worlds until it arrives again."""
        return self.lost(member, "had to begin anew", now)

    def ready(self, member: str, generation: int) -> list[DirectorCommand]:
        """Record that ``member`` is reachable in the world of ``generation``."""
        world = self._world
        if world is None or generation != world.generation or member not in world.members or member in world.ready:
            return []
        world.ready.add(member)
        is_complete = len(world.ready) == len(world.members) and world.revoked_at is None
        return [StartWorld(generation, world.members)] if is_complete else []

    def drain(self, member: str) -> list[DirectorCommand]:
        """Have ``member`` leave at the end of a step."""
        self._leaving.add(member)
        return self._announce()

    def report(self, member: str, report: MemberReport, now: float, why: str = "") -> list[DirectorCommand]:
        """Process the report of ``member``, which has left that world; ``why``, if it knows more than a suspicion."""
        world = self._world
        if world is None or report.generation != world.generation or member not in world.survivors:
            return [Evict(member, f"generation {report.generation} is over, and it went on without this rank")]
        world.reports[member] = report
        why = why or "; ".join(f"{world.members[rank]}: {cause}" for rank, cause in report.suspects)
        planned = f"{member} is ready for a change"
        return [*self._revoke(why or planned, now, is_planned=not why), *self._complete(now)]

    def stopped(self, member: str, how: str, now: float) -> None:
        """Record that the process of ``member`` is stopped: at the next tick the others go on, if there are others."""
        self._stopped.setdefault(member, (how, now))

    def resumed(self, member: str) -> None:
        """Record that the process of ``member`` has resumed."""
        self._stopped.pop(member, None)

    @property
    def holders(self) -> tuple[str, ...]:
        """The members that hold the committed state, can use it now, and are to keep it."""
        return tuple(member for member in self._keepers(self.members) if member not in self._stopped)

    def _keepers(self, members: Sequence[str]) -> Sequence[str]:
        """Return those of ``members`` that are not leaving: the state is lost only with them."""
        staying = [member for member in members if member not in self._leaving]
        return staying or members

    def _evict_stopped(self, now: float) -> list[DirectorCommand]:
        """Go on without stopped members while others that hold the state are heard from.

        The last holders have as long as members that do not report: after that it is not a pause, and nothing may hang
        forever.
        """
        limit = 0.0 if any(self._rules.is_heard(member) for member in self.holders) else self._report_within
        found = [(member, *self._stopped[member]) for member in self.members if member in self._stopped]
        late = [(member, how) for member, how, since in found if now - since >= limit]
        return [command for member, how in late for command in self._evict(member, how, now)]

    def _evict(self, member: str, why: str, now: float) -> list[DirectorCommand]:
        return [Evict(member, why), *self.lost(member, why, now)]

    def lost(self, member: str, how: str, now: float) -> list[DirectorCommand]:
        """Handle the loss of ``member``."""
        self._newcomers.pop(member, None)
        self._stopped.pop(member, None)
        self._leaving.discard(member)
        world = self._world
        if world is None or member not in world.survivors:
            return self._complete(now)
        world.lost[member] = how
        world.reports.pop(member, None)
        return [*self._revoke(f"{member} {how}", now), *self._complete(now)]

    def tick(self, now: float) -> list[DirectorCommand]:
        """Do all that is due at ``now``."""
        commands = self._evict_late(now) + self._evict_stopped(now)
        return [*commands, *self._announce_gathered(now), *self._end_if_short(now), *self._complete(now)]

    def _evict_late(self, now: float) -> list[DirectorCommand]:
        """Go on without members that are overdue; later if the state would be lost with them."""
        world = self._world
        if world is None:
            return []
        if world.revoked_at is not None:
            there, began, limit = set(world.reports), world.revoked_at, self._report_within
            why = f"did not answer for {limit:g} s"
        else:
            there, began, limit = world.ready, world.formed_at, self._ready_within
            why = f"did not come into generation {world.generation} for {limit:g} s"
        missing = [member for member in world.survivors if member not in there]
        if set(self._keepers(world.survivors)) <= set(missing):
            limit += LAST_PATIENCE
        if now - began <= limit:
            return []
        return [command for member in missing for command in self._evict(member, why, now)]

    def _announce_gathered(self, now: float, progressed: str | None = None) -> list[DirectorCommand]:
        """Announce a change for newcomers that have a place, once others on the way have arrived, too.

        One of them has just ``progressed``, so it is not far behind, or has had nothing to follow for a while.  A
        newcomer that follows quick steps falls behind as it waits: others are not waited for again after that.
        """
        members = self.members
        placed = {name: one for name, one in self._newcomers.items() if self._rules.may_join(members, name)}
        due = {name: one.due_since for name, one in placed.items() if one.due_since is not None}
        are_more_coming = len(due) < len(placed) or self._rules.are_more_coming()
        gathers = are_more_coming and not self._has_gathered_in_vain
        is_over = bool(due) and (not gathers or now - min(due.values()) >= self._gather_for)
        quiet = any(now - placed[name].heard_at >= self._gather_for for name in due)
        return self._announce() if is_over and (progressed in due or quiet) else []

    def _end_if_short(self, now: float) -> list[DirectorCommand]:
        """End a world of too few that no newcomer is on the way to."""
        world = self._world
        if world is None or world.revoked_at is not None or self._may_come(world.survivors):
            self._short_since = None
            return []
        if self._short_since is None:
            self._short_since = now
        if now - self._short_since < SHORT_PATIENCE:
            return []
        return self._revoke("too few are left, and nobody is on the way", now)

    def _may_come(self, members: Sequence[str]) -> bool:
        """Return whether ``members`` are enough for a world, or will be with those that wait or fetch the state."""
        return self._rules.may_form(members) or self._rules.may_settle((*members, *self._newcomers))

    def _form_first(self, now: float) -> list[DirectorCommand]:
        if len(self._newcomers) < self._size:
            return []
        members = tuple(sorted(self._newcomers))
        lineages = [self._newcomers[member].lineage for member in members]
        if len(set(lineages)) > 1:
            shown = ", ".join(f"{member}: {lineage}" for member, lineage in zip(members, lineages, strict=True))
            self.trouble = f"state: expected the same on all ranks when the job begins, got {shown}"
            return [Evict(member, self.trouble) for member in members]
        change = WorldChange(generation=self._first, joined=members)
        return [self._form(members, lineages[0], Decision.ABORT, change, now)]

    def _announce(self) -> list[DirectorCommand]:
        world = self._world
        if world is None or world.revoked_at is not None or world.is_announced or not world.survivors:
            return []
        world.is_announced = True
        return [AnnouncePending(world.generation, world.survivors)]

    def _revoke(self, why: str, now: float, *, is_planned: bool = False) -> list[DirectorCommand]:
        world = self._world
        assert world is not None
        if world.revoked_at is not None:
            return []
        world.revoked_at, world.why = now, why
        others = tuple(member for member in world.survivors if member not in world.reports)
        return [RevokeWorld(world.generation, others, why, is_planned=is_planned)]

    def _complete(self, now: float) -> list[DirectorCommand]:
        """Form the next world if all its members are ready."""
        world = self._world
        if world is None or world.revoked_at is None or self.trouble is not None:
            return []
        survivors = world.survivors
        if not survivors:
            self.trouble = "all members are lost"
            return [Evict(member, self.trouble) for member in self._newcomers]
        if any(member not in world.reports for member in survivors):
            return []
        reports = [world.reports[member] for member in survivors]
        target = target_step(reports)
        lineage = self._agreed(survivors, reports, target)
        if lineage is None:
            return [Evict(member, str(self.trouble)) for member in survivors]
        if not world.is_judged and (odd := self._odd_member(world, lineage)) is not None:
            why = f"does not hear {odd[1]}, nor is heard there, while both are heard here"
            return self._evict(odd[0], why, now)
        world.ready_at = now if world.ready_at is None else world.ready_at
        if self._ends_with(survivors):
            return [Evict(member, "drained") for member in survivors]
        leaver = self._leaver(world)
        staying = tuple(member for member in survivors if member != leaver)
        ready = self._chosen(staying, lambda held: self.is_caught_up(held, lineage))
        late = self._chosen(staying + ready, lambda held: held.step < target)
        patience = world.ready_at + JOIN_PATIENCE - now
        if not world.lost and any(self._newcomers[member].seconds_behind(target) < patience for member in late):
            return []
        for member in late:
            self._newcomers[member].wait_longer()
        if not staying + ready:
            staying = survivors
        if not self._rules.may_form(staying + ready) and not self._may_wait_for(staying, lineage):
            has_called, world.has_called = world.has_called, True
            return [] if has_called else [CallMembers(world.generation)]
        return self._change(world, staying, ready, lineage, now)

    def _chosen(self, members: tuple[str, ...], is_wanted: Callable[[Lineage], bool]) -> tuple[str, ...]:
        """Return the newcomers whose lineage ``is_wanted`` and that have a place beside ``members``."""
        found: tuple[str, ...] = ()
        for member, newcomer in self._newcomers.items():
            if is_wanted(newcomer.lineage) and member not in members and self._rules.may_join(members + found, member):
                found += (member,)
        return tuple(sorted(found))

    def _change(
        self, world: _Current, staying: tuple[str, ...], ready: tuple[str, ...], lineage: Lineage, now: float
    ) -> list[DirectorCommand]:
        """Form the next world, of the ``staying`` and the ``ready`` members."""
        survivors = world.survivors
        reports = [world.reports[member] for member in survivors]
        target = target_step(reports)
        left = tuple(member for member in world.members if member not in staying)
        commands: list[DirectorCommand] = [Evict(member, "drained") for member in survivors if member not in staying]
        rolls = any(report.lineage.step < target for report in reports)
        change = WorldChange(
            generation=world.generation + 1,
            joined=ready,
            left=left,
            why="; ".join(f"{member} {how}" for member, how in world.lost.items()) or world.why,
            is_by_loss=bool(world.lost) or any(report.suspects for report in reports),
        )
        decision = Decision.ROLL_FORWARD if rolls else Decision.ABORT
        commands += self._refuse_others(lineage)
        formed = self._form(_seated(world.members, staying, ready), lineage, decision, change, now)
        return [*commands, formed, *(self._announce() if self._leaving else [])]

    def _refuse_others(self, lineage: Lineage) -> list[DirectorCommand]:
        """Evict newcomers that have reached the step of ``lineage`` with another state: they can never join."""
        held = {name: newcomer.lineage for name, newcomer in self._newcomers.items()}
        others = [name for name, other in held.items() if other.step == lineage.step and other != lineage]
        for name in others:
            del self._newcomers[name]
        return [Evict(name, differs_from_group(lineage), is_refused=True) for name in others]

    def _may_wait_for(self, staying: Sequence[str], lineage: Lineage) -> bool:
        """Return whether too few may form a world: with newcomers that need one of their steps, or its repetition."""
        coming = [name for name, newcomer in self._newcomers.items() if newcomer.lineage.step >= lineage.step - 1]
        return self._rules.may_settle((*staying, *coming))

    def _ends_with(self, survivors: Sequence[str]) -> bool:
        """Decide whether all leave together: there is nobody to hand over to."""
        return not self._newcomers and not self._rules.are_more_coming() and self._rules.may_end(survivors)

    def _leaver(self, world: _Current) -> str | None:
        """Return the member that leaves: one at a time, and none after a loss: parts held by two are lost with both."""
        leaving = (member for member in world.survivors if member in self._leaving)
        return None if world.lost else next(leaving, None)

    @staticmethod
    def is_caught_up(held: Lineage, lineage: Lineage) -> bool:
        """Return whether a newcomer with ``held`` may be a member of a world that goes on from ``lineage``."""
        return held == lineage

    def _odd_member(self, world: _Current, lineage: Lineage) -> tuple[str, str] | None:
        """Return the member to evict if members are mutually unreachable, and one that it does not reach.

        That is the one in most of such pairs, or the one that joined last.  One world is not enough: a connection may
        break once.
        """
        world.is_judged = True
        before = self._quarrels if lineage == self._quarrels_at else {}
        accused = [
            (min(member, other), max(member, other))
            for member in world.survivors
            for other in (world.members[rank] for rank, _ in world.reports[member].suspects)
            if other in world.survivors
        ]
        self._quarrels = before | {pair: before.get(pair, 0) + 1 for pair in dict.fromkeys(accused)}
        self._quarrels_at = lineage
        present = set(world.survivors)
        lasting = [pair for pair, count in self._quarrels.items() if count >= QUARRELS and present.issuperset(pair)]
        if not lasting:
            return None
        odd = max(world.survivors, key=lambda m: (sum(m in pair for pair in lasting), world.members.index(m)))
        one, other = next(pair for pair in lasting if odd in pair)
        return odd, other if odd == one else one

    def _agreed(self, survivors: Sequence[str], reports: Sequence[MemberReport], target: int) -> Lineage | None:
        found = {member: lineage_at(report, target) for member, report in zip(survivors, reports, strict=True)}
        if is_sound(reports):
            known = {lineage for lineage in found.values() if lineage is not None}
            if len(known) == 1:
                return known.pop()
        shown = ", ".join(f"{member}: {lineage}" for member, lineage in found.items())
        self.trouble = f"step {target}: the ranks have not the same state: {shown}"
        return None

    def _form(
        self, members: tuple[str, ...], lineage: Lineage, decision: Decision, change: WorldChange, now: float
    ) -> FormWorld:
        self._world = _Current(change.generation, members, now)
        due = {name for name, newcomer in self._newcomers.items() if newcomer.due_since is not None}
        self._has_gathered_in_vain = bool(due) and due.isdisjoint(members)
        for member in members:
            self._newcomers.pop(member, None)
        for newcomer in self._newcomers.values():
            newcomer.due_since = None
        self._leaving -= set(change.left)
        return FormWorld(change.generation, members, lineage, decision, change)
