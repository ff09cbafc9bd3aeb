"""Arithmetic on gradients, arrays of numpy or on a CUDA device: there in the stream that computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from asyncpar.device.arrays import DeviceArray, device_array, is_device_array
from asyncpar.device.codecs.codec import Vector
from asyncpar.device.codecs.libraries import kernel_library
from asyncpar.device.fabric import LEGACY_DEFAULT_STREAM
from asyncpar.errors import UsageError

Gradient: TypeAlias = Any
"""An array of numpy, or on a device."""


def scale(gradient: Gradient, factor: float) -> None:
    """Multiply ``gradient`` in place."""
    if is_device_array(gradient):
        _launch(gradient, lambda values: values.__setitem__(slice(None), values * factor))
    else:
        gradient *= np.asarray(factor, gradient.dtype)


def zero(gradient: Gradient) -> Callable[[Gradient], None]:
    """Zero ``gradient``, and return a function that writes its values into the parameter's gradient at that time."""
    if not is_device_array(gradient):
        kept = gradient.copy()
        gradient[...] = 0.0
        return lambda current: current.__setitem__(..., kept)
    there: list[Vector] = []

    def take(values: Vector) -> None:
        there.append(values * 1)
        values[...] = 0.0

    _launch(gradient, take)
    return lambda current: _launch(current, lambda values: values.__setitem__(slice(None), there[0]))


def _launch(gradient: object, work: Callable[[Vector], None]) -> None:
    """Run ``work`` on the values of ``gradient`` in its stream."""
    array: DeviceArray = device_array(gradient, "gradient")
    kernels = kernel_library(array)
    if kernels is None:
        raise UsageError(f"gradients: expected arrays of torch or CuPy on devices for this, got {array.kind}")
    values, stream = kernels.view(array), array.stream or LEGACY_DEFAULT_STREAM
    kernels.launch(lambda: work(values), device=array.device, stream=stream)
