"""Models that users write themselves: on any communicator, with or without reports, and wrong ones with the form."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.errors import UsageError
from asyncpar.nn import Array, Parameter
from asyncpar.parallel import DataParallel, DDPConfig, DistributedDataParallel
from asyncpar.testing.world import local_world
from tests.parallel.replicas import on_all


class Plain:
    """``y = x w + b``, with nothing but the three methods that a model must have."""

    def __init__(self) -> None:
        self.w = Parameter("w", np.full((3, 2), 0.5))
        self.b = Parameter("b", np.zeros(2))

    def parameters(self) -> Sequence[Parameter]:
        return [self.w, self.b]

    def forward(self, x: Array) -> tuple[Array, Array]:
        return x @ self.w.value + self.b.value, x

    def backward(self, saved: Array, dy: Array) -> None:
        self.w.grad += saved.T @ dy
        self.b.grad += dy.sum(axis=0)


class Reporting(Plain):
    def backward(self, saved: Array, dy: Array, on_gradient: Callable[[str], None]) -> None:  # type: ignore[override]
        super().backward(saved, dy)
        on_gradient("b")
        on_gradient("w")


class ByKeyword(Plain):
    def backward(self, saved: Array, dy: Array, *, on_gradient: Any = None) -> None:
        super().backward(saved, dy)
        for name in ("b", "w"):
            on_gradient(name)


async def step(node: ap.Node, model: Any, **settings: Any) -> list[Array]:
    async with DistributedDataParallel.on(node.world, model, **settings) as ddp:
        x = np.full((4, 3), node.rank + 1.0)
        for _ in range(2):
            ddp.zero_grad()
            y, saved = await ddp.forward(x)
            await ddp.backward(saved, np.ones_like(y))
        return [parameter.grad.copy() for parameter in ddp.parameters()]


@pytest.mark.parametrize("make", [Plain, Reporting, ByKeyword])
@pytest.mark.parametrize("config", [None, DDPConfig(), DDPConfig(gradient_as_bucket_view=True)])
async def test_gradients_of_own_models_are_means(make: Callable[[], Plain], config: DDPConfig | None) -> None:
    async with local_world(3) as nodes:
        for w, b in await on_all(nodes, lambda node: step(node, make(), config=config)):
            np.testing.assert_array_equal(w, np.full((3, 2), 8.0))
            np.testing.assert_array_equal(b, np.full(2, 4.0))


async def test_a_replica_on_a_group_leaves_the_group_open() -> None:
    async def main(node: ap.Node) -> None:
        half = await node.world.split(node.rank % 2, 0)
        assert half is not None
        async with DistributedDataParallel.on(half, Reporting()) as ddp:
            assert (ddp.world_size(), str(ddp.process_group())) == (2, "ddp_main")
            await ddp.runtime.finalize()
        await half.barrier()
        await node.world.barrier()

    async with local_world(4) as nodes:
        await on_all(nodes, main)


async def test_a_model_that_cannot_overlap_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "asyncpar.parallel")
    async with local_world(2) as nodes:
        await on_all(nodes, lambda node: step(node, Plain()))
    warnings = [record for record in caplog.records if "Plain.backward takes no on_gradient" in record.getMessage()]
    assert len(warnings) == 1


@pytest.mark.parametrize(("make", "settings"), [(Reporting, {}), (Plain, {"config": DDPConfig()})])
async def test_no_other_model_is_told(make: Any, settings: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "asyncpar.parallel")
    async with local_world(2) as nodes:
        await on_all(nodes, lambda node: step(node, make(), **settings))
    assert not caplog.records


def changed(**methods: Any) -> Any:
    """Return a model with other methods; ``None``: without."""
    return type("Wrong", (Plain,), methods)()


async def _coroutine(self: Any, x: Array) -> Any:
    raise AssertionError


WRONG = {
    "class": (Plain, "got the class Plain; make one"),
    "number": (3, r"int\.forward: expected a method, got none"),
    "no forward": (changed(forward=None), r"Wrong\.forward: expected a method, got none"),
    "an array as forward": (changed(forward=np.zeros(2)), r"forward: expected a method, got ndarray"),
    "forward takes nothing": (changed(forward=lambda self: 1), r"forward: expected it to take \(x\), got forward\(\)"),
    "forward takes two": (
        changed(forward=lambda self, x, y: 1),
        r"forward: expected it to take \(x\), got forward\(x, y\)",
    ),
    "async forward": (changed(forward=_coroutine), "forward: expected a plain function, got a coroutine function"),
    "backward takes one": (
        changed(backward=lambda self, dy: None),
        r"backward: expected it to take \(saved, dy, on_gradient\), got backward\(dy\)",
    ),
    "a dict of parameters": (changed(parameters=lambda self: {}), "expected it to return a list of .*, got dict"),
    "no parameters": (changed(parameters=lambda self: None), "expected it to return a list of parameters, got None"),
    "arrays as parameters": (
        changed(parameters=lambda self: [np.zeros(2)]),
        r"parameters\(\)\[0\]: expected a parameter with name, value and grad, got ndarray; make it by",
    ),
    "a parameter without gradient": (
        changed(parameters=lambda self: [type("P", (), {"name": "w", "value": np.zeros(2)})()]),
        r"parameters\(\)\[0\] 'w': expected an array as its grad, got None",
    ),
    "zero_grad takes one": (changed(zero_grad=lambda self, x: None), r"zero_grad: expected it to take \(\), got"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_a_wrong_model_is_refused_with_the_form(case: str) -> None:
    model, reason = WRONG[case]
    async with local_world(1) as nodes:
        with pytest.raises(UsageError, match=reason) as raised:
            DistributedDataParallel.on(nodes[0].world, model)
    with pytest.raises(UsageError, match=reason):
        DataParallel(model, ["cpu:0"])
    if case != "class":
        assert "def backward(self, saved, dy, on_gradient=None)" in str(raised.value)


async def test_what_forward_returns_is_checked() -> None:
    async def main(node: ap.Node) -> None:
        async with DistributedDataParallel.on(node.world, changed(forward=lambda self, x: x)) as ddp:
            await ddp.forward(np.ones((1, 3)))

    async with local_world(1) as nodes:
        with pytest.raises(UsageError, match=r"Wrong\.forward: expected it to return a pair \(y, saved\), got ndarray"):
            await main(nodes[0])


async def test_a_backward_that_never_reports_says_what_it_should_call() -> None:
    model = changed(backward=lambda self, saved, dy, on_gradient=None: None)
    async with local_world(1) as nodes:
        with pytest.raises(UsageError, match=r"call on_gradient\(name\) for each parameter .* w, b, but"):
            await step(nodes[0], model)


async def test_something_else_than_a_communicator_is_refused() -> None:
    async with local_world(1) as nodes:
        with pytest.raises(UsageError, match="communicator: expected a Communicator of a running node"):
            DistributedDataParallel.on(nodes[0], Plain())  # type: ignore[arg-type]


async def test_replicas_of_one_process_train_own_models() -> None:
    alone = Plain()
    parallel = DataParallel(copy.deepcopy(alone), ["cpu:0", "cpu:1"])
    x = np.arange(12.0).reshape(4, 3)
    y, saved = await parallel.forward(x)
    parallel.zero_grad()
    await parallel.backward(saved, np.ones_like(y))
    await parallel.sync_gradients()
    alone.backward(x, np.ones((4, 2)))
    np.testing.assert_allclose(parallel.parameters()[0].grad, alone.w.grad)
    assert isinstance(parallel.replicas[1], Plain)
