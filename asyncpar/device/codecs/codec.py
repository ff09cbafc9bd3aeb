"""The interfaces of device computation: codecs, and the libraries that have them.

A codec of a device writes the same bytes as the host's codec of the same name, so that ranks with and without a device
are compatible.  It never waits for the device: an error that the host's codec raises becomes a flag in the device's
memory, which the caller checks when the work is done.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeAlias, TypeVar

from asyncpar.codecs.codec import Codec
from asyncpar.device.arrays import DeviceArray

Vector: TypeAlias = Any
"""A contiguous vector of the library that owns it: float32 values, or uint8 bytes."""

V = TypeVar("V")
"""The type of the vectors of one library."""


class DeviceCodec(ABC, Generic[V]):
    """Encodes and decodes vectors on a device, like ``host`` on the host, on the library's current stream."""

    def __init__(self, host: Codec) -> None:
        self.host = host

    @abstractmethod
    def encode(self, values: V, out: V, *, residual: V | None = None, lost: V | None = None) -> V:
        """Write the encoded form of ``values + residual`` into ``out``, and its error into ``lost``.

        Returns a flag on the device: whether all are finite.  If not, the contents of ``out`` and ``lost`` are
        undefined.  ``lost`` may be the array ``residual``, not ``values``.
        """

    @abstractmethod
    def decode(self, encoded: V, out: V, *, adds: bool = False) -> V:
        """Write the values of ``encoded`` into ``out``, or with ``adds`` add them.

        Returns a flag on the device: whether everything in it is in range.  If not, the content of ``out`` is
        undefined.
        """


class KernelLibrary(ABC, Generic[V]):
    """The kernels that an array library runs on a device, in streams and memory that it does not own."""

    name: str
    """The name of its top module."""

    @abstractmethod
    def codec(self, host: Codec) -> DeviceCodec[V]:
        """Return the codec with the encoding of ``host``; ``KeyError`` if there is none."""

    @abstractmethod
    def view(self, array: DeviceArray) -> V:
        """Return the memory of ``array`` as a vector."""

    @abstractmethod
    def launch(self, work: Callable[[], None], *, device: int, stream: int) -> None:
        """Run ``work`` to put kernels into ``stream``; it may be called later, and nothing waits for the device."""

    @abstractmethod
    def all_finite(self, values: V) -> V:
        """Return a flag on the device: whether all ``values`` are finite."""

    @abstractmethod
    def fill_unless(self, flag: V, values: V, value: int) -> None:
        """Write ``value`` to all ``values`` unless ``flag``, on the device, is true."""
