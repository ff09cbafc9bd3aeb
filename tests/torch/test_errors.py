"""Errors that are asyncpar's and torch's."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from asyncpar.errors import PeerLost, PeerTimeout
from asyncpar.torch.errors import as_torch


def test_an_error_can_be_caught_as_ours_and_as_torchs() -> None:
    lost = PeerLost("rank 1 is gone", rank=1, operation="all_reduce")

    for kind in (PeerLost, dist.DistBackendError, RuntimeError):
        with pytest.raises(kind, match="rank 1 is gone") as caught:
            raise as_torch(lost)
        assert caught.value.__cause__ is lost
        assert isinstance(caught.value, PeerLost)
        assert (caught.value.rank, caught.value.operation) == (1, "all_reduce")


def test_the_message_of_a_timeout_says_that_it_is_one_once() -> None:
    once = as_torch(PeerTimeout("barrier waited 1.0 s for rank 1", rank=1))

    assert str(once) == "barrier waited 1.0 s for rank 1; the timeout is over"
    assert as_torch(once) is once
    assert str(as_torch(PeerTimeout("not over within its timeout of 1 s"))) == "not over within its timeout of 1 s"


def test_other_errors_stay_as_they_are() -> None:
    error = KeyError("x")

    assert as_torch(error) is error
