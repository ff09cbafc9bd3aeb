"""Any ``torch.nn.Module`` on a CUDA device, for ``DistributedDataParallel`` and ``PipelineExecutor``.

Nothing here waits for the device.  A pass runs in the stream that was current when the module was wrapped; autograd
runs a backward pass in the stream of its forward pass, so gradients are final in that stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from asyncpar.device.arrays import device_array
from asyncpar.device.fabric import LEGACY_DEFAULT_STREAM
from asyncpar.errors import UsageError
from asyncpar.nn.parameter import OnGradient
from asyncpar.nn.stage import Deferred, Stage, report

LossOnDevice: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


class CudaParameter:
    """A parameter of a module, or a buffer, which has no gradient; arrays of both carry the stream of the module."""

    def __init__(self, name: str, tensor: torch.Tensor, stream: int) -> None:
        self.name, self.tensor, self._stream = name, tensor, stream

    @property
    def value(self) -> Any:
        return self._of_stream(self.tensor.detach())

    @property
    def grad(self) -> Any:
        """The gradient; reading it creates one of zeros if the tensor has none."""
        if self.tensor.grad is None:
            self.tensor.grad = torch.zeros_like(self.tensor)
        return self._of_stream(self.tensor.grad)

    def _of_stream(self, tensor: torch.Tensor) -> Any:
        return replace(device_array(tensor, self.name), stream=self._stream) if tensor.is_cuda else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaSaved:
    """The input of a pass, which gets a gradient, and the output with its graph."""

    x: torch.Tensor
    y: torch.Tensor


class CudaModuleStage(Stage[CudaSaved]):
    """``module``, which takes and returns one tensor on its device.

    ``parameters`` are those that require gradients, with their names in ``module`` after ``name`` and a dot; optimizers
    of torch over ``module.parameters()`` change them.  A split backward pass runs the graph twice.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"module: expected a torch.nn.Module, got {type(module).__name__}")
        devices = sorted({str(one.device) for one in (*module.parameters(), *module.buffers())})
        if len(devices) != 1:
            raise UsageError(f"module: expected all of it on one device, got it on {', '.join(devices) or 'none'}")
        self.name, self.module = name, module
        self.device = torch.device(devices[0])
        is_cuda = self.device.type == "cuda"
        self._torch_stream = torch.cuda.current_stream(self.device) if is_cuda else None
        handle = 0 if self._torch_stream is None else self._torch_stream.cuda_stream
        self.stream = int(handle) or LEGACY_DEFAULT_STREAM
        prefix = f"{name}." if name else ""
        self._parameters = tuple(
            CudaParameter(f"{prefix}{place}", tensor, self.stream)
            for place, tensor in module.named_parameters()
            if tensor.requires_grad
        )
        self._buffers = tuple(
            CudaParameter(f"{prefix}{place}", tensor, self.stream) for place, tensor in module.named_buffers()
        )

    def parameters(self) -> tuple[Any, ...]:
        return self._parameters

    def buffers(self) -> Sequence[CudaParameter]:
        """Return the buffers, which replicas initialize with the values of rank 0."""
        return self._buffers

    def zero_grad(self) -> None:
        with self.current():
            for parameter in self._parameters:
                if parameter.tensor.grad is not None:
                    parameter.tensor.grad.zero_()

    def set_training(self, training: bool) -> None:
        """Set training or evaluation mode of the module."""
        self.module.train(training)

    def empty(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        """See ``pipeline.device.DeviceStage``."""
        with self.current():
            return torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)

    def forward(self, x: Any) -> tuple[Any, CudaSaved]:
        if not isinstance(x, torch.Tensor) or x.device != self.device:
            raise UsageError(f"{self.name}: expected a tensor on {self.device}, got {_described(x)}")
        with self.current(), torch.enable_grad():
            entry = x.detach()
            if entry.is_floating_point():
                entry.requires_grad_()
            y = self.module(entry)
            if not isinstance(y, torch.Tensor):
                raise UsageError(f"{self.name}: expected a module that returns one tensor, got {type(y).__name__}")
            y = y.contiguous()
        return y.detach(), CudaSaved(x=entry, y=y)

    def backward(
        self, saved: CudaSaved, dy: Any, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Any:
        entry, y = saved.x, saved.y
        if deferred is not None:
            deferred.append(partial(self._backward_weight, y, dy))
            return self._gradient_of(entry, y, dy)
        with self.current(), self._reporting(on_gradient):
            if y.requires_grad:
                torch.autograd.backward(y, dy)
            if not entry.requires_grad:
                return None
            return torch.zeros_like(entry) if entry.grad is None else entry.grad.contiguous()

    def _gradient_of(self, entry: torch.Tensor, y: torch.Tensor, dy: Any) -> Any:
        """Return the gradient of the input alone; the graph is used once more later."""
        if not entry.requires_grad:
            return None
        with self.current():
            (dx,) = torch.autograd.grad(y, entry, dy, retain_graph=True, allow_unused=True)
            return torch.zeros_like(entry) if dx is None else dx.contiguous()

    def _backward_weight(self, y: torch.Tensor, dy: Any, on_gradient: OnGradient | None) -> None:
        tensors = [parameter.tensor for parameter in self._parameters]
        with self.current(), self._reporting(on_gradient):
            if y.requires_grad and tensors:
                torch.autograd.backward(y, dy, inputs=tensors)

    def loss(self, function: Callable[[Any, Any], Any], *, scale: float = 1.0) -> LossOnDevice:
        """Return ``function(output, target)`` of tensors as the ``loss`` of a ``PipelineExecutor`` after this stage.

        It runs in the stage's stream.  ``scale`` multiplies the gradient, not the loss, which stays on the device.
        """

        def loss(output: Any, target: Any) -> tuple[Any, Any]:
            with self.current(), torch.enable_grad():
                y = output.detach().requires_grad_()
                value = function(y, target)
                (gradient,) = torch.autograd.grad(value, [y], torch.full_like(value, scale))
                return value.detach(), gradient.contiguous()

        return loss

    @contextmanager
    def _reporting(self, on_gradient: OnGradient | None) -> Iterator[None]:
        """Report parameters once autograd is done with them, and those that it does not reach at the end."""
        if on_gradient is None:
            yield
            return
        waiting: dict[str, CudaParameter] = {parameter.name: parameter for parameter in self._parameters}

        def notify(name: str, _: torch.Tensor) -> None:
            if waiting.pop(name, None) is not None:
                on_gradient(name)

        hooks = [one.tensor.register_post_accumulate_grad_hook(partial(notify, one.name)) for one in self._parameters]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        left: Any = list(reversed(waiting.values()))
        report(left, on_gradient)

    def current(self) -> AbstractContextManager[Any]:
        """Return a context that makes the module's stream current in this thread, for optimizers."""
        return nullcontext() if self._torch_stream is None else torch.cuda.stream(self._torch_stream)


def _described(x: object) -> str:
    return f"one on {x.device}" if isinstance(x, torch.Tensor) else type(x).__name__
