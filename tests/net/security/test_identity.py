"""Names of parties, in both forms, and back."""

from __future__ import annotations

import pytest

from asyncpar.errors import UsageError
from asyncpar.net.security.certificates import certificate_file, role_of
from asyncpar.net.security.identity import (
    ANY_AGENT,
    ANY_RANK,
    COORDINATOR,
    PeerIdentity,
    Role,
    add_role,
    agent_role,
    check_job_name,
    parse_label,
    rank_role,
    role_in,
)

ROLES = [rank_role(0), rank_role(12), agent_role(3), COORDINATOR]


@pytest.mark.parametrize("role", ROLES)
def test_an_identity_survives_its_uri_and_a_role_its_label(role: Role) -> None:
    identity = PeerIdentity("demo-1", role)
    assert PeerIdentity.parse(identity.uri) == identity
    assert parse_label(role.label) == role
    assert role_of(certificate_file(role)) == role


def test_the_names_are_those_that_other_tools_can_check() -> None:
    assert PeerIdentity("demo", rank_role(3)).uri == "asyncpar://demo/rank/3"
    assert PeerIdentity("demo", rank_role(3)).dns_name == "rank-3.demo.asyncpar"
    assert PeerIdentity("demo", COORDINATOR).uri == "asyncpar://demo/coordinator"
    assert PeerIdentity("demo", COORDINATOR).dns_name == "coordinator.demo.asyncpar"
    assert str(PeerIdentity("demo", agent_role(1))) == "the agent of host 1 of job 'demo'"


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "https://demo/rank/3",
        "asyncpar://demo",
        "asyncpar://demo/rank",
        "asyncpar://demo/rank/",
        "asyncpar://demo/rank/-1",
        "asyncpar://demo/rank/03",
        "asyncpar://demo/rank/3/4",
        "asyncpar://demo/rank/3\n",
        "asyncpar://demo/coordinator/0",
        "asyncpar://demo/king/3",
        "asyncpar://a/b/rank/3",
        "asyncpar://demo/rank/9999999999",
    ],
)
def test_other_uris_are_nobodys(uri: str) -> None:
    assert PeerIdentity.parse(uri) is None


@pytest.mark.parametrize("label", ["", "rank", "rank-", "rank-x", "rank--1", "coordinator-0", "king-1", "ca"])
def test_other_labels_are_nobodys(label: str) -> None:
    assert parse_label(label) is None


@pytest.mark.parametrize("name", ["", "-a", "a-", "A", "a b", "a.b", "a/b", "ä", "x" * 64])
def test_a_job_name_that_no_dns_name_can_hold_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="--job: expected up to 63 lower-case letters, digits and dashes"):
        check_job_name(name)


@pytest.mark.parametrize("name", ["a", "job-1", "0", "x" * 63])
def test_other_job_names_are_fine(name: str) -> None:
    assert check_job_name(name) == name


@pytest.mark.parametrize("name", ["h#0a1b", "host-1/0/0a1b", "a@b"])
@pytest.mark.parametrize("role", ROLES)
def test_a_name_with_a_role_shows_it_and_one_without_shows_none(name: str, role: Role) -> None:
    assert role_in(add_role(name, role)) == role
    assert add_role(name, role).startswith(name)
    assert add_role(name, None) == name
    assert role_in(name) is None


@pytest.mark.parametrize("name", ["", "rank-1", "h#1@", "h#1@rank", "h#1@rank-01", "h#1@rank--1", "h#1@king-1"])
def test_other_names_have_no_role(name: str) -> None:
    assert role_in(name) is None


def test_any_agent_and_any_rank_stand_for_each_of_their_kind_and_for_no_other() -> None:
    assert ANY_AGENT.includes(agent_role(3))
    assert ANY_RANK.includes(rank_role(0))
    assert not ANY_AGENT.includes(rank_role(3))
    assert not ANY_RANK.includes(COORDINATOR)
    assert rank_role(0).includes(rank_role(0))
    assert not rank_role(0).includes(rank_role(1))
    assert not rank_role(0).includes(ANY_RANK), "no certificate is of any rank"
    assert PeerIdentity("demo", ANY_AGENT).dns_name == "agent.demo.asyncpar"
    assert PeerIdentity.parse(PeerIdentity("demo", ANY_AGENT).uri) is None
    assert (str(ANY_AGENT), str(ANY_RANK)) == ("an agent", "a rank")
