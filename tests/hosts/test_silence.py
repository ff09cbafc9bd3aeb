"""Agents that a leader declares lost, and those that have time yet."""

from __future__ import annotations

from asyncpar.hosts.group import (
    LAST_HOLDER_SECONDS,
    PARKED_SECONDS,
    QUIET_SECONDS,
    SILENT_SECONDS,
    AgentSilence,
    GroupNode,
    GroupState,
)

STATE = GroupState(nodes=tuple(GroupNode(node=f"{name}#1", name=name, address=f"{name}:1") for name in "abc"))
ALL = frozenset("abc")


def lost(silence: AgentSilence, now: float, holders: frozenset[str] = ALL) -> list[str]:
    """Return who is lost, as ``a`` sees it."""
    return [node for node, _ in silence.lost(STATE, holders, now, own="a#1")]


def leading(*, before: str | None = None) -> AgentSilence:
    silence = AgentSilence()
    silence.begin(("b#1", "c#1"), 100.0, before=before)
    return silence


def test_who_does_not_answer_is_lost_after_a_while_and_who_refuses_soon() -> None:
    silence = leading()
    assert lost(silence, 100.0 + SILENT_SECONDS) == []
    silence.heard("c#1", 102.0)
    assert lost(silence, 102.6) == ["b#1"]
    silence.refused("c#1", 102.6)
    assert ("c#1", "its agent is gone") in silence.lost(STATE, ALL, 102.9, own="a#1")
    silence.heard("c#1", 102.95)
    assert lost(silence, 103.2) == ["b#1"]


def test_the_last_hosts_that_have_the_state_are_waited_for() -> None:
    assert QUIET_SECONDS < PARKED_SECONDS < SILENT_SECONDS < LAST_HOLDER_SECONDS
    silence, holders = leading(), frozenset("bc")
    assert lost(silence, 100.0 + LAST_HOLDER_SECONDS, holders) == []
    assert lost(silence, 100.1 + LAST_HOLDER_SECONDS, holders) == ["b#1", "c#1"]
    silence.heard("c#1", 104.0)
    assert lost(silence, 104.1, holders) == ["b#1"], "another one that has it is heard again"
    assert lost(silence, 105.1, holders) == [], "and is quiet"
    assert lost(silence, 106.6, frozenset("b")) == ["c#1"], "who has no state is lost as ever"


def test_who_was_not_heard_since_the_leader_leads_is_not_counted_on() -> None:
    silence = AgentSilence()
    silence.heard("b#1", 99.9)
    silence.begin(("b#1", "c#1"), 100.0, before=None)
    assert silence.is_quiet("b#1", 100.1)
    silence.heard("b#1", 100.2)
    assert not silence.is_quiet("b#1", 100.2 + QUIET_SECONDS)
    assert silence.is_quiet("b#1", 100.3 + QUIET_SECONDS)


def test_the_leader_before_has_been_silent_for_an_election() -> None:
    silence = AgentSilence()
    silence.heard("b#1", 97.0)
    silence.begin(("b#1", "c#1"), 100.0, before="b#1")
    assert lost(silence, 101.6) == ["b#1"]
    assert lost(silence, 101.4) == []


def test_an_agent_that_accepts_a_connection_is_there_although_it_refused_one_before() -> None:
    silence = leading()
    silence.refused("c#1", 100.1)
    silence.accepts("c#1")
    assert lost(silence, 101.0) == []
