"""The barrier that names who does not come."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncpar.blocking import Cancelled
from asyncpar.errors import PeerTimeout, UsageError
from tests.torch.pendings import Pendings
from tests.torch.worlds import on_ranks

SHORT = timedelta(seconds=0.5)
"""Enough for ranks that come at once, even on a machine that has other things to do."""


@on_ranks(2)
def test_ranks_that_all_come_pass_again_and_again() -> None:
    group: Any = dist.group.WORLD
    for _ in range(3):
        group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)


@on_ranks(4)
@pytest.mark.parametrize("wait_all_ranks", [True, False])
def test_those_who_come_are_told_who_does_not_and_the_group_stays_usable(wait_all_ranks: bool) -> None:
    group = dist.new_group()
    dist.barrier(group)  # so that those who come do so at once
    if dist.get_rank() < 2:
        names = "Ranks 2, 3" if wait_all_ranks else "Rank 2"
        message = rf"Rank 0 timed out .*: {names} failed to pass monitoredBarrier"
        with pytest.raises(PeerTimeout, match=message) as raised:
            group.monitored_barrier(SHORT, wait_all_ranks)
        assert raised.value.rank == (2 if dist.get_rank() == 0 else None)
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    torch.testing.assert_close(x, torch.full((2,), 4.0))


@on_ranks(2)
def test_a_rank_that_is_late_to_one_has_not_come_to_the_next() -> None:
    group: Any = dist.group.WORLD
    if dist.get_rank() == 0:
        with pytest.raises(PeerTimeout, match="Rank 1"):
            group.monitored_barrier(SHORT)
        dist.barrier()
        dist.barrier()
        with pytest.raises(PeerTimeout, match="Rank 1"):
            group.monitored_barrier(SHORT)
    else:
        dist.barrier()
        with pytest.raises(PeerTimeout):
            group.monitored_barrier(SHORT)  # too late: nobody answers
        dist.barrier()
        group.barriers += 1  # it has missed one
    dist.barrier()
    group.monitored_barrier(timedelta(seconds=20))


@on_ranks(2)
def test_the_end_of_a_group_ends_its_barriers() -> None:
    group = dist.new_group()
    if dist.get_rank() == 0:
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                group.monitored_barrier(timedelta(seconds=30))
            except Cancelled as error:
                raised.append(error)

        pendings = group._pending = Pendings(1)  # noqa: SLF001  # tells when operations are under way; the group makes this set itself
        thread = threading.Thread(target=wait)
        thread.start()
        assert pendings.is_full.wait(20)
        group.abort()
        thread.join(20)
        assert [str(error) for error in raised] == ["monitored_barrier was cancelled"]
        with pytest.raises(UsageError, match="monitored_barrier: this process group was destroyed"):
            group.monitored_barrier(SHORT)
    dist.barrier()
