from __future__ import annotations

import pytest

from asyncpar.config.transport import IN_PROCESS_TRANSPORTS, TRANSPORTS, parse_transport
from asyncpar.errors import UsageError


@pytest.mark.parametrize("name", TRANSPORTS)
def test_known_transports_are_taken_as_they_are(name: str) -> None:
    assert parse_transport(name) == name


@pytest.mark.parametrize("name", [None, ""])
def test_no_transport_means_the_best(name: str | None) -> None:
    assert parse_transport(name) is None


def test_an_unknown_transport_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"transport: expected one of shm, tcp, grpc, got 'inproc'"):
        parse_transport("inproc")
    assert parse_transport("inproc", known=IN_PROCESS_TRANSPORTS) == "inproc"
