"""For how long the agents of a group have been silent, and which of them their leader holds for lost.  Pure.

A host whose members are the whole world goes on until its agent is parked: it is given more time.  Else a world needs
members that the leader hears, and commits nothing without them.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncpar.net.membership.group_state import GroupNode, GroupState

SILENT_SECONDS = 2.5
"""Seconds without an answer after which the leader holds an agent for lost."""
SILENT_ALONE_SECONDS = 3.5
"""The same if no member of the world is elsewhere: more than ``PARKED_SECONDS``, and another leader's lease (see
``ElectionTimes``) after the last that the leader may have heard."""
PARKED_SECONDS = 2.1
"""Seconds without word that a leader hears it after which an agent is parked: before it can be held for lost."""
_REFUSED_SECONDS = 0.25
"""Seconds for which nobody accepts connections where an agent was, after which it is held for lost."""
_ELECTION_SECONDS = 1.0
"""Seconds without a word of a leader that an election proves, at least (see ``ElectionTimes``)."""


class AgentSilence:
    """When each agent was heard of last."""

    def __init__(self) -> None:
        self._answered: dict[str, float] = {}
        self._refused: dict[str, float] = {}
        self._speakers: set[str] = set()

    def has_heard(self, node: str) -> bool:
        """Has ``node`` ever said anything?"""
        return node in self._speakers

    def heard(self, node: str, now: float) -> None:
        """Note that ``node`` has said something."""
        self._answered[node] = now
        self._speakers.add(node)
        self._refused.pop(node, None)

    def connects(self, node: str, now: float) -> None:
        """Note that there is to be a connection to ``node``."""
        self._answered[node] = now

    def accepts(self, node: str) -> None:
        """Note that there is a connection to ``node``: what was refused before was another start of it."""
        self._refused.pop(node, None)

    def refused(self, node: str, now: float) -> None:
        """Note that nobody accepts connections where ``node`` was."""
        self._refused.setdefault(node, now)

    def forget(self, node: str) -> None:
        """Forget ``node``, which is none of the group any more."""
        self._answered.pop(node, None)
        self._speakers.discard(node)
        self._refused.pop(node, None)

    def begin(self, nodes: Iterable[str], now: float, *, before: str | None) -> None:
        """Count from now on, as the leader after ``before``, who has been silent for an election already."""
        heard = self._answered.get(before, now) if before is not None else now
        self._answered = dict.fromkeys(nodes, now)
        if before in self._answered:
            self._answered[before] = max(heard, now - _ELECTION_SECONDS)

    def lost(self, state: GroupState, now: float) -> list[tuple[str, str]]:
        """Return the nodes of ``state`` that are held for lost, and why."""
        found = []
        for node in state.nodes:
            patience = self._patience(node, state, now)
            if now - self._refused.get(node.node, now) > _REFUSED_SECONDS:
                found.append((node.node, "its agent is gone"))
            elif now - self._answered.get(node.node, now) > patience:
                found.append((node.node, f"its agent did not answer for {patience:g} s"))
        return found

    def _patience(self, node: GroupNode, state: GroupState, now: float) -> float:
        hosts = {member.host for member in (() if state.world is None else state.world.members)}
        there = {one.name for one in state.nodes if now - self._answered.get(one.node, now) <= SILENT_SECONDS}
        return SILENT_ALONE_SECONDS if node.name in hosts and not hosts & there else SILENT_SECONDS
