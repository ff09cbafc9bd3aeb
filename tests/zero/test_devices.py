"""Parameters on devices are refused by what shards arrays of numpy, with what to do instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import UsageError
from asyncpar.nn.optimizers import Adam
from asyncpar.nn.parameter import Parameter
from asyncpar.testing import local_world
from asyncpar.zero import ZeROConfig, ZeROOptimizer, ZeROStage
from tests.device.fake_devices import FakeCluster, FakeDeviceArray

WHAT_TO_DO = "parameter w: expected an array of numpy, .*DistributedDataParallel"


@dataclass
class OnDevice:
    """A parameter of a module on a device, as ``CudaModuleStage`` has them."""

    name: str
    value: Any
    grad: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


def on_device() -> Any:
    return FakeDeviceArray.of(FakeCluster(), np.ones(4, np.float32))


def test_a_parameter_is_an_array_of_numpy() -> None:
    with pytest.raises(UsageError, match=WHAT_TO_DO):
        Parameter("w", on_device())
    parameter = Parameter("w", np.ones(4, np.float32))
    with pytest.raises(UsageError, match=WHAT_TO_DO):
        parameter.grad = on_device()


@pytest.mark.parametrize("stage", list(ZeROStage))
async def test_the_optimizer_refuses_parameters_of_modules_on_devices(stage: ZeROStage) -> None:
    async with local_world(2) as nodes:
        for node in nodes:
            optimizer = ZeROOptimizer(Adam(), ZeROConfig(stage=stage), node.world)
            given: Any = [OnDevice("w", on_device(), on_device())]
            with pytest.raises(UsageError, match=WHAT_TO_DO):
                await optimizer.register_parameters(given)
