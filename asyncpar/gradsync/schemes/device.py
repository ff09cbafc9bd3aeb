"""The schemes of gradients on CUDA devices: packed, averaged and written back on a stream of the bucket.

Nothing here waits for the backward pass: when a gradient is final, an event is recorded in the stream that computes it,
and the bucket's stream waits for that event before it copies.  A step ends on all ranks alike, so the host must know
whether the mean is finite: the library of the gradients checks it and copies one byte to the host, or the whole mean
where it cannot check.  Gradients are written after that, and the streams that computed them wait for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.config.placement import UNPLACED, Placement
from asyncpar.device.arrays import device_array
from asyncpar.gradsync.device_sums import Sums, add_to_mean
from asyncpar.gradsync.groups import Name
from asyncpar.gradsync.plan import Bucket, HasGradient, Parameters, Slot
from asyncpar.gradsync.schemes.device_memory import BucketMemory, DevicePlace, DeviceVector
from asyncpar.gradsync.schemes.scheme import Place, ReductionStep, Scheme, all_finite


class DeviceScheme(Scheme):
    """A bucket on a device; ``vector`` is its ``flat`` and ``result``."""

    def __init__(self, bucket: Bucket, *, size: int, place: DevicePlace, count: int, dtype: Any) -> None:
        super().__init__(bucket, size=size)
        self.memory = BucketMemory(place)
        self.vector = self.memory.vector(count, dtype)
        self.flat = self.result = self.vector  # type: ignore[assignment]  # an array to collectives, not numpy's

    @abstractmethod
    def pack(self, parameters: Parameters) -> None:
        """Copy the gradients into the bucket."""

    def add_micro_steps(self, sums: Sums, micro_steps: int) -> None:
        """Make the bucket the mean over micro-steps: ``sums`` covers all but the last, which is packed."""
        kernels = self.memory.place.kernels
        assert kernels is not None, "with several libraries there are no sums"
        flat, slots = self.vector.view, self.bucket.slots

        def work() -> None:
            for slot in slots:
                add_to_mean(kernels, flat, slice(slot.start, slot.stop), sums[slot.name], micro_steps)

        self.memory.launch(work)

    @abstractmethod
    def unpack(self, parameters: Parameters, *, factor: float) -> None:
        """Write ``result * factor`` into the gradients, ahead of any later work of their streams."""

    def find_non_finite(self) -> list[str]:
        """Return the names of the parameters whose values in the bucket are not all finite."""
        values = self.vector.on_host()
        return [slot.name for slot in self.bucket.slots if not all_finite(values[slot.start : slot.stop])]

    def close(self) -> None:
        self.memory.close()


class DeviceMean(DeviceScheme):
    """The mean of a bucket on a device, by ``all_reduce``."""

    is_mean = True

    def __init__(self, bucket: Bucket, communicator: Communicator, place: DevicePlace) -> None:
        super().__init__(bucket, size=communicator.size, place=place, count=bucket.count, dtype=bucket.dtype)
        self._communicator = communicator
        can_check = place.kernels is not None
        self._flag = self.memory.vector(1, np.uint8) if can_check else self.vector
        self._seen = self.memory.pinned(self._flag.nbytes, lasts=True)

    def pack(self, parameters: Parameters) -> None:
        for slot, pointer, place in self._places(parameters):
            self.memory.copy(place, pointer, self._nbytes(slot))

    def unpack(self, parameters: Parameters, *, factor: float) -> None:
        assert factor == 1.0, "NCCL has divided by the number of ranks"
        for slot, pointer, place in self._places(parameters):
            self.memory.copy(pointer, place, self._nbytes(slot))
        self.memory.lead()

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:  # noqa: ARG002
        vector: Any = self.vector
        communicator = self._communicator
        return [
            ReductionStep(None, lambda: communicator.all_reduce(vector, op="mean", key=str(key))),
            ReductionStep(self._start_check, self.memory.over),
        ]

    def settle(self) -> None:
        seen = self._seen.view(self._flag.dtype, self._flag.shape)
        self.is_finite = all_finite(seen) if self._flag is self.vector else bool(seen[0])

    def _start_check(self) -> None:
        """Make the device report to the host whether the mean is finite."""
        kernels = self.memory.place.kernels
        if kernels is not None:
            flag, values = self._flag.view, self.vector.view

            def check() -> None:
                flag[0] = kernels.all_finite(values)

            self.memory.launch(check)
        self.memory.copy(self._seen.address, self._flag.address, self._flag.nbytes)

    def _places(self, parameters: Parameters) -> list[tuple[Slot, int, int]]:
        """Return for each slot the address of the gradient, and that of its values in the bucket."""
        itemsize = self.vector.dtype.itemsize
        return [
            (
                slot,
                device_array(parameters[slot.name].grad, slot.name).pointer,
                self.vector.address + slot.start * itemsize,
            )
            for slot in self.bucket.slots
        ]

    def _nbytes(self, slot: Slot) -> int:
        return (slot.stop - slot.start) * self.vector.dtype.itemsize


class HostMirrors:
    """Copies of all gradients in pinned host memory, for codecs that work there."""

    def __init__(self, parameters: Parameters, place: DevicePlace) -> None:
        self.parameters: dict[str, HasGradient] = {}
        self._memories: dict[str, tuple[BucketMemory, int]] = {}
        for name, parameter in parameters.items():
            array = device_array(parameter.grad, name)
            if array.nbytes:
                memory = BucketMemory(place)
                pinned = memory.pinned(array.nbytes, lasts=True)
                self._memories[name] = memory, pinned.address
                values = pinned.view(array.dtype, array.shape)
            else:
                values = np.empty(array.shape, array.dtype)
            self.parameters[name] = _Mirror(name, values, getattr(parameter, "placement", UNPLACED))

    def begin_step(self) -> None:
        """Forget the streams of earlier steps."""
        for memory, _ in self._memories.values():
            memory.begin_step()

    def take_final(self, name: str, gradient: object) -> None:
        """Record that ``gradient`` is final once the current work in its library's stream is done."""
        if name in self._memories:
            self._memories[name][0].take_final(gradient)

    def fetch(self, parameters: Parameters, names: Iterable[str]) -> None:
        """Copy the gradients of ``names`` to the host once they are final; waits for the copies."""
        found = [(*self._memories[name], device_array(parameters[name].grad, name)) for name in names]
        for memory, pinned, array in found:
            memory.copy(pinned, array.pointer, array.nbytes)
        for memory, _, _ in found:
            memory.wait()

    def store(self, parameters: Parameters) -> None:
        """Copy all gradients back, ahead of any later work of their streams."""
        for name, (memory, pinned) in self._memories.items():
            array = device_array(parameters[name].grad, name)
            memory.copy(array.pointer, pinned, array.nbytes)
            memory.lead()

    def close(self) -> None:
        """Release everything; idempotent."""
        for memory, _ in self._memories.values():
            memory.close()


@dataclass(slots=True)
class _Mirror:
    """A parameter as codecs see it."""

    name: str
    grad: NDArray[Any]
    placement: Placement


def held(vectors: Iterable[DeviceVector | None]) -> Iterator[Any]:
    """Yield the vectors that exist, as memory that a scheme holds."""
    yield from (vector for vector in vectors if vector is not None)
