"""The decision on the world that follows one that has ended, from the reports of its survivors.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from asyncpar.hosts.lineage import (
    Decision,
    Lineage,
    MemberReport,
    is_sound,
    lineage_at,
    target_step,
)
from asyncpar.hosts.messages import WorldChange

JOIN_PATIENCE = 5.0
"""Most seconds for which a world whose members are ready waits for newcomers, if they can be there by then."""

UNREACHABLE_WORLDS = 2
"""Successive worlds without progress in which two members are mutually unreachable until one is declared lost."""


@dataclass(frozen=True, slots=True)
class Newcomer:
    """A member that waits for a world; before the first world, every member does."""

    lineage: Lineage
    progressed_at: float
    """The time at which it arrived, or last progressed."""
    patience: int = 0
    """Number of steps that it must follow before a world is changed for it; doubled when it is late."""
    followed: int = 0
    due_since: float | None = None
    """The time since which it could join after another step."""
    pace: float = 0.0
    """Seconds of its last step; 0: not known."""

    def arrived_again(self, lineage: Lineage, now: float) -> Newcomer:
        """Return it as it arrives again with ``lineage``: its delay and pace stay."""
        return replace(self, lineage=lineage, progressed_at=now, patience=0, followed=0)

    def progressed(self, lineage: Lineage, now: float) -> Newcomer:
        """Return it after a step that it has followed, to ``lineage``."""
        return replace(
            self, lineage=lineage, progressed_at=now, pace=now - self.progressed_at, followed=self.followed + 1
        )

    def considered(self, now: float) -> Newcomer:
        """Return it with ``due_since``, unless it has to follow more steps."""
        is_due = self.followed >= self.patience and self.due_since is None
        return replace(self, due_since=now) if is_due else self

    def late(self) -> Newcomer:
        """Return it as it has been late: it must follow more steps before a world is changed for it again."""
        return replace(self, patience=max(1, 2 * self.patience), followed=0)

    def seconds_behind(self, target: int) -> float:
        """Return the seconds until it is one step from ``target``; 0 if its pace is not known."""
        return (target - 1 - self.lineage.step) * self.pace


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
    is_responding: Callable[[str], bool] = lambda _: True
    """Whether the host of a member responds."""
    rank_order: Callable[[str], tuple[float, str]] = lambda member: (0.0, member)
    """The key by which the members of the first world are ordered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWorld:
    """A world that has ended, because of ``why``, and whose survivors have all reported, since ``whole_at``.

    ``members`` and ``survivors`` are in the order of their ranks; ``lost`` are the reasons of the losses of the others.
    ``leaving`` are to leave at the end of a step.
    """

    generation: int
    members: tuple[str, ...]
    survivors: tuple[str, ...]
    lost: Mapping[str, str]
    reports: Mapping[str, MemberReport]
    leaving: frozenset[str]
    why: str
    whole_at: float

    @property
    def leaver(self) -> str | None:
        """The member that leaves: one at a time, and none after a loss: parts held by two are lost with both."""
        return None if self.lost else next((member for member in self.survivors if member in self.leaving), None)


@dataclass(frozen=True, slots=True)
class Diverged:
    """The survivors do not have the same state, as ``why`` shows: there can be no further world."""

    why: str


@dataclass(frozen=True, slots=True)
class AwaitNewcomers:
    """Newcomers that may be in time are waited for."""


@dataclass(frozen=True, slots=True)
class LeaveTogether:
    """All survivors leave together: there is nobody to hand over to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TooFew:
    """There are not enough members for a world; ``late`` newcomers are not waited for."""

    late: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormWorld:
    """The next world, whose members go on from ``lineage``, in the order of their ranks.

    ``drained`` survivors leave, ``refused`` newcomers have another state and can never join, and ``late`` ones are not
    waited for.
    """

    members: tuple[str, ...]
    lineage: Lineage
    decision: Decision
    change: WorldChange
    drained: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    late: tuple[str, ...] = ()


NextWorld = AwaitNewcomers | LeaveTogether | TooFew | FormWorld


def agreed_lineage(reports: Mapping[str, MemberReport]) -> Lineage | Diverged:
    """Return the lineage from which members with these reports go on, if all of them can."""
    target = target_step([*reports.values()])
    found = {member: lineage_at(report, target) for member, report in reports.items()}
    if is_sound([*reports.values()]):
        known = {lineage for lineage in found.values() if lineage is not None}
        if len(known) == 1:
            return known.pop()
    shown = ", ".join(f"{member}: {lineage}" for member, lineage in found.items())
    return Diverged(f"step {target}: the ranks differ in state: {shown}")


def is_caught_up(held: Lineage, lineage: Lineage) -> bool:
    """Return whether a newcomer with ``held`` may be a member of a world that goes on from ``lineage``."""
    return held == lineage


def may_wait_for(
    staying: Sequence[str], newcomers: Mapping[str, Newcomer], lineage: Lineage, rules: WorldRules
) -> bool:
    """Return whether too few may form a world: with newcomers that need one of their steps, or its repetition."""
    coming = [name for name, newcomer in newcomers.items() if newcomer.lineage.step >= lineage.step - 1]
    return rules.may_settle((*staying, *coming))


def next_world(
    world: EndedWorld, lineage: Lineage, newcomers: Mapping[str, Newcomer], rules: WorldRules, now: float
) -> NextWorld:
    """Decide on the world after ``world``, whose survivors go on from ``lineage``."""
    survivors = world.survivors
    if not newcomers and not rules.are_more_coming() and rules.may_end(survivors):
        return LeaveTogether()
    target = target_step([*world.reports.values()])
    staying = tuple(member for member in survivors if member != world.leaver)
    ready = _chosen(newcomers, rules, staying, lambda held: is_caught_up(held, lineage))
    late = _chosen(newcomers, rules, staying + ready, lambda held: held.step < target)
    patience = world.whole_at + JOIN_PATIENCE - now
    if not world.lost and any(newcomers[member].seconds_behind(target) < patience for member in late):
        return AwaitNewcomers()
    if not staying + ready:
        staying = survivors
    if not rules.may_form(staying + ready) and not may_wait_for(staying, newcomers, lineage, rules):
        return TooFew(late=late)
    held = {name: newcomer.lineage for name, newcomer in newcomers.items()}
    return FormWorld(
        members=_seated(world.members, staying, ready),
        lineage=lineage,
        decision=Decision.ROLL_FORWARD if _rolls_forward(world, target) else Decision.ABORT,
        change=_change(world, staying, ready),
        drained=tuple(member for member in survivors if member not in staying),
        refused=tuple(name for name, other in held.items() if other.step == lineage.step and other != lineage),
        late=late,
    )


def _chosen(
    newcomers: Mapping[str, Newcomer],
    rules: WorldRules,
    members: tuple[str, ...],
    is_wanted: Callable[[Lineage], bool],
) -> tuple[str, ...]:
    """Return the newcomers whose lineage ``is_wanted`` and that have a place beside ``members``."""
    found: tuple[str, ...] = ()
    for member, newcomer in newcomers.items():
        if is_wanted(newcomer.lineage) and member not in members and rules.may_join(members + found, member):
            found += (member,)
    return tuple(sorted(found))


def _seated(before: Sequence[str], staying: Sequence[str], ready: Sequence[str]) -> tuple[str, ...]:
    """Return the members of a world in the order of their ranks: newcomers take the places of members that have left.

    So survivors keep their parts of the state, and their portions.
    """
    coming = iter(ready)
    seats = (member if member in staying else next(coming, None) for member in before)
    return (*(member for member in seats if member is not None), *coming)


def _rolls_forward(world: EndedWorld, target: int) -> bool:
    return any(report.lineage.step < target for report in world.reports.values())


def _change(world: EndedWorld, staying: Sequence[str], ready: tuple[str, ...]) -> WorldChange:
    return WorldChange(
        generation=world.generation + 1,
        joined=ready,
        left=tuple(member for member in world.members if member not in staying),
        why="; ".join(f"{member} {how}" for member, how in world.lost.items()) or world.why,
        is_by_loss=bool(world.lost) or any(report.suspects for report in world.reports.values()),
    )


@dataclass(frozen=True, slots=True)
class Unreachability:
    """Pairs of mutually unreachable members, with the number of worlds for which they are since there was progress."""

    counts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    lineage: Lineage | None = None

    def after(self, world: EndedWorld, lineage: Lineage) -> Unreachability:
        """Return the pairs after ``world``, whose survivors go on from ``lineage``."""
        before = self.counts if lineage == self.lineage else {}
        suspected = [
            (min(member, other), max(member, other))
            for member in world.survivors
            for other in (world.members[rank] for rank, _ in world.reports[member].suspects)
            if other in world.survivors
        ]
        counts = {**before, **{pair: before.get(pair, 0) + 1 for pair in dict.fromkeys(suspected)}}
        return Unreachability(counts, lineage)

    def member_to_evict(self, world: EndedWorld) -> tuple[str, str] | None:
        """Return the member to evict, and one that it does not reach; None if no pair lasts.

        That is the one in most of such pairs, or the one that joined last.  One world is not enough: a connection may
        break once.
        """
        present = set(world.survivors)
        lasting = [
            pair for pair, count in self.counts.items() if count >= UNREACHABLE_WORLDS and present.issuperset(pair)
        ]
        if not lasting:
            return None
        odd = max(world.survivors, key=lambda m: (sum(m in pair for pair in lasting), world.members.index(m)))
        one, other = next(pair for pair in lasting if odd in pair)
        return odd, other if odd == one else one
