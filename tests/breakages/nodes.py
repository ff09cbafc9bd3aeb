"""Mistakes in training on several nodes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from asyncpar.collectives.communicator import Communicator
from asyncpar.gradsync import GradientSynchronizer, HostGroups, SyncStep
from asyncpar.gradsync.plan import HasGradient
from asyncpar.multinode import MultiNodeConfig
from asyncpar.multinode.gradient_buffer import GradientIntake, GradientSyncBuffer
from asyncpar.nn.optimizers import SGD, Optimizer, clip_factor
from tests.breakages.breakage import Breakage, Mistake, impatient, on_virtual_time
from tests.breakages.partitions import broadcast_into_a_copy, let_the_world_be_every_group
from tests.multinode.worlds import RATE, Member, Model, members, on_all

NODES, DEVICES, MICRO_STEPS = 2, 2, 3
RULE = SGD(momentum=0.5)
CLIP = 1.0

# -- checks -----------------------------------------------------------------------------------------------------------


@cache
def nodes_train_as_one_process(clip_norm: float | None = None) -> Callable[[], None]:
    """Return the check that a step on all ranks moves parameters as it does in one process."""

    async def main() -> None:
        alone = _train_alone(clip_norm)
        async with members(NODES, DEVICES, rule=RULE, wrap=impatient) as ranks:
            await on_all(ranks, lambda member: _train(member, clip_norm))
            for member in ranks:
                for name, expected in alone.items():
                    got = member.model.values()[name]
                    np.testing.assert_allclose(got, expected, rtol=1e-12, err_msg=f"rank {member.rank} {name}")

    return on_virtual_time(main)


def _train_alone(clip_norm: float | None) -> dict[str, np.ndarray]:
    model = Model()
    optimizer = Optimizer(model.parameters, RULE)
    batches = [(0, rank, micro) for rank in range(NODES * DEVICES) for micro in range(MICRO_STEPS)]
    for batch in batches:
        model.backward(*batch)
    optimizer.scale(1.0 / len(batches))
    if clip_norm is not None:
        optimizer.scale(clip_factor(math.sqrt(optimizer.squared_norm()), clip_norm))
    optimizer.step(RATE)
    return model.values()


async def _train(member: Member, clip_norm: float | None) -> None:
    trainer, model = member.trainer, member.model
    for micro in range(MICRO_STEPS):
        model.backward(0, member.rank, micro)
        trainer.update_gradients()
    await trainer.synchronize_gradients()
    await trainer.apply_gradients(MICRO_STEPS)
    await trainer.optimizer_step(RATE, clip_norm=clip_norm)


# -- mistakes ---------------------------------------------------------------------------------------------------------


def synchronize(change: Callable[[list[HasGradient]], list[HasGradient]]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return the mistake of synchronizing what ``change`` makes of the gradients."""

    def switch_on(patch: pytest.MonkeyPatch) -> None:
        right = GradientSynchronizer.step

        def wrong(
            self: GradientSynchronizer, parameters: Iterable[HasGradient]
        ) -> AbstractAsyncContextManager[SyncStep]:
            return right(self, change(list(parameters)))

        patch.setattr(GradientSynchronizer, "step", wrong)

    return switch_on


def copies_of(gradients: list[HasGradient]) -> list[HasGradient]:
    return [SimpleNamespace(name=gradient.name, grad=gradient.grad.copy()) for gradient in gradients]


def clipped(gradients: list[HasGradient]) -> list[HasGradient]:
    norm = math.sqrt(sum(float(np.sum(gradient.grad**2)) for gradient in gradients)) / MICRO_STEPS
    for gradient in gradients:
        gradient.grad[...] *= clip_factor(norm, CLIP)
    return gradients


def take_sums_so_far(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: GradientIntake, name: str) -> None:
        self.buffer.add_gradient(name, self._by_name[name].grad)  # which stays where it is

    patch.setattr(GradientIntake, "_take", wrong)


def divide_by_micro_steps(times: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Return the mistake of dividing another number of ``times`` than once."""

    def switch_on(patch: pytest.MonkeyPatch) -> None:
        right = GradientSyncBuffer._divide  # noqa: SLF001  # a deliberate mistake inside the buffer: its division is replaced by another number of them

        def wrong(self: GradientSyncBuffer, micro_steps: int | None) -> None:
            for _ in range(times):
                right(self, micro_steps)

        patch.setattr(GradientSyncBuffer, "_divide", wrong)

    return switch_on


def leaders_are_the_world(patch: pytest.MonkeyPatch) -> None:
    """Only leaders call what is between nodes, but over a group of all ranks."""
    right = HostGroups.of

    def wrong(communicator: Communicator, hosts: Iterable[Sequence[int]]) -> HostGroups:
        groups = right(communicator, list(hosts))
        everyone = communicator.subgroup(range(communicator.size), key="broken")
        return groups if groups.between is None else dataclasses.replace(groups, between=everyone)

    patch.setattr(HostGroups, "of", wrong)


def configure_every_rank_as_rank_0(patch: pytest.MonkeyPatch) -> None:
    right = MultiNodeConfig.of_rank
    patch.setattr(
        MultiNodeConfig, "of_rank", lambda nodes, devices, rank, **settings: right(nodes, devices, 0, **settings)
    )


# -- cases ------------------------------------------------------------------------------------------------------------


def _case(
    mistake: Mistake,
    switch_on: Callable[[pytest.MonkeyPatch], None],
    *,
    shows: str = r"rank \d \w+",
    clip_norm: float | None = None,
    where: str = "multinode",
) -> Breakage:
    check = nodes_train_as_one_process(clip_norm)
    return Breakage(mistake=mistake, where=where, switch_on=switch_on, check=check, shows=shows)


CASES = (
    _case(Mistake.UNSYNCHRONIZED_APPLIED, synchronize(copies_of)),
    _case(Mistake.CUMULATIVE_BUFFER, take_sums_so_far),
    _case(Mistake.LEFT_OUT, synchronize(lambda gradients: gradients[:-1]), shows=r"rank \d scale"),
    _case(Mistake.CLIPPED_TOO_EARLY, synchronize(clipped), clip_norm=CLIP),
    _case(Mistake.MEAN_FORGOTTEN, divide_by_micro_steps(0)),
    _case(Mistake.MEAN_TWICE, divide_by_micro_steps(2)),
    _case(Mistake.DROPPED_RESULT, broadcast_into_a_copy),
    _case(Mistake.LEADERS_CALL_WORLD, leaders_are_the_world, shows=r"waited 5\.0 s for rank [13]"),
    _case(Mistake.SUBGROUP_IS_WORLD, let_the_world_be_every_group),
    _case(Mistake.RANK_IS_ZERO, configure_every_rank_as_rank_0, shows="global_rank: expected 1"),
)
