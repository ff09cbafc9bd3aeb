"""Sums of the gradients of micro-steps on a device, added up in the streams that compute the gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from asyncpar.core.sums import sum_dtype
from asyncpar.device.arrays import DeviceArray, device_array, empty_like
from asyncpar.device.codecs.codec import KernelLibrary
from asyncpar.device.codecs.libraries import kernel_library
from asyncpar.device.fabric import LEGACY_DEFAULT_STREAM
from asyncpar.errors import UsageError

Sums = Mapping[str, Any]
"""By parameter's name."""


def check_sum(kept: Any, gradient: object, name: str) -> None:
    """Raise ``UsageError`` unless ``gradient`` can be added to ``kept`` (None: it is the first) on its device."""
    array = device_array(gradient, f"gradient of {name}")
    if kernel_library(array) is None:
        raise UsageError(
            f"accumulate: gradients of {array.kind} on devices are not added up here; let their library do that, and "
            "divide the loss by the number of micro-steps"
        )
    if isinstance(kept, DeviceArray) and (kept.device, kept.stream) != (array.device, array.stream):
        raise UsageError(
            f"parameter {name}: expected a gradient on cuda:{kept.device} in stream {kept.stream} as in earlier "
            f"micro-steps, got one on cuda:{array.device} in stream {array.stream}"
        )


def added(kept: DeviceArray | None, gradient: object, name: str) -> DeviceArray:
    """Return ``kept`` plus ``gradient``, after the work in the gradient's stream, and zero ``gradient``.

    Sums of two-byte values are in float32.
    """
    array = device_array(gradient, f"gradient of {name}")
    total = kept
    if total is None:
        total = replace(empty_like(array, array.shape, dtype=sum_dtype(array.dtype)), stream=array.stream)
    kernels = kernel_library(array)
    assert kernels is not None, "it was checked"
    if not array.size:
        return total
    values, into = kernels.view(array), kernels.view(total)

    def work() -> None:
        into[...] = values if kept is None else into + values
        values[...] = 0

    kernels.launch(work, device=array.device, stream=array.stream or LEGACY_DEFAULT_STREAM)
    return total


def add_to_mean(kernels: KernelLibrary[Any], flat: Any, part: slice, total: DeviceArray, micro_steps: int) -> None:
    """Make ``flat[part]`` the mean over micro-steps, adding ``total`` of the others; in the current stream."""
    flat[part] = (kernels.view(total) + flat[part]) / micro_steps


def check_staged(sums: Sums) -> None:
    """Raise ``UsageError`` if there are any: their gradients go through the host."""
    if sums:
        raise UsageError(
            "accumulate: gradients on devices that go through the host are not added up here; let their library add "
            "them up, and divide the loss by the number of micro-steps"
        )
