"""Losses of torch at the end of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncpar.errors import UsageError
from asyncpar.nn.parameter import Array
from asyncpar.torch.arrays import array_of
from asyncpar.torch.stage.tensors import tensor_of


def torch_loss(function: Callable[[Any, Any], Any], *, scale: float = 1.0) -> Callable[[Any, Any], tuple[float, Array]]:
    """Return ``function(output, target)`` of tensors as the ``loss`` of a ``PipelineExecutor``.

    ``scale`` multiplies the gradient, not the loss: one over the number of micro-batches makes gradients of equal
    micro-batches add up to those of the mean loss.  A target may be a tuple of arrays.
    """
    if isinstance(function, torch.nn.Module) and any(one.requires_grad for one in function.parameters()):
        raise UsageError("function: expected a loss without parameters, got one that has some; put it into the module")

    def loss(output: Any, target: Any) -> tuple[float, Array]:
        with torch.inference_mode(False), torch.enable_grad():
            y = tensor_of(output, "output").requires_grad_()
            wanted = tuple(map(tensor_of, target)) if isinstance(target, tuple) else tensor_of(target, "target")
            value = function(y, wanted)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise UsageError(f"function: expected one number as loss, got {got}")
            (gradient,) = torch.autograd.grad(value, [y], torch.full_like(value, scale), allow_unused=True)
        if gradient is None:
            gradient = torch.zeros_like(y)
        return float(value.detach()), array_of(gradient, "gradient of the loss")

    return loss
