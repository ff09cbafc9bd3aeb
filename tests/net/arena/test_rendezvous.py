"""The ranks of a host meet at an address."""

from __future__ import annotations

from dataclasses import replace

import pytest

from asyncpar.core.config.world import Member, World
from asyncpar.net.arena.formation_machine import Rendezvous

SECRET = b"s" * 32


def world(*hosts: str, job: str = "job", generation: int = 1) -> World:
    members = tuple(Member(rank=rank, host="h", host_id=host) for rank, host in enumerate(hosts))
    return World(members=members, job=job, generation=generation)


def test_the_ranks_of_one_host_meet_and_the_lowest_convenes() -> None:
    apart = world("a", "b", "a", "b", "b")
    assert Rendezvous.of(apart, 4, secret=SECRET).ranks == (1, 3, 4)
    assert Rendezvous.of(apart, 4, secret=SECRET).leader == 1
    assert Rendezvous.of(apart, 1, secret=SECRET) == Rendezvous.of(apart, 3, secret=SECRET)


def test_no_two_meetings_share_an_address() -> None:
    rendezvous = Rendezvous.of(world("a", "a"), 0, secret=SECRET)
    others = [
        Rendezvous.of(world("a", "a"), 0, secret=b"t" * 32),
        Rendezvous.of(world("a", "a", job="other"), 0, secret=SECRET),
        Rendezvous.of(world("a", "a", generation=2), 0, secret=SECRET),
        Rendezvous.of(world("b", "b"), 0, secret=SECRET),
    ]
    assert len({one.address for one in [rendezvous, *others]}) == 5
    assert rendezvous.address == Rendezvous.of(world("a", "a"), 1, secret=SECRET).address


def test_an_address_is_abstract_and_fits_and_reveals_nothing() -> None:
    address = Rendezvous.of(world("a", "a"), 0, secret=SECRET).address
    assert address.startswith(b"\0asyncpar-")
    assert len(address) <= 108
    assert SECRET not in address


def test_each_dialer_has_terms_of_its_own_that_the_convener_finds() -> None:
    rendezvous = Rendezvous.of(world("a", "a", "a"), 0, secret=SECRET)
    assert rendezvous.terms(1) != rendezvous.terms(2)
    assert rendezvous.find_terms(rendezvous.terms(2).token) == rendezvous.terms(2)
    assert rendezvous.find_terms(rendezvous.terms(0).token) is None
    assert rendezvous.find_terms(bytes(16)) is None


@pytest.mark.parametrize("change", [{"secret": b"t" * 32}, {"generation": 2}, {"host_id": "b"}])
def test_terms_of_another_rendezvous_are_not_found(change: dict[str, object]) -> None:
    rendezvous = Rendezvous.of(world("a", "a"), 0, secret=SECRET)
    other = replace(rendezvous, **change)  # type: ignore[arg-type]
    assert rendezvous.find_terms(other.terms(1).token) is None


def test_the_secret_is_not_shown() -> None:
    assert "ssss" not in repr(Rendezvous.of(world("a", "a"), 0, secret=SECRET))
