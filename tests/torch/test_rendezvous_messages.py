"""Ranks that meet through a store draw the right conclusions from messages, by value."""

from __future__ import annotations

from typing import Any

import pytest

from asyncpar.errors import PeerLost, PeerTimeout, ProtocolError, UsageError
from asyncpar.torch.rendezvous.messages import (
    Participants,
    RankHello,
    RendezvousFailure,
    RendezvousFailureKind,
    RendezvousResult,
    WorldIdentity,
    absent,
    decode,
    encode,
    error_of,
    failed,
    find_disagreement,
    find_unreachable,
    found_world,
    name_ranks,
)


def hello(rank: int, host: str = "a", **terms: str) -> RankHello:
    return RankHello(rank=rank, host=host, host_id=f"{host}-id", terms=terms)


def participants(*hosts: str) -> Participants:
    hellos = tuple(hello(rank, host) for rank, host in enumerate(hosts))
    return Participants(hellos=hellos, identity=WorldIdentity(job="job", generation=3, secret="00"))


def raised(failure: RendezvousFailure, rank: int = 0) -> Any:
    return error_of(failure, rank=rank, hosts={1: "a"})


def test_ranks_with_equal_terms_agree() -> None:
    assert find_disagreement([hello(0, size="2"), hello(1, size="2")]) is None
    assert find_disagreement([]) is None


def test_a_difference_names_the_term_both_ranks_and_both_values() -> None:
    failure = find_disagreement([hello(2, version="2"), hello(1, version="1"), hello(3, version="1")])
    assert failure is not None
    assert failure.ranks == (1, 2)
    assert str(raised(failure)) == "version: rank 1 has 1, rank 2 has 2; it must be equal on all ranks"
    assert isinstance(raised(failure), UsageError)


def test_a_term_that_one_rank_lacks_is_a_difference() -> None:
    failure = find_disagreement([hello(0), hello(1, secret="some")])
    assert failure is not None
    assert "rank 0 has none, rank 1 has some" in failure.message


def test_missing_ranks_are_named_with_the_time_they_had() -> None:
    failure = absent([2, 3], size=4, timeout=5.0, done="come")
    error = raised(failure)
    assert isinstance(error, PeerTimeout)
    assert str(error) == "rank 0: ranks 2 and 3 of 4 have not come within 5.0 s"
    assert error.rank == 2


def test_one_missing_rank_is_named_in_the_singular() -> None:
    assert str(raised(absent([1], size=2, timeout=0.5, done="come"))) == "rank 0: rank 1 of 2 has not come within 0.5 s"


def test_a_rank_that_is_too_late_is_told_so() -> None:
    error = raised(absent([2], size=3, timeout=5.0, done="come"), rank=2)
    assert str(error) == "rank 2 came too late: rank 2 of 3 has not come within 5.0 s"


def test_a_rank_that_failed_is_quoted_with_its_host() -> None:
    error = raised(failed(1, UsageError("bind: 10.0.0.1 is not ours")))
    assert isinstance(error, PeerLost)
    assert str(error) == "rank 0: no world was formed: rank 1 gave up: UsageError: bind: 10.0.0.1 is not ours"
    assert (error.rank, error.host) == (1, "a")


def test_local_ranks_follow_the_order_on_each_host() -> None:
    world = found_world(participants("a", "b", "a", "b"), ["a:1", "b:1", "a:2", "b:2"])
    assert [member.local_rank for member in world.members] == [0, 0, 1, 1]
    assert [member.address for member in world.members] == ["a:1", "b:1", "a:2", "b:2"]
    assert (world.generation, world.job) == (3, "job")
    assert world.hosts == ((0, 2), (1, 3))


def test_a_rank_on_loopback_is_out_of_reach_of_other_hosts_that_are_not() -> None:
    failure = find_unreachable(participants("a", "b"), [True, False])
    assert failure is not None
    assert failure.message.startswith("ASYNCPAR_BIND: rank 0 on a listens on its loopback, where rank 1 on b")


@pytest.mark.parametrize("are_loopback", [[True, True], [False, False]])
def test_hosts_that_all_use_loopback_or_none_reach_each_other(are_loopback: list[bool]) -> None:
    assert find_unreachable(participants("a", "b"), are_loopback) is None


def test_on_one_host_any_address_will_do() -> None:
    assert find_unreachable(participants("a", "a"), [True, False]) is None


def test_messages_survive_the_store() -> None:
    end = RendezvousResult(failure=RendezvousFailure(kind=RendezvousFailureKind.ABSENT, message="näh", ranks=(1, 2)))
    assert decode(encode(end).encode(), RendezvousResult) == end
    assert decode(encode(participants("a", "b")).encode(), Participants) == participants("a", "b")


def test_the_secret_is_not_in_the_text_of_a_participants() -> None:
    assert "secret" not in repr(participants("a"))


def test_something_else_in_the_store_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="no Participants"):
        decode(b'{"hellos": 3}', Participants)


def test_long_lists_of_ranks_are_cut() -> None:
    assert name_ranks([4]) == "rank 4"
    assert name_ranks([1, 2, 5]) == "ranks 1, 2 and 5"
    assert name_ranks(range(25)).endswith("18, 19 and 5 more")
