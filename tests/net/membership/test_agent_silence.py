"""Agents that a leader holds for lost, and those that have time yet."""

from __future__ import annotations

from asyncpar.net.membership.agent_silence import PARKED_SECONDS, SILENT_ALONE_SECONDS, SILENT_SECONDS, AgentSilence
from asyncpar.net.membership.group_state import GroupNode, GroupState
from asyncpar.net.membership.lineage import Decision, Lineage
from asyncpar.net.membership.world_messages import PlacedMember, WorldAnnounced, WorldChange


def state(*members: str) -> GroupState:
    nodes = tuple(GroupNode(node=f"{name}#1", name=name, address=f"{name}:1") for name in "abc")
    world = WorldAnnounced(
        generation=0,
        members=tuple(PlacedMember(name=f"{host}/0/x", host=host) for host in members),
        lineage=Lineage(0, b""),
        decision=Decision.ABORT,
        change=WorldChange(generation=0),
    )
    return GroupState(nodes=nodes, world=world)


def leading(*, before: str | None = None) -> AgentSilence:
    silence = AgentSilence()
    silence.begin(("b#1", "c#1"), 100.0, before=before)
    return silence


def test_who_does_not_answer_is_lost_after_a_while_and_who_refuses_soon() -> None:
    silence = leading()
    assert silence.lost(state("a", "b", "c"), 100.0 + SILENT_SECONDS) == []
    silence.heard("c#1", 102.0)
    assert [node for node, _ in silence.lost(state("a", "b", "c"), 102.6)] == ["b#1"]
    silence.refused("c#1", 102.6)
    assert ("c#1", "its agent is gone") in silence.lost(state("a", "b", "c"), 102.9)
    silence.heard("c#1", 102.95)
    assert [node for node, _ in silence.lost(state("a", "b", "c"), 103.2)] == ["b#1"]


def test_hosts_with_a_world_of_their_own_have_time_to_park() -> None:
    assert PARKED_SECONDS < SILENT_SECONDS < SILENT_ALONE_SECONDS
    silence = leading()
    assert silence.lost(state("b", "c"), 100.0 + SILENT_ALONE_SECONDS) == []
    assert len(silence.lost(state("b", "c"), 100.1 + SILENT_ALONE_SECONDS)) == 2
    silence.heard("c#1", 102.0)
    assert [node for node, _ in silence.lost(state("b", "c"), 102.6)] == ["b#1"]


def test_the_leader_before_has_been_silent_for_an_election() -> None:
    silence = AgentSilence()
    silence.heard("b#1", 97.0)
    silence.begin(("b#1", "c#1"), 100.0, before="b#1")
    assert [node for node, _ in silence.lost(state("a", "b", "c"), 101.6)] == ["b#1"]
    assert silence.lost(state("a", "b", "c"), 101.4) == []


def test_an_agent_that_accepts_a_connection_is_there_although_it_refused_one_before() -> None:
    silence = leading()
    silence.refused("c#1", 100.1)
    silence.accepts("c#1")
    assert silence.lost(state("a", "b", "c"), 101.0) == []
