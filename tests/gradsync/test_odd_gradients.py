"""A gradient that cannot take the mean, on one rank, ends the step on all of them, which name rank and parameter."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from asyncpar.errors import AsyncparError, UsageError
from asyncpar.gradsync import GradientBucketingConfig, GradientCompressionConfig, GradientSynchronizer
from asyncpar.testing.world import local_world
from tests.products import sampled


@dataclass
class Held:
    """A parameter of a program's own."""

    name: str
    grad: Any


class WithoutSetter:
    def __init__(self, name: str, gradient: Any) -> None:
        self.name = name
        self._gradient = gradient

    @property
    def grad(self) -> Any:
        return self._gradient


class Raising:
    """Reading its gradient fails after ``reads`` times."""

    def __init__(self, name: str, gradient: Any, reads: int) -> None:
        self.name = name
        self._gradient = gradient
        self._reads = reads

    @property
    def grad(self) -> Any:
        self._reads -= 1
        if self._reads < 0:
            raise RuntimeError("the device is gone")
        return self._gradient


class Tensor:
    """Looks like torch's: no array, and of that module."""

    def __init__(self) -> None:
        self.shape, self.dtype = (4,), "torch.float32"


Tensor.__module__ = "torch"


@dataclass
class Model:
    listed: list[Any] = field(default_factory=list)

    def parameters(self) -> Iterator[Any]:
        return iter(self.listed)


def plain(name: str, value: float) -> Held:
    return Held(name, np.full(4, value, np.float32))


ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "read-only": (lambda: Held("odd", np.broadcast_to(np.float32(1.0), (4,))), "read-only"),
    "None": (lambda: Held("odd", None), "got None"),
    "a torch tensor": (lambda: Held("odd", Tensor()), r"got a torch Tensor; pass tensor\.detach\(\)\.numpy\(\)"),
    "a list": (lambda: Held("odd", [1.0] * 4), "got list"),
    "raising at once": (lambda: Raising("odd", np.ones(4, np.float32), 0), "RuntimeError: the device is gone"),
    "raising later": (lambda: Raising("odd", np.ones(4, np.float32), 2), "RuntimeError: the device is gone"),
}
SETTINGS = {
    "exact": {},
    "int8": {"compression": GradientCompressionConfig(codec="int8")},
    "one at a time": {"bucketing": GradientBucketingConfig(overlap_communication=False)},
}


@pytest.mark.parametrize(("odd", "settings", "is_later"), sampled(list(ODD), list(SETTINGS), [False, True]))
async def test_one_rank_with_an_odd_gradient_ends_the_step_on_all(odd: str, settings: str, is_later: bool) -> None:
    make, message = ODD[odd]

    async def main(synchronizer: GradientSynchronizer, rank: int) -> tuple[BaseException, list[float]]:
        model = Model([plain("a", 1.0 + rank), plain("odd", 2.0), plain("z", 3.0 + rank)])
        before = model.listed[1]
        if is_later:
            await synchronizer.synchronize_gradients(model)
            for index, value in ((0, 1.0 + rank), (2, 3.0 + rank)):
                model.listed[index].grad[...] = value
        if rank == 1:
            model.listed[1] = make()
        with pytest.raises(AsyncparError) as failure:
            await synchronizer.synchronize_gradients(model)
        left = [float(one.grad[0]) for one in (model.listed[0], model.listed[2])]
        model.listed[1] = before
        await synchronizer.synchronize_gradients(model)
        assert [float(one.grad[0]) for one in (model.listed[0], model.listed[2])] == [2.0, 4.0]
        return failure.value, left

    async with local_world(3) as nodes:
        made = [GradientSynchronizer.data_parallel(node.world, **SETTINGS[settings]) for node in nodes]  # type: ignore[arg-type]
        results = await asyncio.gather(*(main(one, node.rank) for one, node in zip(made, nodes, strict=True)))
    for rank, (error, left) in enumerate(results):
        assert left == [1.0 + rank, 3.0 + rank], "it was written to"
        assert "odd" in str(error)
        if rank == 1:
            assert isinstance(error, UsageError)
            assert re.search(message, str(error))
        else:
            assert "rank 1" in str(error)


async def test_views_need_a_setter_on_all_ranks() -> None:
    async def main(synchronizer: GradientSynchronizer, rank: int) -> tuple[BaseException, list[float]]:
        gradient = np.full(4, 2.0, np.float32)
        odd = WithoutSetter("odd", gradient) if rank == 1 else Held("odd", gradient)
        model = Model([plain("a", 1.0 + rank), odd])
        with pytest.raises(AsyncparError) as failure:
            await synchronizer.synchronize_gradients(model)
        return failure.value, [float(one.grad[0]) for one in model.listed]

    views = GradientBucketingConfig(gradient_as_bucket_view=True)
    async with local_world(2) as nodes:
        made = [GradientSynchronizer.data_parallel(node.world, bucketing=views) for node in nodes]
        results = await asyncio.gather(*(main(one, node.rank) for one, node in zip(made, nodes, strict=True)))
    for rank, (error, left) in enumerate(results):
        assert left == [1.0 + rank, 2.0]
        assert "expected a grad that can be set on odd" in str(error)


@pytest.mark.parametrize("odd", [odd for odd in ODD if odd != "raising later"])  # it is read once
async def test_nothing_is_accumulated_of_a_micro_step_with_an_odd_gradient(odd: str) -> None:
    make, message = ODD[odd]
    async with local_world(1) as (node,):
        synchronizer = GradientSynchronizer.data_parallel(node.world)
        model = Model([plain("a", 1.0), make()])
        with pytest.raises(UsageError, match=message):
            synchronizer.accumulate(model)
        assert model.listed[0].grad[0] == 1.0
        assert synchronizer.get_memory_usage().accumulation == 0
