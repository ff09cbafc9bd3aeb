"""Safeguards of agents that simulations take away, each with a group under whose faults its absence shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from asyncpar.elasticity.commit_lease import CommitLease
from asyncpar.hosts import consensus, group, next_world
from asyncpar.hosts.consensus import ConsensusNode
from asyncpar.hosts.consensus_messages import DurableState, Promise
from asyncpar.hosts.group import LAST_HOLDER_SECONDS, AgentSilence, HostFacts
from asyncpar.hosts.service import WorldService
from asyncpar.hosts.votes import VoteFile
from asyncpar.hosts.worlds import ProposeState, StateDecided, WorldMachine
from asyncpar.launch.agents import host_agent
from asyncpar.testing.simulation import Fault
from tests.launch.agents.simulation import Group

SPLITS = ("isolate", "silence", "one_way", "clog")
DEATHS = ("kill", "crash", "restart", "reset", "replay")
THREE = Group(faults=8, death_chance=0.02)
LAST = Group(faults=3, calm_from=9.0, last="crash", seconds=28.0)
"""One of three hosts is lost for good."""
LONG = LAST_HOLDER_SECONDS + 6.0
"""Seconds after which even the last hosts that have the state are given up."""
STOPS = Group(
    hosts=(1, 1),
    planned=(Fault(at=5.013, kind="pause", node=0, seconds=LONG),),
    calm_from=LONG + 6.0,
    seconds=LONG + 21.0,
)
"""The host that has all ranks of the job is stopped."""
SPARE = Group(size=5, hosts=(1, 2), faults=8, kinds=SPLITS)
"""Most hosts have no ranks."""
ALL = Group(size=2, hosts=(2, 2), faults=0, rank_death_chance=0.02)
"""Without any one of its hosts the job waits."""


def _cut(deaf_after: float) -> Group:
    """Return a group whose ranks are all on two hosts that the others do not hear, and which hear them for a while."""
    pairs = [(node, peer) for node in (1, 2) for peer in (0, 3, 4)]
    faults = [Fault(at=4.0, kind="one_way", node=node, peer=peer, seconds=LONG) for node, peer in pairs]
    faults += [
        Fault(at=4.0 + deaf_after, kind="one_way", node=peer, peer=node, seconds=LONG - deaf_after)
        for node, peer in pairs
    ]
    return Group(size=5, hosts=(1, 2), idle=(0, 3, 4), planned=tuple(faults), calm_from=LONG + 5.0, seconds=LONG + 22.0)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A safeguard: what it prevents, the patches that take it away, and the group that misses it."""

    prevents: str
    group: Group
    patches: tuple[tuple[Any, str, Any], ...]


def _hears_any(node: ConsensusNode, sender: str, term: Any, echo: Any, now: float) -> Any:
    return _BEATEN(node, sender, term, now, now)


def _any_voter(voters: Any, acknowledged: Any) -> bool:
    return bool(set(voters) & set(acknowledged))


def _forgetful(state: DurableState) -> DurableState:
    return replace(state, promised=None, accepted=None)


def _empty_promise(node: ConsensusNode, sender: str, promise: Promise, now: float) -> Any:
    return _PROMISED(node, sender, replace(promise, accepted=None), now)


def _passes_all(service: WorldService, command: Any) -> None:
    if not service._is_dismissed:  # noqa: SLF001
        service._outbox.put_nowait(command)  # noqa: SLF001


def _forgets_told(service: WorldService, sender: str, address: str, message: object) -> None:
    _TAKE(service, sender, address, message)
    service._waiting.clear()  # noqa: SLF001


def _passes_early(service: WorldService, command: Any) -> None:
    if command not in service._passed_on:  # noqa: SLF001
        service._passed_on.add(command)  # noqa: SLF001
        service._outbox.put_nowait(command)  # noqa: SLF001


def _is_newcomer(file: VoteFile) -> None:
    del file


def _decides_anything(machine: WorldMachine, event: Any, *, now: float) -> Any:
    """Hold a proposal for decided as soon as it is made."""
    commands = _HANDLE(machine, event, now=now)
    for command in list(commands):
        if isinstance(command, ProposeState):
            commands += _decides_anything(machine, StateDecided(command.state), now=now)
    return commands


async def _allows_all(_lease: CommitLease) -> None:
    """Let a commit be made without the lease."""


_BEATEN, _PROMISED = ConsensusNode._beaten, ConsensusNode._promised  # noqa: SLF001
_TAKE, _HANDLE = WorldService._take_frame, WorldMachine.handle  # noqa: SLF001
_READ = VoteFile.read

MISSING: dict[str, Missing] = {
    "has-quorum": Missing(prevents="two halves go on", group=THREE, patches=((consensus, "has_quorum", _any_voter),)),
    "accepted-is-kept": Missing(
        prevents="an entry that may be decided is replaced by another",
        group=replace(THREE, death_chance=0.1),
        patches=((ConsensusNode, "_promised", _empty_promise),),
    ),
    "votes-are-read": Missing(
        prevents="a group ends when most of its voters start again",
        group=replace(THREE, kinds=DEATHS, faults=12),
        patches=((VoteFile, "read", _is_newcomer),),
    ),
    "votes-are-whole": Missing(
        prevents="a voter that starts again votes twice in a term",
        group=replace(THREE, death_chance=0.1),
        patches=((VoteFile, "read", lambda file: None if (state := _READ(file)) is None else _forgetful(state)),),
    ),
    "parking": Missing(
        prevents="hosts that were given up go on with a world of their own",
        group=_cut(0.0),
        patches=(
            (WorldService, "_consider_parking", lambda _service, _node: None),
            (CommitLease, "hold", _allows_all),  # or else they wait for leave to commit
        ),
    ),
    "lease-margin": Missing(
        prevents="hosts are given up before they are parked",
        group=_cut(0.0),
        patches=((group, "LAST_HOLDER_SECONDS", 1.0), (group, "SILENT_SECONDS", 1.0)),
    ),
    "commit-lease": Missing(
        prevents="a host that was stopped, and is given up, commits a step as it wakes",
        group=STOPS,
        patches=((CommitLease, "hold", _allows_all),),
    ),
    "silence": Missing(
        prevents="the others wait for a host that is off",
        group=LAST,
        patches=((AgentSilence, "lost", lambda _silence, _state, _now: []),),
    ),
    "incarnations": Missing(
        prevents="a process takes the place of the one before it in its slot, which had another state",
        group=replace(THREE, kinds=DEATHS),
        patches=((host_agent, "_draw", lambda: "same"),),
    ),
    "echo": Missing(
        prevents="a host that is not heard any more counts on its leader",
        group=_cut(2.5),
        patches=(
            (ConsensusNode, "_beaten", _hears_any),
            (group, "LAST_HOLDER_SECONDS", 3.5),  # before connections that are silent break
        ),
    ),
    "each-once": Missing(
        prevents="a host does twice what its leader tells again",
        group=THREE,
        patches=((WorldService, "_pass_on", _passes_all),),
    ),
    "in-order": Missing(
        prevents="a host hears of what happens to a world before it hears of the world, or after the next one",
        group=Group(faults=40, kinds=("reset", "replay", "restart")),
        patches=((WorldService, "_pass_on", _passes_early),),
    ),
    "decided-before-told": Missing(
        prevents="a leader goes on from what no quorum has",
        group=THREE,
        patches=((WorldMachine, "handle", _decides_anything),),
    ),
    "facts-are-told-again": Missing(
        prevents="a new leader does not know who is there",
        group=replace(THREE, kinds=DEATHS),
        patches=((HostFacts, "all", lambda _facts: []),),
    ),
    "facts-wait-for-the-leader": Missing(
        prevents="what a host says to a leader that is about to lead is lost",
        group=Group(death_chance=0.1),
        patches=((WorldService, "_take_frame", _forgets_told),),
    ),
    "own-members": Missing(
        prevents="a world waits for ranks that ended with their agent",
        group=replace(THREE, kinds=DEATHS),
        patches=((WorldService, "_disown", lambda _service, _world: None),),
    ),
    "healed-of-the-lost": Missing(
        prevents="a newcomer that members had healed who are lost ends the job",
        group=replace(ALL, hosts=(1, 2), rank_death_chance=0.03),
        patches=((WorldMachine, "_dismiss_healed", lambda _machine: None),),
    ),
    "late-newcomers": Missing(
        prevents="too few survivors wait for newcomers who wait for their step",
        group=ALL,
        patches=((next_world, "may_wait_for", lambda *_: False),),
    ),
    "a-surplus-spare-waits": Missing(
        prevents="a world has more hosts than the job may have",
        group=Group(size=5, hosts=(1, 2), faults=8),
        patches=((WorldMachine, "_has_place", lambda _machine, _members, _newcomer: True),),
    ),
    "who-is-healing": Missing(
        prevents="too few survivors wait for a newcomer that waits for their next step",
        group=ALL,
        patches=((WorldMachine, "_will_be_enough", WorldMachine._is_enough),),  # noqa: SLF001
    ),
}


@contextmanager
def without(name: str) -> Iterator[Group]:
    """Take a safeguard away for the time of the block."""
    missing = MISSING[name]
    with ExitStack() as stack:
        for place, attribute, value in missing.patches:
            stack.enter_context(patch.object(place, attribute, value))
        yield missing.group
