"""The linear layer."""

from __future__ import annotations

import math

from asyncpar.nn.parameter import Array, Initializer, OnGradient, Parameter
from asyncpar.nn.stage import Stage, check_features, check_gradient, check_positive, report


class Linear(Stage[Array]):
    """``y = x @ weight + bias`` over the last dimension; ``weight`` has shape (inputs, outputs).

    ``x`` may have any number of leading dimensions.  Saves a reference to ``x``, no copy.  Weights start with
    standard deviation ``gain / sqrt(inputs)`` (LeCun et al. 1998), biases at zero.
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
    ) -> None:
        check_positive(name, inputs=inputs, outputs=outputs)
        self.name = name
        self.inputs = inputs
        self.outputs = outputs
        self.weight = initializer.normal(f"{name}/weight", (inputs, outputs), std=gain / math.sqrt(inputs))
        self.bias = initializer.constant(f"{name}/bias", (outputs,), 0.0) if has_bias else None

    def forward(self, x: Array) -> tuple[Array, Array]:
        check_features(self.name, x, self.inputs)
        y: Array = x.reshape(-1, self.inputs) @ self.weight.value
        if self.bias is not None:
            y += self.bias.value
        return y.reshape(*x.shape[:-1], self.outputs), x

    def backward(self, saved: Array, dy: Array, on_gradient: OnGradient | None = None) -> Array:
        check_gradient(self.name, dy, (*saved.shape[:-1], self.outputs))
        rows = dy.reshape(-1, self.outputs)
        if self.bias is not None:
            self.bias.grad += rows.sum(axis=0)
        self.weight.grad += saved.reshape(-1, self.inputs).T @ rows
        report(reversed(self.parameters()), on_gradient)
        dx: Array = rows @ self.weight.value.T
        return dx.reshape(saved.shape)

    def parameters(self) -> tuple[Parameter, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)
