"""Groups of simulated hosts under drawn faults, and what must be true of every run."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from asyncpar.hosts.codec import decode_group
from asyncpar.hosts.lineage import Lineage
from asyncpar.hosts.messages import (
    HostParked,
    JobClosed,
    JobOpened,
    WorldAnnounced,
    WorldEnded,
    WorldStarted,
)
from asyncpar.launch.agents.job_record import ElasticMode
from asyncpar.testing.simulation import Conditions, Fault, SimulationNote, draw_faults
from asyncpar.testing.simulation.cluster import SimulatedCluster
from asyncpar.testing.simulation.loop import SimulationLoop
from asyncpar.testing.simulation.patches import simulated_machine
from asyncpar.testing.simulation.trace import Trace
from tests.launch.agents.simulated_hosts import (
    Committed,
    Decided,
    Died,
    EndedByChance,
    Failed,
    Leads,
    RanHere,
    Received,
    RestartedProcesses,
    SimulatedHosts,
    Started,
    StrawProcesses,
)

KINDS = (
    "kill",
    "crash",
    "restart",
    "isolate",
    "silence",
    "one_way",
    "clog",
    "slow",
    "reset",
    "replay",
    "disk",
    "clock",
    "pause",
)
BEGIN = 3.0
"""When faults begin."""
CALM_FROM = 15.0
SECONDS = 32.0
LIVE_AGAIN = 10.0
"""Within so many seconds after the last fault another step is committed."""
LATE_STARTS = 4.0
"""So much later, if faults have ended agents: they start again late, and wait until their former start is lost."""
LAST_AT = 6.0
"""So many seconds after all is well again comes the fault that lasts for good, if there is to be one."""
RANKS_OF_A_FAULT = 4
"""So many processes of ranks start at most for each fault, beside the first of each host."""


class Unsafe(AssertionError):
    """Something has happened that must not, whatever fails."""


class Stuck(AssertionError):
    """Nothing is committed although everything is well again."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """What is simulated; ``idle`` nodes are witnesses.

    ``last`` is the kind of a fault that a drawn node has for good after all is well again.
    """

    size: int = 3
    hosts: tuple[int, int] = (1, 3)
    idle: tuple[int, ...] = ()
    faults: int = 6
    kinds: tuple[str, ...] = KINDS
    death_chance: float = 0.0
    rank_death_chance: float = 0.0
    planned: tuple[Fault, ...] = ()
    last: str | None = None
    mode: ElasticMode = ElasticMode.RANKS
    seconds: float = SECONDS
    calm_from: float = CALM_FROM


@dataclass
class Run:
    """What has happened."""

    notes: list[SimulationNote]
    trace_hash: str
    faults: tuple[Fault, ...]
    calm_from: float
    size: int
    last: Fault | None = None
    lines: list[str] = field(default_factory=list)

    def of(self, kind: type[Any]) -> list[SimulationNote]:
        return [one for one in self.notes if isinstance(one.content, kind)]


def simulate_hosts(seed: int, group: Group, *, records: bool = False) -> Run:
    """Let a group run a job for some seconds under faults drawn from ``seed``."""
    lines: list[str] = []
    trace = Trace(lines if records else None)
    loop = SimulationLoop(seed, trace)
    drawn = draw_faults(seed, count=group.faults, size=group.size, within=group.calm_from - BEGIN, kinds=group.kinds)
    faults = group.planned or tuple(_later(fault) for fault in drawn)
    last = None if group.last is None else _last(Random(f"{seed} last"), group)
    conditions = Conditions(spread=0.002)
    cluster = SimulatedCluster(loop, size=group.size, seed=seed, trace=trace, conditions=conditions)
    hosts = SimulatedHosts(
        cluster,
        hosts=group.hosts,
        idle=group.idle,
        death_chance=group.death_chance,
        rank_death_chance=group.rank_death_chance,
        mode=group.mode,
    )

    async def watch() -> None:
        cluster.on_restart = hosts.start
        for node in range(group.size):
            hosts.start(node)
        cluster.plan(faults)
        await asyncio.sleep(group.calm_from)
        hosts.calm()
        cluster.settle(frozenset(range(group.size)))
        for node in range(group.size):
            cluster.network.put_up(node)
            hosts.start(node)
        if last is not None:
            cluster.plan((last,))
        await asyncio.sleep(group.seconds - group.calm_from)

    StrawProcesses.network, StrawProcesses.may_die = cluster.network, hosts.rank_may_die
    RestartedProcesses.failed = set()
    asyncio.set_event_loop(loop)
    loop.set_exception_handler(lambda _, context: _note_error(loop, context))
    try:
        with simulated_machine(loop, seed):
            loop.run_until_complete(watch())
            notes = list(loop.notes)
            loop.set_exception_handler(lambda _loop, _context: None)
            cluster.network.mute()
            loop.bury(1.0)
            loop.bury(1.0)  # what was begun by those that ended
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return Run(notes, trace.digest, faults, group.calm_from, group.size, last, lines)


def _last(dice: Random, group: Group) -> Fault:
    assert group.last is not None
    seconds = None if group.last in ("kill", "crash") else 10 * group.seconds
    at = group.calm_from + LAST_AT
    return Fault(at=at, kind=group.last, node=dice.randrange(group.size), seconds=seconds)


def _later(fault: Fault) -> Fault:
    factor = fault.factor
    if fault.kind == "clock" and factor is not None:
        factor = round(1.0 + (factor - 1.0) / 5, 3)  # what leases allow for
    if fault.kind == "slow" and factor is not None:
        factor = min(factor, 100.0)
    return replace(fault, at=fault.at + BEGIN, factor=factor)


def _note_error(loop: SimulationLoop, context: dict[str, Any]) -> None:
    error = context.get("exception")
    if not isinstance(error, Died | None):
        loop.notes.append(SimulationNote(loop.now, -1, 0, Failed(f"{context.get('message')}: {error!r}")))


# -- invariants


def check(run: Run) -> None:
    """Raise ``Unsafe`` or ``Stuck`` if the run is not as it must be."""
    for one in run.of(Failed):
        raise Unsafe(f"at {one.at:.3f}, node {one.node}: {one.content.why}")
    check_decisions(run)
    check_leaders(run)
    check_commands(run)
    check_commits(run)
    check_parking(run)
    check_culprits(run)
    check_restarts(run)
    check_liveness(run)


def check_restarted(run: Run) -> None:
    """Raise ``Unsafe`` or ``Stuck`` for a run of a job that starts again with every world."""
    for one in run.of(Failed):
        raise Unsafe(f"at {one.at:.3f}, node {one.node}: {one.content.why}")
    check_decisions(run)
    check_leaders(run)
    check_commands(run)
    started: dict[tuple[int, int], int] = {}
    facts: dict[int, set[tuple[int, int]]] = defaultdict(set)
    running: dict[tuple[int, int, int], RanHere] = {}
    for one in run.of(RanHere):
        place = one.content.place
        who = one.node, one.incarnation, place.rank
        if one.content.code is not None:
            running.pop(who, None)
            continue
        if started.setdefault((place.generation, place.rank), one.node) != one.node:
            raise Unsafe(f"at {one.at:.3f}: rank {place.rank} of generation {place.generation} starts on two hosts")
        facts[place.generation].add((place.world_size, place.restarts))
        running[who] = one.content
    for generation, found in facts.items():
        if len(found) > 1:
            raise Unsafe(f"generation {generation}: ranks differ in the size of the world and restarts: {found}")
    last = {one.place.generation for one in running.values() if one.place.generation == max(facts)}
    ranks = sorted(one.place.rank for one in running.values() if one.place.generation in last)
    if ranks != list(range(run.size)):
        raise Stuck(f"in the end the ranks {ranks} of generation {max(facts)} run, on {run.size} hosts")


def check_decisions(run: Run) -> None:
    """One entry for each generation of the log, one world for each generation of worlds, and none of too many hosts."""
    entries: dict[int, Any] = {}
    worlds: dict[int, WorldAnnounced] = {}
    for one in run.of(Decided):
        entry = one.content.entry
        if entries.setdefault(entry.generation, entry) != entry:
            raise Unsafe(f"at {one.at:.3f}, node {one.node}: two entries {entry.generation}")
        state = decode_group(entry.content)
        world = state.world
        if state.job is not None and world is not None:
            hosts = {member.host for member in world.members}
            if len(hosts) > state.job.terms.most_hosts:
                raise Unsafe(f"at {one.at:.3f}: more than {state.job.terms.most_hosts} hosts in {world}")
        if world is not None and worlds.setdefault(world.generation, world) != world:
            raise Unsafe(f"at {one.at:.3f}, node {one.node}: two worlds of generation {world.generation}")


def check_leaders(run: Run) -> None:
    """One leader for each term."""
    leaders: dict[Any, tuple[int, int]] = {}
    for one in run.of(Leads):
        who = one.node, one.incarnation
        if leaders.setdefault(one.content.term, who) != who:
            raise Unsafe(f"at {one.at:.3f}: {who} leads in {one.content.term}, as {leaders[one.content.term]} did")


def check_commands(run: Run) -> None:
    """Each host hears each thing once, and in order."""
    received: dict[tuple[int, int, int], list[Any]] = defaultdict(list)
    for one in run.of(Received):
        received[one.node, one.incarnation, one.content.service].append((one.at, one.content.command))
    for who, commands in received.items():
        generation, seen = -1, set[Any]()
        for at, command in commands:
            where = f"at {at:.3f}, {who}"
            if isinstance(command, JobOpened | JobClosed | WorldAnnounced | WorldStarted | WorldEnded):
                if command in seen:
                    raise Unsafe(f"{where}: {command} twice")
                seen.add(command)
            if isinstance(command, WorldAnnounced):
                if command.generation <= generation:
                    raise Unsafe(f"{where}: world {command.generation} after {generation}")
                generation = command.generation
            elif isinstance(command, WorldStarted | WorldEnded) and command.generation > generation:
                raise Unsafe(f"{where}: {command} before its world was announced")


def check_commits(run: Run) -> None:
    """One history until all members are lost; nothing is committed in a world that others have replaced by another."""
    anew = [one for one in run.of(Decided) if _is_anew(one)]
    first: dict[int, float] = {}
    for one in anew:
        world = decode_group(one.content.entry.content).world
        assert world is not None
        first.setdefault(world.generation, one.at)
    steps: dict[tuple[int, int], Lineage] = {}
    latest: dict[str, int] = {}
    for one in run.of(Committed):
        commit = one.content
        where = f"at {one.at:.3f}, node {one.node}, {commit}"
        late = [generation for generation, at in first.items() if generation > commit.generation and at < one.at]
        if late:
            raise Unsafe(f"{where}: after generation {late[0]} had begun anew")
        epoch = max((generation for generation in first if generation <= commit.generation), default=-1)
        if steps.setdefault((epoch, commit.lineage.step), commit.lineage) != commit.lineage:
            raise Unsafe(f"{where}: others have {steps[epoch, commit.lineage.step]}")
        if commit.lineage.step != latest.get(commit.member, commit.lineage.step - 1) + 1:
            raise Unsafe(f"{where}: after step {latest[commit.member]}")
        latest[commit.member] = commit.lineage.step


def _is_anew(one: SimulationNote) -> bool:
    world = decode_group(one.content.entry.content).world
    return world is not None and not world.members


def check_parking(run: Run) -> None:
    """Who is parked commits nothing."""
    parked: dict[tuple[int, int], tuple[int, float]] = {}
    for one in run.notes:
        who = one.node, one.incarnation
        service, since = parked.get(who, (0, 0.0))
        if isinstance(one.content, Received):
            if one.content.service != service:  # it had been dismissed
                parked.pop(who, None)
            if isinstance(one.content.command, HostParked):
                parked.pop(who, None)
                if one.content.command.why:
                    parked[who] = one.content.service, one.at
        elif isinstance(one.content, Committed) and service and one.at > since:
            raise Unsafe(f"at {one.at:.3f}, node {one.node} commits {one.content}, and is parked")


def _faulty(run: Run) -> set[int]:
    """Return the nodes that a fault concerns."""
    faults = run.faults if run.last is None else (*run.faults, run.last)
    return {node for fault in faults for node in fault.nodes} | {one.node for one in run.of(EndedByChance)}


def check_culprits(run: Run) -> None:
    """Who is left out of a world had to do with a fault."""
    faulty = _faulty(run)
    for one in run.of(Decided):
        world = decode_group(one.content.entry.content).world
        for name in () if world is None else world.change.left:
            if int(name.partition("/")[0].removeprefix("h")) not in faulty:
                raise Unsafe(f"at {one.at:.3f}: {name}, which had no fault, has left: {world}")


def check_restarts(run: Run) -> None:
    """Faults, and nothing else, make ranks start again."""
    troubles = len(run.faults) + len(run.of(EndedByChance)) + (run.last is not None)
    starts = len(run.of(Started))
    if starts > run.size + RANKS_OF_A_FAULT * troubles:
        raise Unsafe(f"{starts} ranks have started on {run.size} hosts because of {troubles} faults")


def check_liveness(run: Run) -> None:
    """When all is well again, steps are committed soon, and to the end; so after a host is lost for good."""
    times = [one.at for one in run.of(Committed) if one.at > run.calm_from]
    end = run.notes[-1].at if run.notes else 0.0
    if not times or times[0] > run.calm_from + LIVE_AGAIN + LATE_STARTS or times[-1] < end - 2.0:
        raise Stuck(f"faults end at {run.calm_from:g}; commits at {times[:1]} ... {times[-1:]}")
    if run.last is not None:
        others = [one.at for one in run.of(Committed) if one.node != run.last.node and one.at > run.last.at]
        waits = [after - before for before, after in itertools.pairwise([run.last.at, *others, end])]
        if max(waits) > LIVE_AGAIN:
            raise Stuck(f"the others committed nothing for {max(waits):.1f} s after {run.last}")
