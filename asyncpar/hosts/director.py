"""Decisions on the next world, from the reports and losses of members.  Pure.

Among agents the director is the leader's, and its decisions count once a quorum has logged them (``worlds.py``); the
next leader begins with ``resume``, and receives reports on the members from all hosts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from asyncpar.hosts.lineage import Decision, Lineage, MemberReport, differs_from_group
from asyncpar.hosts.messages import (
    ChangePending,
    MemberDismissed,
    MembersWanted,
    WorldChange,
    WorldEnded,
    WorldStarted,
)
from asyncpar.hosts.next_world import (
    AwaitNewcomers,
    Diverged,
    EndedWorld,
    FormWorld,
    LeaveTogether,
    Newcomer,
    TooFew,
    Unreachability,
    WorldRules,
    agreed_lineage,
    next_world,
)
from asyncpar.hosts.total_loss import ALL_LOST

READY_PATIENCE = 15.0
"""Seconds after a world was formed within which each member must be reachable, or it is declared lost.

They are more if members have more time to report in.
"""

LEFT_WELL = "left"
"""The reason of the loss of a member that needs no more worlds."""

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


DirectorCommand = FormWorld | WorldEnded | WorldStarted | ChangePending | MembersWanted | MemberDismissed
"""``FormWorld`` asks for the next world to be decided and announced; the others are announced to all hosts."""

_DRAINED = "drained"


def _drained(members: Iterable[str]) -> list[DirectorCommand]:
    return [MemberDismissed(member, _DRAINED, is_drained=True) for member in members]


@dataclass
class _Current:
    generation: int
    members: tuple[str, ...]
    formed_at: float
    ready: dict[str, str] = field(default_factory=dict)
    """Addresses of the members that are reachable."""
    lost: dict[str, str] = field(default_factory=dict)
    reports: dict[str, MemberReport] = field(default_factory=dict)
    revoked_at: float | None = None
    whole_at: float | None = None
    """The time at which all survivors had reported."""
    is_announced: bool = False
    has_called: bool = False
    """Whether further members were called."""
    why: str = ""

    @property
    def survivors(self) -> tuple[str, ...]:
        return tuple(member for member in self.members if member not in self.lost)


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
        self._newcomers: dict[str, Newcomer] = {}
        self._gather_for = gather_for
        self._has_gathered_in_vain = False
        """Whether the last world was changed for newcomers that were too far behind at the change."""
        self._leaving: set[str] = set()
        self._stopped: dict[str, tuple[str, float]] = {}
        """Members whose processes are stopped: how, and since when this is known."""
        self._unreachability = Unreachability()
        self._world: _Current | None = None
        self._short_since: float | None = None
        """The time since which the current world is too small, and nobody is on the way to it."""
        self.trouble: str | None = None
        """The reason why there can be no further world."""

    def resume(self, generation: int, members: tuple[str, ...], now: float) -> None:
        """Resume from a world that another director has formed; its members report their states again."""
        self._world = _Current(generation, members, now)

    @property
    def lacks_members(self) -> bool:
        """Whether the last world is over, and too few are left for another one."""
        return self._world is not None and self._world.has_called

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
            return [MemberDismissed(member, self.trouble)]
        known = self._newcomers.get(member)
        newcomer = Newcomer(lineage, now) if known is None else known.arrived_again(lineage, now)
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
        return self._consider(member, newcomer.progressed(lineage, now), now)

    def _consider(self, member: str, newcomer: Newcomer, now: float) -> list[DirectorCommand]:
        """Change the world for a newcomer with its new lineage, unless it has to follow more steps."""
        self._newcomers[member] = newcomer.considered(now)
        return [*self._announce_gathered(now, member), *self._complete(now)]

    def withdraw(self, member: str, now: float) -> list[DirectorCommand]:
        """Remove ``member``, which has to be healed anew, from all worlds until it arrives again."""
        return self.lost(member, "had to begin anew", now)

    def ready(self, member: str, generation: int, address: str) -> list[DirectorCommand]:
        """Record that ``member`` is reachable in the world of ``generation``, at ``address``."""
        world = self._world
        if world is None or generation != world.generation or member not in world.members:
            return []
        is_known, world.ready[member] = member in world.ready, address
        if is_known or len(world.ready) < len(world.members) or world.revoked_at is not None:
            return []
        return [WorldStarted(generation, tuple(world.ready[one] for one in world.members))]

    def drain(self, member: str) -> list[DirectorCommand]:
        """Have ``member`` leave at the end of a step."""
        self._leaving.add(member)
        return self._announce()

    def report(self, member: str, report: MemberReport, now: float, why: str = "") -> list[DirectorCommand]:
        """Process the report of ``member``, which has left that world; ``why``, if it knows more than a suspicion."""
        world = self._world
        if world is None or report.generation != world.generation or member not in world.survivors:
            return [
                MemberDismissed(member, f"generation {report.generation} is over, and it went on without this rank")
            ]
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
        limit = 0.0 if any(self._rules.is_responding(member) for member in self.holders) else self._report_within
        found = [(member, *self._stopped[member]) for member in self.members if member in self._stopped]
        late = [(member, how) for member, how, since in found if now - since >= limit]
        return [command for member, how in late for command in self._evict(member, how, now)]

    def _evict(self, member: str, why: str, now: float) -> list[DirectorCommand]:
        return [MemberDismissed(member, why), *self.lost(member, why, now)]

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
            there, began, limit = set(world.ready), world.formed_at, self._ready_within
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
        quiet = any(now - placed[name].progressed_at >= self._gather_for for name in due)
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
        members = tuple(sorted(self._newcomers, key=self._rules.rank_order))
        lineages = [self._newcomers[member].lineage for member in members]
        if len(set(lineages)) > 1:
            shown = ", ".join(f"{member}: {lineage}" for member, lineage in zip(members, lineages, strict=True))
            return self._fail(f"state: expected the same on all ranks when the job begins, got {shown}", members)
        change = WorldChange(generation=self._first, joined=members)
        first = FormWorld(members=members, lineage=lineages[0], decision=Decision.ABORT, change=change)
        return self._form(first, now)

    def _announce(self) -> list[DirectorCommand]:
        world = self._world
        if world is None or world.revoked_at is not None or world.is_announced or not world.survivors:
            return []
        world.is_announced = True
        return [ChangePending(world.generation)]

    def _revoke(self, why: str, now: float, *, is_planned: bool = False) -> list[DirectorCommand]:
        world = self._world
        assert world is not None
        if world.revoked_at is not None:
            return []
        world.revoked_at, world.why = now, why
        return [WorldEnded(world.generation, why, is_planned=is_planned)]

    def _complete(self, now: float) -> list[DirectorCommand]:
        """Form the next world if all its members are ready."""
        world = self._world
        if world is None or world.revoked_at is None or self.trouble is not None:
            return []
        if not world.survivors:
            return self._fail(ALL_LOST, self._newcomers)
        reports = {member: world.reports[member] for member in world.survivors if member in world.reports}
        if len(reports) < len(world.survivors):
            return []
        lineage = agreed_lineage(reports)
        if isinstance(lineage, Diverged):
            return self._fail(lineage.why, world.survivors)
        is_new, world.whole_at = world.whole_at is None, now if world.whole_at is None else world.whole_at
        ended = EndedWorld(
            generation=world.generation,
            members=world.members,
            survivors=world.survivors,
            lost=world.lost,
            reports=reports,
            leaving=frozenset(self._leaving),
            why=world.why,
            whole_at=world.whole_at,
        )
        if is_new and (commands := self._evict_unreachable(ended, lineage, now)):
            return commands
        match next_world(ended, lineage, self._newcomers, self._rules, now):
            case AwaitNewcomers():
                return []
            case LeaveTogether():
                return _drained(world.survivors)
            case TooFew(late=late):
                self._wait_longer(late)
                has_called, world.has_called = world.has_called, True
                return [] if has_called else [MembersWanted(world.generation)]
            case FormWorld() as formed:
                return self._change(formed, now)

    def _fail(self, why: str, members: Iterable[str]) -> list[DirectorCommand]:
        """Dismiss ``members``: there can be no further world."""
        self.trouble = why
        return [MemberDismissed(member, why) for member in members]

    def _evict_unreachable(self, ended: EndedWorld, lineage: Lineage, now: float) -> list[DirectorCommand]:
        """Go on without a member that others have not reached for several worlds, nor it them."""
        self._unreachability = self._unreachability.after(ended, lineage)
        found = self._unreachability.member_to_evict(ended)
        if found is None:
            return []
        member, other = found
        return self._evict(member, f"does not hear {other}, nor is heard there, while both are heard here", now)

    def _wait_longer(self, late: Iterable[str]) -> None:
        for name in late:
            self._newcomers[name] = self._newcomers[name].late()

    def _change(self, formed: FormWorld, now: float) -> list[DirectorCommand]:
        """Form the next world, without those who leave or can never join."""
        self._wait_longer(formed.late)
        why = differs_from_group(formed.lineage)
        for name in formed.refused:
            del self._newcomers[name]
        refused = [MemberDismissed(name, why, is_refused=True) for name in formed.refused]
        commands = [*_drained(formed.drained), *refused, *self._form(formed, now)]
        return [*commands, *(self._announce() if self._leaving else [])]

    def _form(self, formed: FormWorld, now: float) -> list[DirectorCommand]:
        self._world = _Current(formed.change.generation, formed.members, now)
        due = {name for name, newcomer in self._newcomers.items() if newcomer.due_since is not None}
        self._has_gathered_in_vain = bool(due) and due.isdisjoint(formed.members)
        for member in formed.members:
            self._newcomers.pop(member, None)
        self._newcomers = {name: replace(one, due_since=None) for name, one in self._newcomers.items()}
        self._leaving -= set(formed.change.left)
        return [formed]
