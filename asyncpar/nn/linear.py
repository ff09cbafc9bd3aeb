"""Linear layers: the plain one, and the one whose weight is another layer's table, transposed."""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np

from asyncpar.core.config.slicing import TensorSlice
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


class Projection(Stage[Array]):
    """A linear map of the last dimension, from ``inputs`` to ``outputs`` values.  Any leading dimensions.

    Layers that communicate between the two halves of ``backward`` call each half alone.  Saves a
    reference to ``x``, no copy.
    """

    name: str
    inputs: int
    outputs: int

    @abstractmethod
    def input_gradient(self, dy: Array) -> Array:
        """Return the gradient of the input."""

    @abstractmethod
    def add_gradients(self, x: Array, dy: Array, on_gradient: OnGradient | None = None) -> None:
        """Add to the gradients of the parameters, and report them to ``on_gradient``."""

    def backward(
        self, saved: Array, dy: Array, on_gradient: OnGradient | None = None, deferred: Deferred | None = None
    ) -> Array:
        check_gradient(self.name, dy, (*saved.shape[:-1], self.outputs))
        add_weight_gradients(lambda notify: self.add_gradients(saved, dy, notify), on_gradient, deferred)
        return self.input_gradient(dy)

    def _product(self, a: Array, b: Array) -> Array:
        """Return ``a @ b``, both two-dimensional, in the memory of this stage."""
        product = self.allocate((a.shape[0], b.shape[1]), np.result_type(a, b))
        return np.matmul(a, b, out=product)


class Linear(Projection):
    """``y = x @ weight + bias``; ``weight`` has shape (inputs, outputs).

    Weights start with standard deviation ``gain / sqrt(inputs)`` (LeCun et al. 1998), biases at zero.  With ``part``
    the layer holds that slice of the weight, and of the bias if columns are cut; ``inputs`` and ``outputs`` are then
    those of the slice.

    Without ``has_bias`` there is no bias.
    """

    def __init__(
        self,
        name: str,
        inputs: int,
        outputs: int,
        *,
        initializer: Initializer,
        gain: float = 1.0,
        has_bias: bool = True,
        part: TensorSlice | None = None,
    ) -> None:
        check_positive(name, inputs=inputs, outputs=outputs)
        self.name = name
        std = gain / math.sqrt(inputs)
        self.weight = initializer.normal(f"{name}/weight", (inputs, outputs), std=std, part=part)
        self.inputs, self.outputs = self.weight.shape
        self.bias: Parameter | None = None
        if has_bias:
            columns = None if part is None else _bias_part(part)
            self.bias = initializer.constant(f"{name}/bias", (outputs,), 0.0, part=columns)

    def forward(self, x: Array) -> tuple[Array, Array]:
        check_features(self.name, x, self.inputs)
        y = self._product(x.reshape(-1, self.inputs), self.weight.value)
        if self.bias is not None:
            y += self.bias.value
        return y.reshape(*x.shape[:-1], self.outputs), x

    def input_gradient(self, dy: Array) -> Array:
        dx = self._product(dy.reshape(-1, self.outputs), self.weight.value.T)
        return dx.reshape(*dy.shape[:-1], self.inputs)

    def add_gradients(self, x: Array, dy: Array, on_gradient: OnGradient | None = None) -> None:
        rows = dy.reshape(-1, self.outputs)
        if self.bias is not None and self.bias.requires_grad:
            self.bias.accumulate(rows.sum(axis=0))
        if self.weight.requires_grad:
            self.weight.accumulate(x.reshape(-1, self.inputs).T @ rows)
        report(reversed(self.parameters()), on_gradient)

    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)


class TiedLinear(Projection):
    """``y = x @ table.T``, where ``table``, of shape (outputs, inputs), belongs to an embedding, too (Press and Wolf
    2017).

    With ``reports`` False, the embedding, whose gradients come later, reports that the gradient is final.
    """

    def __init__(self, name: str, table: Parameter, *, reports: bool) -> None:
        self.name = name
        self.table = table
        self.outputs, self.inputs = table.shape
        self._reports = reports

    def forward(self, x: Array) -> tuple[Array, Array]:
        check_features(self.name, x, self.inputs)
        y = self._product(x.reshape(-1, self.inputs), self.table.value.T)
        return y.reshape(*x.shape[:-1], self.outputs), x

    def input_gradient(self, dy: Array) -> Array:
        dx = self._product(dy.reshape(-1, self.outputs), self.table.value)
        return dx.reshape(*dy.shape[:-1], self.inputs)

    def add_gradients(self, x: Array, dy: Array, on_gradient: OnGradient | None = None) -> None:
        if self.table.requires_grad:
            self.table.accumulate(dy.reshape(-1, self.outputs).T @ x.reshape(-1, self.inputs))
        report(self.parameters() if self._reports else (), on_gradient)

    def parameters(self) -> tuple[Parameter, ...]:
        return (self.table,)


def _bias_part(part: TensorSlice) -> TensorSlice | None:
    """Return the slice of the bias for a slice of the weight; None if no columns are cut."""
    if part.dim == 0:
        return None
    _, outputs = part.global_shape
    return TensorSlice(
        global_shape=(outputs,),
        view_shape=part.view_shape[1:],
        dim=part.dim - 1,
        start=part.start,
        stop=part.stop,
        local_shape=part.local_shape[1:],
    )
