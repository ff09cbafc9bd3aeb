"""The schemes of codecs for gradients on devices: encoded, added and decoded there, with the bits of the host.

The encoded bytes are sent.  Kernels follow each other in the bucket's stream; after decoding, a few bytes inform the
host whether the result is finite, and whether the data of each rank were in range.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncpar.codecs import Codec, Values
from asyncpar.codecs.rows import RowFormat
from asyncpar.collectives.communicator import Communicator
from asyncpar.device.arrays import device_array
from asyncpar.device.codecs.codec import KernelLibrary, Vector
from asyncpar.device.codecs.encoded_sum import DeviceRows, DeviceShardedSum, mark
from asyncpar.errors import ProtocolError
from asyncpar.gradsync.groups import Name
from asyncpar.gradsync.plan import Bucket, Parameters
from asyncpar.gradsync.schemes.device import DeviceScheme, held
from asyncpar.gradsync.schemes.device_memory import DevicePlace, DeviceVector
from asyncpar.gradsync.schemes.scheme import PAIR, Place, ReductionStep

_FINITE = 0
"""Index in the status of whether the result is finite; those of the ranks follow."""


class DeviceLossy(DeviceScheme):
    """Float32 vectors of ``count`` values on a device, with error feedback if requested."""

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        codec: Codec,
        *,
        place: DevicePlace,
        count: int,
        has_feedback: bool,
    ) -> None:
        super().__init__(bucket, size=communicator.size, place=place, count=count, dtype=np.float32)
        assert place.kernels is not None, "without a library the host encodes"
        self._communicator = communicator
        self._kernels: KernelLibrary[Vector] = place.kernels
        self._codec = place.kernels.codec(codec)
        self._vectors: list[DeviceVector] = []
        self._residual = self._zeros(count, np.float32) if has_feedback else None
        self._lost = self._zeros(count, np.float32) if has_feedback else None
        self._status = self._zeros(1 + self.size, np.uint8)
        self._seen = self.memory.pinned(self._status.nbytes, lasts=True)

    def _zeros(self, count: int, dtype: Any) -> DeviceVector:
        made = self.memory.vector(count, dtype)
        self._vectors.append(made)
        self._launch(lambda view=made.view: view.__setitem__(slice(None), 0))  # type: ignore[misc]
        return made

    def _launch(self, work: Callable[[], None]) -> None:
        self.memory.launch(work)

    @property
    def _is_valid(self) -> Vector:
        """Whether everything that a rank sent was in range, by rank."""
        return self._status.view[_FINITE + 1 :]

    # -- gradients in and out --------------------------------------------------------------------------------------

    def pack(self, parameters: Parameters) -> None:
        gradients = self._gradients(parameters)
        flat, end = self.vector.view, self.bucket.count

        def copy() -> None:
            for part, gradient in gradients:
                flat[part] = gradient
            flat[end:] = 0.0

        self._launch(copy)

    def unpack(self, parameters: Parameters, *, factor: float) -> None:
        gradients = self._gradients(parameters)
        result = self.vector.view

        def copy() -> None:
            if factor != 1.0:
                result[...] = result * factor
            for part, gradient in gradients:
                gradient[...] = result[part]

        self._launch(copy)
        self.memory.lead()

    def _gradients(self, parameters: Parameters) -> list[tuple[slice, Vector]]:
        view = self._kernels.view
        return [
            (slice(slot.start, slot.stop), view(device_array(parameters[slot.name].grad, slot.name)))
            for slot in self.bucket.slots
        ]

    # -- the step ----------------------------------------------------------------------------------------------------

    def _ending(self) -> ReductionStep:
        """Return the last step: decode, and report the status to the host."""
        return ReductionStep(self._decode, self.memory.over)

    def _decode(self) -> None:
        status = self._status

        def decode() -> None:
            status.view[_FINITE] = self._decoded(self.vector.view)

        self._launch(decode)
        self.memory.copy(self._seen.address, status.address, status.nbytes)

    @abstractmethod
    def _decoded(self, out: Vector) -> Vector:
        """Decode the received data into ``out`` and return a flag on the device: whether it is finite."""

    def settle(self) -> None:
        seen = self._seen.view(np.dtype(np.uint8), self._status.shape)
        self.is_finite = bool(seen[_FINITE])
        odd = [rank for rank, is_valid in enumerate(seen[_FINITE + 1 :]) if not is_valid]
        if odd and self.is_finite:
            raise ProtocolError(f"{self.bucket}: what rank {odd[0]} sent cannot be decoded: expected what is in range")

    # -- error feedback ----------------------------------------------------------------------------------------------

    @property
    def _feedback(self) -> dict[str, Vector | None]:
        residual, lost = self._residual, self._lost
        return {"residual": None if residual is None else residual.view, "lost": None if lost is None else lost.view}

    def commit(self) -> None:
        self._residual, self._lost = self._lost, self._residual
        if self._residual is not None:
            residual, end = self._residual.view, self.bucket.count
            self._launch(lambda: residual.__setitem__(slice(end, None), 0.0))  # padding belongs to no parameter

    def buffers(self) -> Iterator[NDArray[Any]]:
        feedback = (self._residual, self._lost)
        yield from held(vector for vector in (self.vector, *self._vectors) if vector not in feedback)

    @property
    def residual_nbytes(self) -> int:
        return sum(vector.nbytes for vector in held((self._residual, self._lost)))

    def residuals(self) -> Iterator[tuple[str, Values]]:
        """Yield a copy of each parameter's residual, flat, by name; waits for the device."""
        if self._residual is not None:
            values = self._residual.on_host()
            for slot in self.bucket.slots:
                yield slot.name, values[slot.start : slot.stop]

    def restore_residuals(self, residuals: Mapping[str, Values]) -> None:
        if self._residual is None:
            return
        values = self._residual.on_host()
        for slot in self.bucket.slots:
            kept = residuals.get(slot.name)
            if kept is not None and kept.size == slot.stop - slot.start:
                values[slot.start : slot.stop] = kept
        self._residual.set(values)


class DeviceSharded(DeviceLossy):
    """The sum of decoded shards, by their owners: ``ShardedReduce`` on a device."""

    is_mean = False

    def __init__(
        self, bucket: Bucket, communicator: Communicator, codec: Codec, *, place: DevicePlace, has_feedback: bool
    ) -> None:
        size = communicator.size
        count = -(-bucket.count // size) * size
        super().__init__(bucket, communicator, codec, place=place, count=count, has_feedback=has_feedback)
        made: list[DeviceVector] = []

        def make(length: int, dtype: type[np.generic]) -> Vector:
            made.append(self._zeros(length, dtype))
            return made[-1].view

        self._sum = DeviceShardedSum(
            self._codec,
            bucket.count,
            rank=communicator.rank,
            size=size,
            make=make,
            is_valid=self._is_valid,
            keeps_lost=has_feedback,
        )
        outgoing, incoming, self._owned = made[:3]
        row = self._owned.nbytes
        self._outgoing, self._incoming = outgoing.shaped(size, row), incoming.shaped(size, row)

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:  # noqa: ARG002
        exchange, gather = self._communicator.all_to_all, self._communicator.all_gather
        outgoing: Any = self._outgoing
        incoming: Any = self._incoming
        owned: Any = self._owned
        return [
            ReductionStep(self._encode, lambda: exchange(outgoing, out=incoming, key=f"{key}/shards")),
            ReductionStep(self._sum_owned, lambda: gather(owned, out=incoming, key=f"{key}/sums")),
            self._ending(),
        ]

    def _encode(self) -> None:
        feedback = self._feedback
        self._launch(lambda: self._sum.encode(self.vector.view, **feedback))

    def _sum_owned(self) -> None:
        lost = self._feedback["lost"]
        self._launch(lambda: self._sum.sum_owned(lost=lost))

    def _decoded(self, out: Vector) -> Vector:
        return self._sum.decode(out)


class DevicePair(DeviceLossy):
    """The mean of the vectors of two ranks, each of which decodes both: ``Pair`` on a device."""

    is_mean = True

    def __init__(
        self, bucket: Bucket, communicator: Communicator, codec: Codec, *, place: DevicePlace, has_feedback: bool
    ) -> None:
        super().__init__(bucket, communicator, codec, place=place, count=bucket.count, has_feedback=has_feedback)
        nbytes = RowFormat(codec, bucket.count).nbytes
        self._outgoing = self._zeros(nbytes, np.uint8)
        self._incoming = self._zeros(PAIR * nbytes, np.uint8).shaped(PAIR, nbytes)
        rows = self._incoming.view.reshape(PAIR, nbytes)
        self._rows = DeviceRows(self._codec, bucket.count, rows=rows, is_valid=self._is_valid)

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:  # noqa: ARG002
        gather = self._communicator.all_gather
        outgoing: Any = self._outgoing
        incoming: Any = self._incoming
        return [
            ReductionStep(self._encode, lambda: gather(outgoing, out=incoming, key=f"{key}/both")),
            self._ending(),
        ]

    def _encode(self) -> None:
        row, feedback = self._outgoing.view, self._feedback

        def encode() -> None:
            self._is_valid[...] = 1
            mark(row, self._rows.encode(self.vector.view, row, **feedback))

        self._launch(encode)

    def _decoded(self, out: Vector) -> Vector:
        is_finite = self._rows.are_finite()
        self._rows.decode(0, out, adds=False, is_finite=is_finite)
        self._rows.decode(1, out, adds=True, is_finite=is_finite)
        out[...] = out * (1 / PAIR)
        return is_finite & self._kernels.all_finite(out)


class DeviceSummed(DeviceLossy):
    """The sum of encoded forms by an all-reduce in the codec's ``sum_dtype``: ``Summed`` on a device.

    NCCL computes the sum, in another order than the host if there are more than two ranks.
    """

    is_mean = False

    def __init__(
        self,
        bucket: Bucket,
        communicator: Communicator,
        codec: Codec,
        *,
        place: DevicePlace,
        has_feedback: bool,
        divisor: int,
    ) -> None:
        super().__init__(bucket, communicator, codec, place=place, count=bucket.count, has_feedback=has_feedback)
        assert codec.sum_dtype is not None, "the codec is summable"
        self.divisor = divisor
        self._encoded = self._zeros(codec.encoded_bytes(bucket.count), np.uint8)
        self._summands = self._encoded.shaped(bucket.count, dtype=codec.sum_dtype)

    def reduction_steps(self, key: Name, place: Place) -> Sequence[ReductionStep]:  # noqa: ARG002
        reduce = self._communicator.all_reduce
        summands: Any = self._summands
        return [ReductionStep(self._encode, lambda: reduce(summands, key=str(key))), self._ending()]

    def _encode(self) -> None:
        feedback, encoded, flat = self._feedback, self._encoded.view, self.vector.view

        def encode() -> None:
            self._is_valid[...] = 1
            residual, lost = feedback["residual"], feedback["lost"]
            if self.divisor > 1:
                flat[...] = (flat if residual is None else flat + residual) * (1.0 / self.divisor)
                residual = None
            is_finite = self._codec.encode(flat, encoded, residual=residual, lost=lost)
            self._kernels.fill_unless(is_finite, encoded, 0xFF)  # NaN in either format, which makes the sum NaN
            if self.divisor > 1 and lost is not None:
                lost[...] = lost * float(self.divisor)

        self._launch(encode)

    def _decoded(self, out: Vector) -> Vector:
        return self._codec.decode(self._encoded.view, out)


def device_scheme(
    bucket: Bucket, communicator: Communicator, codec: Codec, *, place: DevicePlace, has_feedback: bool, divisor: int
) -> DeviceLossy:
    """Return the scheme of ``codec``, which its library implements on the device."""
    if codec.is_summable:
        return DeviceSummed(bucket, communicator, codec, place=place, has_feedback=has_feedback, divisor=divisor)
    kind = DevicePair if communicator.size == PAIR else DeviceSharded
    return kind(bucket, communicator, codec, place=place, has_feedback=has_feedback)


def has_kernels(codec: object, place: DevicePlace) -> bool:
    """Return whether the gradients' library has a device codec with the same encoding as ``codec``."""
    if place.kernels is None or not isinstance(codec, Codec):
        return False
    try:
        place.kernels.codec(codec)
    except KeyError:
        return False
    return True
