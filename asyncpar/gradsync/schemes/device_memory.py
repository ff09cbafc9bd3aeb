"""The place of gradients on a device, and the memory, stream and events of a bucket there."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator, engine_of
from asyncpar.collectives.device.host import DeviceHost
from asyncpar.collectives.device.state import DeviceGroup
from asyncpar.device.arrays import DeviceArray, device_array, is_device_array
from asyncpar.device.codecs.codec import KernelLibrary, Vector
from asyncpar.device.codecs.libraries import kernel_library
from asyncpar.device.fabric import DeviceError, Fabric
from asyncpar.errors import UsageError
from asyncpar.gradsync.plan import Parameters

_ENDING_SECONDS = 10.0
_EAGER_CHECKS = 200
_PAUSE = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlace:
    """The device of all gradients of this rank, the fabric that moves them, and the library that computes with them."""

    fabric: Fabric
    device: int
    libraries: tuple[str, ...]
    """The libraries of the gradients."""
    kernels: KernelLibrary[Any] | None = field(compare=False)
    """None if the gradients' library has no codecs, or the gradients are of several libraries."""
    communicator: Communicator = field(compare=False)
    """Its timeout also limits waiting for the device."""

    @property
    def host(self) -> DeviceHost:
        """The object that polls events."""
        return DeviceGroup.of(engine_of(self.communicator)).host

    @classmethod
    def of(cls, parameters: Parameters, communicator: Communicator) -> Self | None:
        """Return the place of the gradients; None if all are on the host.

        Raises ``UsageError`` if they are on different devices, or this rank has no NCCL.
        """
        places: dict[int | None, str] = {}
        arrays: dict[str, DeviceArray] = {}
        for name, parameter in parameters.items():
            on: int | None = None
            if is_device_array(parameter.grad):
                array = device_array(parameter.grad, name)
                on, arrays[array.kind] = array.device, array
            places.setdefault(on, name)
        if len(places) > 1:
            found = " and ".join(
                f"{name} on {'the host' if on is None else f'cuda:{on}'}" for on, name in places.items()
            )
            raise UsageError(f"parameters: expected all gradients of a rank in one place, got {found}")
        (device,) = places or (None,)
        if device is None:
            return None
        host = DeviceGroup.of(engine_of(communicator)).host
        if host.fabric is None:
            raise UsageError(f"parameters: gradients on devices need NCCL on every rank; here {host.reason}")
        kernels = kernel_library(next(iter(arrays.values()))) if len(arrays) == 1 else None
        libraries = tuple(sorted(arrays))
        return cls(fabric=host.fabric, device=device, libraries=libraries, kernels=kernels, communicator=communicator)


class DeviceVector:
    """``count`` values of ``dtype`` in a bucket's memory: an array for collectives, which start after its stream."""

    def __init__(self, memory: BucketMemory, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.memory, self.address, self.dtype = memory, address, dtype
        self.shape = shape
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": None,
            "version": 3,
            "stream": self.memory.stream,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.memory.place.device

    def shaped(self, *shape: int, dtype: np.dtype[Any] | None = None) -> DeviceVector:
        """Return the same memory with another shape, or as another dtype."""
        return DeviceVector(self.memory, self.address, shape, self.dtype if dtype is None else dtype)

    @cached_property
    def view(self) -> Vector:
        """Return the memory as the vector of the library that computes with it."""
        kernels = self.memory.place.kernels
        assert kernels is not None, "without a library the host computes"
        return kernels.view(device_array(self))

    def on_host(self) -> NDArray[Any]:
        """Return a copy of the values; waits for the work in the stream."""
        pinned = self.memory.pinned(self.nbytes)
        try:
            self.memory.copy(pinned.address, self.address, self.nbytes)
            self.memory.wait()
            return pinned.view(self.dtype, self.shape).copy()
        finally:
            pinned.free()

    def set(self, values: NDArray[Any]) -> None:
        """Write ``values``; waits for the copy."""
        pinned = self.memory.pinned(self.nbytes)
        try:
            pinned.view(self.dtype, self.shape)[...] = values
            self.memory.copy(self.address, pinned.address, self.nbytes)
            self.memory.wait()
        finally:
            pinned.free()


class PinnedMemory:
    """Host memory that the device copies to and from; ``free`` it when no copy is in progress."""

    def __init__(self, fabric: Fabric, nbytes: int) -> None:
        self._fabric, self.nbytes = fabric, nbytes
        self.address = fabric.allocate_pinned(max(nbytes, 1))

    def view(self, dtype: np.dtype[Any], shape: tuple[int, ...] | int) -> NDArray[Any]:
        """Return the memory as an array."""
        values: NDArray[Any] = np.frombuffer(self._fabric.pinned_view(self.address, max(self.nbytes, 1)), np.uint8)
        return values[: self.nbytes].view(dtype).reshape(shape)

    def free(self) -> None:
        self._fabric.free_pinned(self.address)


@dataclass(slots=True)
class _Held:
    """Resources that a bucket holds on the device."""

    event: int
    addresses: list[int] = field(default_factory=list)
    pinned: list[PinnedMemory] = field(default_factory=list)
    events: dict[int, int] = field(default_factory=dict)
    """By stream of the caller, in this step: the event after which its gradients are final."""
    free: list[int] = field(default_factory=list)
    """Events of earlier steps, whose streams may be gone."""


class BucketMemory:
    """A stream for the work on one bucket, and its memory; released by ``close``."""

    def __init__(self, place: DevicePlace) -> None:
        self.place = place
        self._fabric = place.fabric
        self.stream = place.fabric.create_stream(place.device)
        self._held = _Held(place.fabric.create_event(place.device))
        self._release = weakref.finalize(self, _release, place.fabric, place.device, self.stream, self._held)

    def vector(self, count: int, dtype: Any) -> DeviceVector:
        """Return uninitialized device memory that lasts as long as the bucket."""
        found = np.dtype(dtype)
        address = self._fabric.allocate(max(count * found.itemsize, 1), self.place.device)
        self._held.addresses.append(address)
        return DeviceVector(self, address, (count,), found)

    def pinned(self, nbytes: int, *, lasts: bool = False) -> PinnedMemory:
        """Return pinned host memory; with ``lasts`` it is released with the bucket."""
        made = PinnedMemory(self._fabric, nbytes)
        if lasts:
            self._held.pinned.append(made)
        return made

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy in the bucket's stream."""
        if nbytes:
            self._fabric.copy(target, source, nbytes, self.stream)

    def launch(self, work: Callable[[], None]) -> None:
        """Run ``work`` to enqueue kernels in the bucket's stream."""
        assert self.place.kernels is not None, "without a library the host computes"
        self.place.kernels.launch(work, device=self.place.device, stream=self.stream)

    def begin_step(self) -> None:
        """Forget the streams of earlier steps."""
        self._held.free += self._held.events.values()
        self._held.events.clear()

    def follow(self, stream: int) -> None:
        """Make later work in the bucket's stream wait for the current work in ``stream``."""
        event = self._held.events.get(stream)
        if event is None:
            free = self._held.free
            event = free.pop() if free else self._fabric.create_event(self.place.device)
            self._held.events[stream] = event
        self._fabric.record_event(event, stream)
        self._fabric.wait_event(self.stream, event)

    def take_final(self, gradient: object) -> None:
        """Record that ``gradient`` is final once the current work in its library's stream is done."""
        stream = device_array(gradient, "grad").stream
        if stream is not None:
            self.follow(stream)

    def lead(self) -> None:
        """Make later work in the followed streams wait for the current work in the bucket's stream."""
        self._fabric.record_event(self._held.event, self.stream)
        for stream in self._held.events:
            self._fabric.wait_event(stream, self._held.event)

    def wait(self) -> None:
        """Wait for the work in the stream; in a thread, unless it is nearly done.

        Raises ``DeviceError`` if that exceeds the time limit of an operation.
        """
        self._fabric.record_event(self._held.event, self.stream)
        begun, checks, timeout = time.monotonic(), 0, self.place.communicator.timeout
        while not self._fabric.query_event(self._held.event):
            checks += 1
            time.sleep(0 if checks < _EAGER_CHECKS else _PAUSE)
            if timeout is not None and time.monotonic() > begun + timeout:
                raise self._late(timeout)

    async def over(self) -> None:
        """Wait for the work in the stream, like ``wait`` but without blocking the loop or a thread."""
        self._fabric.record_event(self._held.event, self.stream)
        event, timeout = self._held.event, self.place.communicator.timeout
        coming: asyncio.Future[None] = self.place.host.poller.wait(lambda: self._fabric.query_event(event))
        try:
            await asyncio.wait({coming}, timeout=timeout)
            if not coming.done():
                raise self._late(timeout)
            coming.result()
        finally:
            coming.cancel()

    def _late(self, timeout: float | None) -> DeviceError:
        return DeviceError(
            f"gradients on cuda:{self.place.device}: their bucket was not done within {timeout} s; does a stream that "
            "computes gradients hang?"
        )

    def close(self) -> None:
        """Release everything once the stream is empty; idempotent."""
        self._release()


def _release(fabric: Fabric, device: int, stream: int, held: _Held) -> None:
    try:
        fabric.record_event(held.event, stream)
        end = time.monotonic() + _ENDING_SECONDS
        while not fabric.query_event(held.event) and time.monotonic() < end:
            time.sleep(_PAUSE)
    except DeviceError:  # of work in the stream, which was raised where it was waited for
        pass
    for one in (held.event, *held.events.values(), *held.free):
        fabric.destroy_event(one)
    fabric.destroy_stream(stream)
    for address in held.addresses:
        fabric.free(address, device)
    for pinned in held.pinned:
        pinned.free()
