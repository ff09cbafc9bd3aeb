"""Linear layers with some of the columns or rows on each rank (Shoeybi et al. 2019)."""

from __future__ import annotations

from typing import Any

import numpy as np

from asyncpar.core.array_pool import ArrayPool
from asyncpar.core.config.slicing import TensorSlice
from asyncpar.errors import UsageError
from asyncpar.nn.linear import Linear, Projection
from asyncpar.nn.parameter import Array, Initializer, OnGradient, Parameter
from asyncpar.nn.stage import (
    Deferred,
    Stage,
    add_weight_gradients,
    check_features,
    check_gradient,
    check_positive,
    report,
)
from asyncpar.nn.tensor.region import TensorRegion

ColumnSaved = tuple[Array, tuple[int, ...]]
"""The input in its outside layout, and the shape of this rank's output."""

RowSaved = tuple[Array, tuple[int, ...]]
"""The input of this rank's rows, and the shape of the output in its outside layout."""


class ColumnParallel(Stage[ColumnSaved]):
    """A projection in which every rank computes some outputs from the whole input.

    Backward: one all-reduce of the input's gradient, which runs while the weight's gradient is computed.  With sequence
    parallelism the input is gathered again for that instead of being kept (Korthikanti et al. 2022).
    """

    def __init__(self, projection: Projection, *, region: TensorRegion) -> None:
        self.name = projection.name
        self._projection = projection
        self._region = region

    def forward(self, x: Array) -> tuple[Array, ColumnSaved]:
        self._region.check_held(self.name, x, self._projection.inputs)
        y, _ = self._projection.forward(self._region.enter(x))
        return y, (x, y.shape)

    def backward(
        self, saved: ColumnSaved, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array:
        x, shape = saved
        check_gradient(self.name, dy, shape)
        wait = self._region.start_enter_gradient(self._projection.input_gradient(dy))

        def work(notify: OnGradient | None) -> None:
            self._projection.add_gradients(self._region.enter(x), dy, notify)

        add_weight_gradients(work, on_gradient, deferred)
        return wait()

    def use_memory(self, memory: ArrayPool) -> None:
        super().use_memory(memory)
        self._projection.use_memory(memory)

    def parameters(self) -> tuple[Parameter, ...]:
        return self._projection.parameters()


class ColumnParallelLinear(Stage[Any]):
    """``y = x @ weight + bias``, with some columns of ``weight`` and ``bias`` on every rank.

    ``outputs`` are cut by ``split_bounds``.  The output is this rank's part, or everything with ``gather_output``.

    ``gain`` scales the initial values; without ``has_bias`` there is no bias.
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        region: TensorRegion,
        initializer: Initializer,
        gain: float = 1.0,
        has_bias: bool = True,
        gather_output: bool = False,
    ) -> None:
        check_positive(name, inputs=inputs, outputs=outputs)
        self.name = name
        self.outputs = outputs
        self._bounds = region.cut(name, "outputs", outputs)
        part = TensorSlice.along((inputs, outputs), 1, *self._bounds)
        linear = Linear(name, inputs, outputs, initializer=initializer, gain=gain, has_bias=has_bias, part=part)
        self.weight, self.bias = linear.weight, linear.bias
        self._columns = ColumnParallel(linear, region=region)
        self._gathering = region.group if gather_output else None

    def forward(self, x: Array) -> tuple[Array, ColumnSaved]:
        y, saved = self._columns.forward(x)
        return (y, saved) if self._gathering is None else (self._gathering.all_gather(y, y.ndim - 1), saved)

    def backward(
        self, saved: ColumnSaved, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array:
        if self._gathering is not None:
            check_gradient(self.name, dy, (*saved[1][:-1], self.outputs))
            dy = np.ascontiguousarray(dy[..., slice(*self._bounds)])
        return self._columns.backward(saved, dy, on_gradient, deferred)

    def use_memory(self, memory: ArrayPool) -> None:
        super().use_memory(memory)
        self._columns.use_memory(memory)

    def parameters(self) -> tuple[Parameter, ...]:
        return self._columns.parameters()


class RowParallelLinear(Stage[RowSaved]):
    """``y = x @ weight + bias``, with some rows of ``weight`` on every rank, and all of ``bias``.

    ``inputs`` are cut by ``split_bounds``.  The input is this rank's part, such as the output of a layer cut by
    columns; or everything, if ``input_is_parallel`` is false.  Products are summed over ranks, then ``bias`` is added,
    once.

    ``gain`` scales the initial values; without ``has_bias`` there is no bias.
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        region: TensorRegion,
        initializer: Initializer,
        gain: float = 1.0,
        has_bias: bool = True,
        input_is_parallel: bool = True,
    ) -> None:
        check_positive(name, inputs=inputs, outputs=outputs)
        if region.sequence_parallel and not input_is_parallel:
            raise UsageError(
                f"{name}: expected a parallel input with sequence parallelism, which cuts another dimension"
            )
        self.name = name
        self.inputs = inputs
        self._bounds = region.cut(name, "inputs", inputs)
        part = TensorSlice.along((inputs, outputs), 0, *self._bounds)
        self._linear = Linear(name, inputs, outputs, initializer=initializer, gain=gain, has_bias=False, part=part)
        self.weight = self._linear.weight
        self.bias: Parameter | None = None
        if has_bias:
            self.bias = initializer.constant(f"{name}/bias", (outputs,), 0.0, placement=region.placement)
        self._region = region
        self._input_is_parallel = input_is_parallel

    def forward(self, x: Array) -> tuple[Array, RowSaved]:
        if not self._input_is_parallel:
            check_features(self.name, x, self.inputs)
            x = np.ascontiguousarray(x[..., slice(*self._bounds)])
        self._region.check_inside(self.name, x, self._linear.inputs)
        y, _ = self._linear.forward(x)
        y = self._region.leave(y)
        if self.bias is not None:
            y += self.bias.value
        return y, (x, y.shape)

    def backward(
        self, saved: RowSaved, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array:
        x, shape = saved
        check_gradient(self.name, dy, shape)
        whole = self._region.leave_gradient(dy)

        def work(notify: OnGradient | None) -> None:
            if self.bias is not None and self.bias.requires_grad:
                self.bias.accumulate(dy.reshape(-1, dy.shape[-1]).sum(axis=0))
            self._linear.add_gradients(x, whole)
            report(reversed(self.parameters()), notify)

        add_weight_gradients(work, on_gradient, deferred)
        dx = self._linear.input_gradient(whole)
        return dx if self._input_is_parallel else self._region.group.all_gather(dx, dx.ndim - 1)

    def use_memory(self, memory: ArrayPool) -> None:
        super().use_memory(memory)
        self._linear.use_memory(memory)

    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)
