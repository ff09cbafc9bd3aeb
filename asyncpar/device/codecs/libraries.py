"""Lookup of the library that computes with an array."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from asyncpar.device.arrays import DeviceArray
from asyncpar.device.codecs.codec import KernelLibrary


def kernel_library(array: DeviceArray) -> KernelLibrary[Any] | None:
    """Return the library that computes with arrays like ``array`` on their device; None for one without codecs."""
    ask = getattr(type(array.owner), "__asyncpar_kernels__", None)
    if ask is not None:
        found: KernelLibrary[Any] | None = ask(array.owner)
        return found
    return _library(array.kind)


@cache
def _library(name: str) -> KernelLibrary[Any] | None:
    if name == "torch":
        from asyncpar.device.codecs.torch_kernels import TorchLibrary  # imports torch, as the array has done

        return TorchLibrary()
    if name == "cupy":
        from asyncpar.device.codecs.array_kernels import CupyLibrary  # needed only by users of CuPy

        return CupyLibrary(sys.modules["cupy"])
    return None
