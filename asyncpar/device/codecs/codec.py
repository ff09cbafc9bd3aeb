"""The interfaces of what computes where an array is: codecs, and the libraries that have them.

A codec of a device writes the same bytes as the host's codec of the same name, so that ranks with and without a device
understand each other.  It never waits for the device: what the host's codec raises is a flag in the device's memory,
which the caller looks at when the work is done.
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
    """Encodes and decodes vectors on a device, as ``host`` does on the host, on the library's current stream."""

    def __init__(self, host: Codec) -> None:
        self.host = host

    @abstractmethod
    def encode(self, values: V, out: V, *, residual: V | None = None, lost: V | None = None) -> V:
        """Write the encoded form of ``values + residual`` into ``out``, and into ``lost`` what it misses.

        Returns a flag on the device: are all finite?  If not, ``out`` and ``lost`` hold nothing of use.  ``lost`` may
        be the array ``residual``, not ``values``.
        """

    @abstractmethod
    def decode(self, encoded: V, out: V, *, adds: bool = False) -> V:
        """Write the values of ``encoded`` into ``out``, or with ``adds`` add them.

        Returns a flag on the device: is everything in it in range?  If not, ``out`` holds nothing of use.
        """


class KernelLibrary(ABC, Generic[V]):
    """The kernels that a library of arrays runs on a device, in streams and memory that it does not own."""

    name: str
    """As its top module is called."""

    @abstractmethod
    def codec(self, host: Codec) -> DeviceCodec[V]:
        """Return the codec that writes what ``host`` does; ``KeyError`` where there is none."""

    @abstractmethod
    def view(self, array: DeviceArray) -> V:
        """Return the memory of ``array`` as a vector."""

    @abstractmethod
    def launch(self, work: Callable[[], None], *, device: int, stream: int) -> None:
        """Let ``work`` put kernels into ``stream``; it may be called later, and nothing waits for the device."""

    @abstractmethod
    def all_finite(self, values: V) -> V:
        """Return a flag on the device: are all ``values`` finite?"""

    @abstractmethod
    def fill_unless(self, flag: V, values: V, value: int) -> None:
        """Write ``value`` to all ``values`` unless ``flag``, on the device, is true."""
