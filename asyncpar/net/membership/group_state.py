"""The state that agents agree on, and the choice of the voters of its next change.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from asyncpar.net.membership.consensus_messages import MOST_VOTERS
from asyncpar.net.membership.world_messages import JobClosed, JobOpened, WorldAnnounced


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNode:
    """An agent of the group: ``node`` is one start of it, ``name`` that of its host; it serves at ``address``.

    A witness votes, but runs no ranks.
    """

    node: str
    name: str
    address: str
    is_witness: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """The state on which the group agrees.  ``generation`` is that of the next world."""

    nodes: tuple[GroupNode, ...]
    job: JobOpened | None = None
    closed: JobClosed | None = None
    world: WorldAnnounced | None = None
    generation: int = 0

    @property
    def is_job_open(self) -> bool:
        return self.job is not None and (self.closed is None or self.closed.number < self.job.number)

    def named(self, name: str) -> GroupNode | None:
        """Return the agent of a host."""
        return next((node for node in self.nodes if node.name == name), None)


def choose_voters(
    state: GroupState, before: Iterable[str], leader: str, heard: Callable[[str], bool] = bool
) -> tuple[str, ...]:
    """Return the voters for the next change: the leader first, then previous voters, then others, up to five.

    The others are only nodes that were ``heard`` from, if any was: one that was admitted and never began would be
    missing in every quorum.

    Witnesses come last: of two voters the first goes on, and a job needs a host that has ranks.  One of them votes,
    however many hosts there are.
    """
    present = {node.node: node.is_witness for node in state.nodes}
    known = dict.fromkeys((leader, *before))
    wanted = [node for node in dict.fromkeys((*known, *present)) if node in present and (node in known or heard(node))]
    wanted = wanted or list(present)
    witnesses = [node for node in wanted if present[node]]
    hosts = [node for node in wanted if not present[node]][: MOST_VOTERS - min(len(witnesses), 1)]
    return tuple(hosts + witnesses)[:MOST_VOTERS]
