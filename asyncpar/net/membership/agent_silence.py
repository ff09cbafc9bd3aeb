"""Silence of the agents of a group, and which of them their leader declares lost.  Pure.

The committed state is in the memory of members.  So a host is declared lost after a short silence only while another
one that holds the state is heard from; the last holders are waited for, since a pause is not a death.
"""

from __future__ import annotations

from collections.abc import Iterable

from asyncpar.net.membership.group_state import GroupState

SILENT_SECONDS = 2.5
"""Seconds without an answer after which the leader declares an agent lost."""
LAST_HOLDER_SECONDS = 30.0
"""The same if no other holder of the state is heard from: then it is lost with this host."""
QUIET_SECONDS = 1.0
"""Seconds without an answer after which nobody relies on an agent, which need not be lost."""
PARKED_SECONDS = 2.1
"""Seconds without confirmation that a leader hears from it after which an agent parks.

It parks before it can be declared lost.
"""
_REFUSED_SECONDS = 0.25
"""Seconds for which nobody accepts connections at an agent's address, after which it is declared lost."""
_ELECTION_SECONDS = 1.0
"""Seconds of a leader's silence that an election proves, at least (see ``ElectionTimes``)."""


class AgentSilence:
    """The times at which each agent was last heard from."""

    def __init__(self) -> None:
        self._answered: dict[str, float] = {}
        self._refused: dict[str, float] = {}
        self._speakers: set[str] = set()
        self._present: set[str] = set()
        """Agents heard from since this agent leads."""

    def has_responded(self, node: str) -> bool:
        """Return whether ``node`` was ever heard from."""
        return node in self._speakers

    def heard(self, node: str, now: float) -> None:
        """Record that ``node`` was heard from."""
        self._answered[node] = now
        self._speakers.add(node)
        self._present.add(node)
        self._refused.pop(node, None)

    def connects(self, node: str, now: float) -> None:
        """Record that a connection to ``node`` is to be made."""
        self._answered[node] = now

    def accepts(self, node: str) -> None:
        """Record that there is a connection to ``node``: earlier refusals were of another start of it."""
        self._refused.pop(node, None)

    def refused(self, node: str, now: float) -> None:
        """Record that nobody accepts connections at the address of ``node``."""
        self._refused.setdefault(node, now)

    def is_gone(self, node: str) -> bool:
        """Decide whether nobody accepts connections at the address of ``node``."""
        return node in self._refused

    def forget(self, node: str) -> None:
        """Forget ``node``, which is no longer in the group."""
        self._answered.pop(node, None)
        self._speakers.discard(node)
        self._present.discard(node)
        self._refused.pop(node, None)

    def begin(self, nodes: Iterable[str], now: float, *, before: str | None) -> None:
        """Count from now on, as the leader after ``before``, which has already been silent for an election."""
        self._present.clear()
        heard = self._answered.get(before, now) if before is not None else now
        self._answered = dict.fromkeys(nodes, now)
        if before in self._answered:
            self._answered[before] = max(heard, now - _ELECTION_SECONDS)

    def is_quiet(self, node: str, now: float) -> bool:
        """Decide whether ``node`` has been silent recently, or since this agent leads."""
        return node not in self._present or now - self._answered.get(node, now) > QUIET_SECONDS

    def lost(self, state: GroupState, holders: frozenset[str], now: float, *, own: str = "") -> list[tuple[str, str]]:
        """Return the nodes of ``state`` that are declared lost, each with the reason.

        ``holders`` are the hosts that have the committed state; ``own`` is the node of this agent.
        """
        heard = {node.name for node in state.nodes if node.node == own or not self.is_quiet(node.node, now)}
        found = []
        for node in state.nodes:
            is_last = node.name in holders and not holders & heard
            patience = LAST_HOLDER_SECONDS if is_last else SILENT_SECONDS
            if now - self._refused.get(node.node, now) > _REFUSED_SECONDS:
                found.append((node.node, "its agent is gone"))
            elif now - self._answered.get(node.node, now) > patience:
                found.append((node.node, f"its agent did not answer for {patience:g} s"))
        return found
