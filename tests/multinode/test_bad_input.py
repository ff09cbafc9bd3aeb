"""Bad input is refused on every rank, with a message that names the remedy, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncpar.core.config.slicing import TensorSlice
from asyncpar.errors import UsageError
from asyncpar.multinode import MultiNodeConfig, MultiNodeTrainer
from asyncpar.nn import Array, Parameter
from asyncpar.nn.optimizers import SGD
from asyncpar.node import Node
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.multinode.worlds import (
    RATE,
    RULE,
    Member,
    Model,
    config_of,
    members,
    node_world,
    on_all,
    on_all_failing,
    train_alone,
)


async def errors_of(
    world: tuple[int, int], config: Callable[[int], MultiNodeConfig], *, rules: Callable[[int], Any] = lambda rank: RULE
) -> list[str]:
    """Return the error of each rank when its trainer begins."""
    async with node_world(*world) as nodes:

        async def main(node: Node) -> None:
            trainer = MultiNodeTrainer(config(node.rank), rules(node.rank), communicator=node.world)
            await trainer.initialize_environment()

        errors = await on_all_failing(nodes, main)
    assert all(isinstance(error, UsageError) for error in errors), errors
    return [str(error) for error in errors]


# -- configurations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"gradient_compression": True}, "gradient_compression"),
        ({"overlap_comm_compute": False}, "overlap_comm_compute"),
        ({"gradient_bucket_size_mb": 1.0}, "gradient_bucket_size_mb"),
        ({"zero_config": ZeROConfig(stage=ZeROStage.STAGE2)}, "zero_config"),
    ],
)
async def test_ranks_with_other_settings_are_named_on_every_rank(change: dict[str, Any], difference: str) -> None:
    errors = await errors_of((2, 2), lambda rank: config_of(rank, 2, 2, **(change if rank == 3 else {})))
    for error in errors:
        assert f"where rank 0 has {difference}" in error
        assert f"rank 3 has {difference}" in error


async def test_ranks_with_another_rule_are_named_on_every_rank() -> None:
    rules = {2: SGD()}
    errors = await errors_of((2, 2), lambda rank: config_of(rank, 2, 2), rules=lambda rank: rules.get(rank, RULE))
    for error in errors:
        assert "where rank 0 has rule AdamW(" in error
        assert "rank 2 has rule SGD(" in error


async def test_nodes_that_do_not_multiply_to_the_world_are_refused_on_every_rank() -> None:
    errors = await errors_of((2, 2), lambda rank: config_of(rank, 3, 2))
    assert set(errors) == {
        "num_nodes, devices_per_node: expected 4 ranks in all, as the communicator has, got 3 * 2",
    }


async def test_ranks_that_see_the_world_another_way_are_named_on_every_rank() -> None:
    errors = await errors_of((2, 2), lambda rank: config_of(rank, 1, 4) if rank == 1 else config_of(rank, 2, 2))
    for error in errors:
        assert "where rank 0 has num_nodes 2, rank 1 has num_nodes 1" in error


async def test_ranks_that_are_all_rank_0_are_refused_on_every_rank() -> None:
    errors = await errors_of((2, 2), lambda rank: config_of(0, 2, 2))
    for error in errors:
        assert "global_rank: expected 1, the communicator's rank, got 0" in error


async def test_a_node_on_two_hosts_is_refused_on_every_rank() -> None:
    errors = await errors_of((2, 3), lambda rank: config_of(rank, 3, 2))
    assert set(errors) == {
        "devices_per_node: expected the ranks of node 1, 2, 3, on one host, but rank 2 and rank 3 are on two",
    }


async def test_a_communicator_beside_a_backend_is_refused() -> None:
    async with node_world(1, 1) as [node]:
        from asyncpar.backends import BackendConfig

        with pytest.raises(UsageError, match="communicator: expected None beside runtime or backend"):
            MultiNodeTrainer(config_of(0, 1, 1), RULE, communicator=node.world, backend=BackendConfig())


# -- parameters ------------------------------------------------------------------------------------------------------


async def registering(parameters: Callable[[int], list[Parameter]], *, size: int = 2) -> list[str]:
    """Return the error of each rank when parameters are registered."""
    async with node_world(size, 1) as nodes:

        async def main(node: Node) -> None:
            trainer = MultiNodeTrainer(config_of(node.rank, size, 1), RULE, communicator=node.world)
            await trainer.initialize_environment()
            await trainer.register_parameters(parameters(node.rank))

        errors = await on_all_failing(nodes, main)
    assert all(isinstance(error, UsageError) for error in errors), errors
    return [str(error) for error in errors]


@pytest.mark.parametrize(
    "other",
    [
        [Parameter("weight", np.ones(3)), Parameter("bias", np.ones(2))],
        [Parameter("bias", np.ones(3))],
        [Parameter("bias", np.ones(2, np.float32))],
        [Parameter("bias", np.ones(2)), Parameter("weight", np.ones(3)), Parameter("more", np.ones(3))],
    ],
    ids=["order", "shape", "dtype", "more"],
)
async def test_parameters_that_differ_are_named_on_every_rank(other: list[Parameter]) -> None:
    own = [Parameter("bias", np.ones(2)), Parameter("weight", np.ones(3))]
    for error in await registering(lambda rank: other if rank else own):
        assert "where rank 0 has" in error
        assert "rank 1 has" in error


async def test_two_parameters_of_one_name_are_refused_on_every_rank() -> None:
    twice = [Parameter("bias", np.ones(2)), Parameter("bias", np.ones(2))]
    once = [Parameter("bias", np.ones(2))]
    for error in await registering(lambda rank: twice if rank else once):
        assert "two are named 'bias'" in error


async def test_no_parameters_are_refused_on_every_rank() -> None:
    for error in await registering(lambda rank: []):
        assert "parameters: expected at least one parameter, got none" in error


async def test_slices_of_tensors_are_not_summed_over_ranks() -> None:
    part = TensorSlice.along((4, 2), 0, 0, 2)
    for error in await registering(lambda rank: [Parameter("column", np.ones((2, 2)), part=part)]):
        assert "parameter column: expected a whole tensor, got a slice of (4, 2)" in error


async def test_released_parameters_are_refused() -> None:
    def released(rank: int) -> list[Parameter]:
        parameter = Parameter("bias", np.ones(2))
        parameter.release_value()
        return [parameter]

    for error in await registering(released):
        assert "parameter bias: expected a value, got one that is released" in error


async def test_parameters_that_cannot_be_written_to_are_refused_on_every_rank() -> None:
    def frozen(rank: int) -> list[Parameter]:
        parameter = Parameter("bias", np.ones(2))
        parameter.value.flags.writeable = rank == 0
        return [parameter]

    for error in await registering(frozen):
        assert "parameter bias: expected a value that can be written to, got one that is read-only" in error


async def test_parameters_are_registered_once() -> None:
    async with members(1, 1) as [member]:
        with pytest.raises(UsageError, match="register_parameters: parameters are registered already"):
            await member.trainer.register_parameters(member.model.parameters)


# -- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"bias": np.ones(6), "other": np.ones(6)}, "gradients: expected names of registered parameters, got 'other'"),
        (
            {"bias": np.ones(6), "weight": np.ones(6)},
            r"gradient of weight: expected float64\[11, 6\], got float64\[6\]",
        ),
        ({"bias": np.ones(6, np.float32)}, r"gradient of bias: expected float64\[6\], got float32\[6\]"),
    ],
)
async def test_gradients_that_do_not_fit_are_refused_and_none_is_taken(
    gradients: dict[str, Array], message: str
) -> None:
    async with members(1, 1, seeds=lambda rank: 5) as [member]:
        with pytest.raises(UsageError, match=message):
            member.trainer.update_gradients(gradients)
        assert member.trainer.get_memory_usage().accumulation == 0
        await member.step(0)
        expected = train_alone(1, steps=1).values()
        for name, value in member.model.values().items():
            np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", [ZeROStage.NONE, ZeROStage.STAGE2])
async def test_ranks_with_other_numbers_of_micro_steps_are_named_on_every_rank(stage: ZeROStage) -> None:
    async with members(2, 2, stage=stage) as ranks:

        async def main(member: Member) -> None:
            for micro in range(3 if member.rank == 2 else 2):
                member.model.backward(0, member.rank, micro)
                member.trainer.update_gradients()
            await member.trainer.synchronize_gradients()

        for error in await on_all_failing(ranks, main):
            assert "where rank 0 has 2 micro-steps" in str(error)
            assert "rank 2 has 3 micro-steps" in str(error)
        await on_all(ranks, lambda member: member.step(0))
        expected = train_alone(4, steps=1).values()
        for member in ranks:
            for name, value in member.model.values().items():
                np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-12)


async def test_ranks_that_took_another_step_are_named_on_every_rank() -> None:
    async with members(2, 1) as ranks:

        async def main(member: Member) -> None:
            member.model.backward(0, member.rank, 0)
            member.trainer.update_gradients()
            await member.trainer.synchronize_gradients()
            await member.trainer.apply_gradients()
            await member.trainer.optimizer_step(0.1 if member.rank else 0.2)
            member.trainer.update_gradients()
            await member.trainer.synchronize_gradients()

        for error in await on_all_failing(ranks, main):
            assert "where rank 0 has 1 micro-steps after step 1 with learning rate 0.2 and clip_norm None" in str(error)
            assert "rank 1 has 1 micro-steps after step 1 with learning rate 0.1 and clip_norm None" in str(error)


async def test_a_step_without_gradients_is_refused_on_every_rank() -> None:
    async with members(2, 1) as ranks:
        errors = await on_all_failing(ranks, lambda member: member.trainer.synchronize_gradients())
    for error in errors:
        assert "synchronize_gradients: expected gradients of at least one micro-step, got none" in str(error)


@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_another_number_of_accumulation_steps_is_refused(steps: int) -> None:
    async with members(1, 1) as [member]:
        for micro in range(2):
            member.model.backward(0, 0, micro)
            member.trainer.update_gradients()
        await member.trainer.synchronize_gradients()
        with pytest.raises(UsageError, match=f"accumulation_steps: expected 2, as were taken in, got {steps}"):
            await member.trainer.apply_gradients(steps)
        await member.trainer.apply_gradients(2)


async def test_a_gradient_is_reported_once_in_a_micro_step_and_by_a_name_that_is_known() -> None:
    async with members(1, 1) as [member]:
        async with member.trainer.synchronization() as ready:
            member.model.backward(0, 0, 0)
            ready("bias")
            with pytest.raises(UsageError, match="name: the gradient of 'bias' was reported twice in one micro-step"):
                ready("bias")
            with pytest.raises(UsageError, match="name: expected a registered parameter, got 'other'"):
                ready("other")
        ready("weight")  # a thread that is late has no effect
        await member.trainer.apply_gradients()


# -- order -----------------------------------------------------------------------------------------------------------


async def test_a_step_has_its_order() -> None:
    async with members(1, 1) as [member]:
        trainer = member.trainer
        for call in (trainer.apply_gradients(), trainer.optimizer_step(RATE)):
            with pytest.raises(UsageError, match="expected gradients of at least one micro-step, got none"):
                await call
        member.model.backward(0, 0, 0)
        trainer.update_gradients()
        await trainer.synchronize_gradients()
        with pytest.raises(UsageError, match="update_gradients: expected apply_gradients or optimizer_step next"):
            trainer.update_gradients()
        with pytest.raises(UsageError, match="synchronize_gradients: expected apply_gradients or optimizer_step next"):
            await trainer.synchronize_gradients()
        await trainer.apply_gradients()
        with pytest.raises(UsageError, match="synchronize_gradients: expected optimizer_step next"):
            await trainer.synchronize_gradients()
        await trainer.optimizer_step(RATE)


async def test_nothing_works_before_the_beginning() -> None:
    async with node_world(1, 1) as [node]:
        trainer = MultiNodeTrainer(config_of(0, 1, 1), RULE, communicator=node.world)
        with pytest.raises(UsageError, match=r"barrier: .* it is called before initialize_environment"):
            await trainer.barrier()
        with pytest.raises(UsageError, match=r"register_parameters: .* before initialize_environment"):
            await trainer.register_parameters(Model().parameters)
        async with trainer:
            with pytest.raises(UsageError, match="initialize_environment: it was awaited before"):
                await trainer.initialize_environment()
            with pytest.raises(UsageError, match="update_gradients: expected registered parameters"):
                trainer.update_gradients()


async def test_nothing_works_after_the_end() -> None:
    async with members(1, 1) as [member]:
        await member.trainer.finalize()
        await member.trainer.finalize()
        with pytest.raises(UsageError, match=r"update_gradients: .* it is called after finalize"):
            member.trainer.update_gradients()
        with pytest.raises(UsageError, match="initialize_environment: it was awaited before"):
            await member.trainer.initialize_environment()
