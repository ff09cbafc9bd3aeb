"""Errors say who must act."""

import pytest

from asyncpar import errors


def test_usage_errors_are_value_errors() -> None:
    assert issubclass(errors.UsageError, ValueError)


def test_peer_timeouts_are_timeout_errors() -> None:
    assert issubclass(errors.PeerTimeout, TimeoutError)


@pytest.mark.parametrize("kind", [errors.PeerLost, errors.PeerTimeout, errors.PeerCancelled])
def test_peer_errors_carry_the_culprit(kind: type[errors.PeerError]) -> None:
    error = kind("rank 2 is lost", rank=2, host="b", operation="all_reduce #3", cause="reset")
    assert (error.rank, error.host, error.operation, error.cause) == (2, "b", "all_reduce #3", "reset")


def test_remote_errors_quote_the_remote_traceback() -> None:
    error = errors.RemoteError("no", rank=3, type_name="KeyError", remote_traceback="line 1\nline 2\n")
    assert str(error) == "rank 3: KeyError: no\n  | line 1\n  | line 2"
