"""Other values than arrays, parameters and rules are refused with the form to write, wherever these go."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import asyncpar as ap
from asyncpar.gradsync import GradientSynchronizer
from asyncpar.nn import Parameter, optimizers
from asyncpar.nn.optimizers import AdamW, Optimizer, Rule, distinct
from asyncpar.parallel.local import DiLoCo, LocalSGD, OuterConfig, OuterOptimizer
from asyncpar.testing import local_world
from asyncpar.zero import ZeROConfig, ZeroEngine

ARRAY = np.ones(4, np.float32)


class Tensor:
    """Looks like torch's: no array, of that module, and with a name that is None."""

    name = None

    def __init__(self) -> None:
        self.shape, self.dtype, self.grad = (4,), "torch.float32", None


Tensor.__module__ = "torch"

OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "a tensor": (Tensor, r"got a torch Tensor; pass {0}\.detach\(\)\.numpy\(\), which shares its memory, or use"),
    "a list": (lambda: [1.0], r"got list; pass np\.asarray\({0}\)"),
    "a number": (lambda: 1.0, r"got float; pass np\.asarray\({0}\)"),
}
NEEDED: dict[str, Any] = {"counts": [1, 1], "dest": 1}
"""Arguments that operations need beside their array."""


def _array_arguments() -> Iterator[tuple[str, str]]:
    """Yield the operations of a communicator, each with an argument that takes an array."""
    for name, method in sorted(inspect.getmembers(ap.Communicator, callable)):
        for parameter in () if name.startswith("_") else inspect.signature(method).parameters.values():
            if re.search("HostArray|ArrayT", str(parameter.annotation)):
                yield name, parameter.name


PLACES = list(_array_arguments())


def test_every_operation_on_arrays_is_tried() -> None:
    assert {argument for _, argument in PLACES} == {"arrays", "out", "x"}
    assert len({name for name, _ in PLACES}) == 14


@pytest.mark.parametrize(("name", "argument"), PLACES, ids=[" ".join(place) for place in PLACES])
async def test_what_is_no_array_is_refused_with_the_form_to_write(name: str, argument: str) -> None:
    async with local_world(2) as nodes:
        operation = getattr(nodes[0].world, name)
        known = inspect.signature(operation).parameters
        for make, form in OTHERS.values():
            given = {key: value for key, value in NEEDED.items() if key in known}
            if "x" in known:
                given["x"] = np.ones((2, 4))
            given[argument] = [make()] if argument == "arrays" else make()
            with pytest.raises(ap.UsageError, match=form.format(r"\w+(\[0\])?")):
                await operation(**given)


@dataclass
class Model:
    """A model with one parameter, which is none."""

    only: Any

    def parameters(self) -> Iterator[Any]:
        return iter([self.only])


def _engine(node: ap.Node, given: Any) -> object:
    return ZeroEngine([given], AdamW(), ZeROConfig(), node.world)


TAKE_PARAMETERS: dict[str, Callable[[ap.Node, Any], Any]] = {
    "DiLoCo": lambda node, given: DiLoCo([given], GradientSynchronizer.data_parallel(node.world), every=2),
    "LocalSGD": lambda node, given: LocalSGD([given], GradientSynchronizer.data_parallel(node.world), every=2),
    "Optimizer": lambda node, given: Optimizer([given], AdamW()),
    "OuterOptimizer": lambda node, given: OuterOptimizer([given], OuterConfig()),
    "ZeroEngine": _engine,
    "accumulate": lambda node, given: GradientSynchronizer.data_parallel(node.world).accumulate(Model(given)),
    "distinct": lambda node, given: distinct([given]),
    "reserve": lambda node, given: GradientSynchronizer.data_parallel(node.world).reserve([given]),
    "step": lambda node, given: GradientSynchronizer.data_parallel(node.world).step([given]).__aenter__(),
    "synchronize": lambda node, given: GradientSynchronizer.data_parallel(node.world).synchronize_gradients(
        Model(given)
    ),
}


async def _result(take: Callable[[ap.Node, Any], Any], node: ap.Node, given: Any) -> None:
    made = take(node, given)
    assert inspect.isawaitable(made), "nothing was refused"
    await made


@pytest.mark.parametrize("place", sorted(TAKE_PARAMETERS))
async def test_what_is_no_parameter_is_refused_with_the_form_to_write(place: str) -> None:
    form = r"parameters: expected each to be a Parameter, such as Parameter\('weight', array\), got "
    async with ap.init() as node:
        for given, got in ((Tensor(), r"a torch Tensor; pass tensor\.detach\(\)\.numpy\(\)"), (ARRAY, "ndarray")):
            with pytest.raises(ap.UsageError, match=form + got):
                await _result(TAKE_PARAMETERS[place], node, given)


RULES = sorted(
    (rule for rule in vars(optimizers).values() if isinstance(rule, type) and issubclass(rule, Rule) and rule != Rule),
    key=lambda rule: rule.__name__,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_that_is_made_like_an_optimizer_of_torch_says_how_to_make_one(rule: type[Any]) -> None:
    form = rf"write `optimizer = Optimizer\(parameters, {rule.__name__}\(\)\)`, and `optimizer\.step\(learning_rate\)`"
    for given, settings in (([Parameter("w", ARRAY.copy())],), {}), ((), {"lr": 0.1}), ((), {"params": []}):
        with pytest.raises(ap.UsageError, match=form):
            rule(*given, **settings)
    assert Optimizer([Parameter("w", ARRAY.copy())], rule()).parameters
