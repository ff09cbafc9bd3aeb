"""The harness itself: an error on a rank becomes a failure with its reason, in time."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from tests.torch.worlds import on_ranks, open_world

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]


@on_ranks(2)
def test_bodies_run_on_ranks() -> None:
    x = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    torch.testing.assert_close(x, torch.full((3,), 3.0))


@on_ranks(2)
@pytest.mark.parametrize("value", [1, 2])
def test_parameters_reach_ranks(value: int) -> None:
    x = torch.tensor(value)
    dist.all_reduce(x)
    assert x.item() == 2 * value


def test_trouble_on_ranks_is_reported() -> None:
    with open_world(2, joins=False) as world:
        fine, raised = world.outcomes(raise_on_1)
        assert fine.value == 0
        assert raised.error is not None
        assert "ValueError: rank 1 has enough" in raised.error
        lost = world.outcomes(lose_an_error)
        assert all("lost in thread" in str(outcome.error) for outcome in lost)
        assert [outcome.value for outcome in world.outcomes(who_am_i)] == [0, 1]
        raised, hung = world.outcomes(raise_while_other_waits, limit=30)
        assert "ValueError" in str(raised.error)
        assert hung.is_hung
        assert "raise_while_other_waits" in hung.log


def test_death_of_ranks_is_reported() -> None:
    with open_world(2, joins=False) as world:
        world.is_broken = True
        ended, fine = world.outcomes(kill_0)
        assert ended.status == -signal.SIGKILL
        assert fine.value == 1


def who_am_i() -> int:
    from tests.torch.ranks import place

    return place().rank


def raise_on_1() -> int:
    if who_am_i() == 1:
        raise ValueError("rank 1 has enough")
    return 0


def lose_an_error() -> None:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()


def raise_while_other_waits() -> None:
    if who_am_i() == 0:
        raise ValueError("0")
    threading.Event().wait()


def kill_0() -> int:
    if who_am_i() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return who_am_i()
