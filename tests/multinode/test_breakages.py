"""Tests of the tests: each mistake that must not come back, switched on, is noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync import HostGroups, layout_cache
from asyncpar.gradsync.schemes import Scheme
from asyncpar.multinode import GradientSyncBuffer, registration
from asyncpar.multinode.gradient_buffer import GradientIntake
from asyncpar.multinode.node_sum import NodeSum
from asyncpar.testing.loop import run_virtual
from asyncpar.zero import ZeROStage
from tests.multinode.worlds import members, on_all, train_alone

Break = Callable[[pytest.MonkeyPatch], None]


async def check(stage: ZeROStage) -> None:
    """What test_trainer asks for."""
    async with members(2, 2, stage=stage) as ranks:
        await on_all(ranks, lambda member: member.train(2, micro_steps=3))
        expected = train_alone(4, steps=2, micro_steps=3).values()
        for member in ranks:
            for name, value in member.model.values().items():
                np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-12)


def leaders_call_a_world_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    make = HostGroups.of

    def broken(world: Communicator, nodes: Sequence[Sequence[int]]) -> HostGroups:
        groups = make(world, nodes)
        leaders = None if groups.between is None else world
        return HostGroups(world=world, inside=groups.inside, between=leaders, hosts=groups.hosts)

    monkeypatch.setattr(HostGroups, "of", broken)


def sub_groups_are_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    make = HostGroups.of

    def broken(world: Communicator, nodes: Sequence[Sequence[int]]) -> HostGroups:
        groups = make(world, nodes)
        return HostGroups(world=world, inside=world, between=groups.between, hosts=groups.hosts)

    monkeypatch.setattr(HostGroups, "of", broken)


def the_mean_over_ranks_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheme, "factor", lambda self, contributors: 1.0)
    monkeypatch.setattr(NodeSum, "settle", lambda self: None)


def the_mean_over_ranks_is_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    factor, settle = Scheme.factor, NodeSum.settle
    monkeypatch.setattr(Scheme, "factor", lambda self, contributors: factor(self, contributors) / contributors)

    def broken(self: NodeSum) -> None:
        settle(self)
        settle(self)

    monkeypatch.setattr(NodeSum, "settle", broken)


def the_result_of_the_reduction_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that every rank applies gradients of its own, too."""
    monkeypatch.setattr(layout_cache, "unpack", lambda *arguments, **settings: None)


def the_values_of_rank_0_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*arguments: Any, **settings: Any) -> None:
        pass

    monkeypatch.setattr(registration, "_broadcast", broken)


def the_mean_over_micro_steps_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GradientSyncBuffer, "_divide", lambda self, micro_steps: None)


def the_mean_over_micro_steps_is_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    divide = GradientSyncBuffer._divide  # noqa: SLF001  # a deliberate mistake inside the buffer: its division is replaced by one too many

    def broken(self: GradientSyncBuffer, micro_steps: int | None) -> None:
        divide(self, micro_steps)
        divide(self, micro_steps)

    monkeypatch.setattr(GradientSyncBuffer, "_divide", broken)


def buffers_that_add_up_are_fed_in_every_micro_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that k equal gradients weigh k (k + 1) / 2."""

    def broken(self: GradientIntake, name: str) -> None:
        self.buffer.add_gradient(name, self._by_name[name].grad)

    monkeypatch.setattr(GradientIntake, "_take", broken)


NONE, STAGE2 = ZeROStage.NONE, ZeROStage.STAGE2

BREAKAGES: list[tuple[Break, ZeROStage, type[BaseException]]] = [
    (leaders_call_a_world_collective, NONE, TimeoutError),
    (leaders_call_a_world_collective, STAGE2, TimeoutError),
    (sub_groups_are_the_world, NONE, AssertionError),
    (the_mean_over_ranks_is_forgotten, NONE, AssertionError),
    (the_mean_over_ranks_is_forgotten, STAGE2, AssertionError),
    (the_mean_over_ranks_is_taken_twice, NONE, AssertionError),
    (the_mean_over_ranks_is_taken_twice, STAGE2, AssertionError),
    (the_result_of_the_reduction_is_dropped, NONE, AssertionError),
    (the_values_of_rank_0_are_dropped, NONE, AssertionError),
    (the_values_of_rank_0_are_dropped, STAGE2, ExceptionGroup),
    (the_mean_over_micro_steps_is_forgotten, NONE, AssertionError),
    (the_mean_over_micro_steps_is_taken_twice, NONE, AssertionError),
    (buffers_that_add_up_are_fed_in_every_micro_step, NONE, AssertionError),
    (buffers_that_add_up_are_fed_in_every_micro_step, STAGE2, AssertionError),
]


@pytest.mark.parametrize(
    ("breaks", "stage", "noticed"), BREAKAGES, ids=[f"{breaks.__name__}-{stage}" for breaks, stage, _ in BREAKAGES]
)
def test_a_mistake_is_noticed(
    breaks: Break, stage: ZeROStage, noticed: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks(monkeypatch)
    with pytest.raises(noticed):
        run_virtual(check(stage))


@pytest.mark.parametrize("stage", [NONE, STAGE2])
def test_nothing_is_noticed_where_nothing_is_broken(stage: ZeROStage) -> None:
    run_virtual(check(stage))
