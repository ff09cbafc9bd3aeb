"""The barrier that names who does not come."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from asyncpar.errors import PeerTimeout
from tests.torch.worlds import on_ranks

SHORT = timedelta(seconds=0.2)


@on_ranks(2)
def test_ranks_that_all_come_pass_again_and_again() -> None:
    for _ in range(3):
        dist.distributed_c10d._get_default_group().monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)


@on_ranks(3)
def test_those_who_come_are_told_who_does_not_and_the_group_stays_usable() -> None:
    if dist.get_rank() < 2:
        with pytest.raises(PeerTimeout, match="Rank 2 failed to pass monitoredBarrier"):
            dist.distributed_c10d._get_default_group().monitored_barrier(SHORT)
    x = torch.ones(2)
    dist.all_reduce(x)
    torch.testing.assert_close(x, torch.full((2,), 3.0))


@on_ranks(3)
def test_all_who_are_missing_are_named_on_demand() -> None:
    if dist.get_rank() == 0:
        with pytest.raises(PeerTimeout, match="Ranks 1, 2 failed to pass monitoredBarrier") as caught:
            dist.distributed_c10d._get_default_group().monitored_barrier(SHORT, wait_all_ranks=True)
        torch.testing.assert_close(caught.value.rank, 1)
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_is_late_to_one_has_not_come_to_the_next() -> None:
    group = dist.distributed_c10d._get_default_group()
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
