"""The kinds of lanes by name."""

from __future__ import annotations

import pytest

from asyncpar.core.config.transport import TRANSPORTS
from asyncpar.errors import UsageError
from asyncpar.net.transport.lane_kinds import LANES, parse_transport, usable_lanes


def test_the_lanes_that_come_with_asyncpar_are_registered_and_the_quickest_is_the_best() -> None:
    assert LANES.names == usable_lanes(None) == TRANSPORTS


@pytest.mark.parametrize("name", TRANSPORTS)
def test_known_transports_are_taken_as_they_are(name: str) -> None:
    assert parse_transport(name) == name


@pytest.mark.parametrize("name", [None, ""])
def test_no_transport_means_the_best(name: str | None) -> None:
    assert parse_transport(name) is None


def test_an_unknown_transport_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"transport: expected one of shm, tcp, grpc, got 'inproc'"):
        parse_transport("inproc")
