"""Errors say who must act."""

import traceback

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


def test_remote_errors_are_short_and_their_traceback_is_a_note() -> None:
    error = errors.RemoteError("no", rank=3, type_name="KeyError", remote_traceback="line 1\nline 2\n")
    assert str(error) == "rank 3: KeyError: no"
    assert error.__notes__ == ["  | line 1\n  | line 2"]
    assert "".join(traceback.format_exception_only(error)).endswith("KeyError: no\n  | line 1\n  | line 2\n")


def test_remote_errors_without_a_traceback_have_no_note() -> None:
    error = errors.RemoteError("no", rank=3, type_name="KeyError", remote_traceback="")
    assert not hasattr(error, "__notes__")
