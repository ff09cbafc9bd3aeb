"""Freezing in mid-run comes to the values of torch's optimizers, whose parameters have no gradient then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from asyncpar.nn.optimizers import SGD, Adam, AdamW, Rule
from tests.nn.test_frozen import RATE, STEPS, draw, is_trained, train

PAIRS: dict[str, tuple[Rule, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (
        SGD(momentum=0.9, weight_decay=0.1),
        lambda parameters: torch.optim.SGD(parameters, lr=RATE, momentum=0.9, weight_decay=0.1),
    ),
    "adam": (
        Adam(weight_decay=0.1),
        lambda parameters: torch.optim.Adam(parameters, lr=RATE, weight_decay=0.1),
    ),
    "adamw": (
        AdamW(weight_decay=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_parameters_go_on_as_those_of_torch(pair: str) -> None:
    rule, make = PAIRS[pair]
    tensors = {name: torch.nn.Parameter(torch.from_numpy(draw(name))) for name in ("late", "paused", "always")}
    optimizer = make(list(tensors.values()))
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        for name, tensor in tensors.items():
            tensor.requires_grad_(is_trained(name, step))
        loss = sum((tensor * torch.from_numpy(draw(name, step))).sum() for name, tensor in tensors.items())
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
    for name, value in train(rule).items():
        np.testing.assert_allclose(value, tensors[name].detach().numpy(), rtol=1e-10, err_msg=name)
