"""CUDA devices in the memory of this process: allocations, arrays, streams and events, for tests without a GPU.

Theory of operation.  Addresses of devices are numbers from a range of their own, which nothing but a ``FakeCluster``
can read.  Work that is given to a stream runs later: time on the devices advances by one tick with each query (for an
event or for the state of a communicator), and each piece of work waits for a number of ticks drawn from a seeded
generator.  So the order in which streams run is random, and repeatable with the same seed.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.device.arrays import DeviceArray
from asyncpar.device.codecs.array_kernels import ArrayLibrary
from asyncpar.device.codecs.codec import KernelLibrary
from asyncpar.device.fabric import LEGACY_DEFAULT_STREAM, DeviceError

_FIRST_ADDRESS = 0x7F00_0000_0000
_ALIGNMENT = 512
_LONGEST_DELAY = 4


class StreamWork(Protocol):
    """A piece of work in a stream."""

    def step(self) -> bool:
        """Try to run; return whether it is complete."""
        ...


class _Simple:
    """StreamWork that can run at any time."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def step(self) -> bool:
        self._run()
        return True


class _Wait:
    """StreamWork that is complete when an event has occurred."""

    def __init__(self, is_done: Callable[[], bool]) -> None:
        self._is_done = is_done

    def step(self) -> bool:
        return self._is_done()


class FakeCluster:
    """The devices that all ranks of a test see, and their allocations."""

    def __init__(self, *, seed: int = 0, devices: int = 16, longest_delay: int = _LONGEST_DELAY) -> None:
        self.lock = threading.RLock()
        self.random = random.Random(seed)
        self.devices = devices
        self.ticks = 0
        self.faults: list[str] = []
        """Errors of work on the devices: access to freed memory, for example."""
        self.longest_delay = longest_delay
        """The most ticks that work waits once it is at the head of its stream."""
        self._next = _FIRST_ADDRESS
        self._memory: dict[int, tuple[Array, int]] = {}
        self._streams: dict[int, deque[list[Any]]] = {}
        self._stream_devices: dict[int, int] = {}
        self._events: dict[int, tuple[int, set[int]]] = {}
        """By event: how often it was recorded, and which of these records have not completed, in any stream."""
        self._event_devices: dict[int, int] = {}
        self._handles = 1000
        self.cliques: dict[bytes, Any] = {}
        """The state shared by the ranks of a communicator, by its unique id."""
        self.kernels: KernelLibrary[Any] | None = FakeKernels(self)
        """The kernels that compute with arrays; None for a library that has no codecs."""

    # -- memory ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, device: int) -> int:
        """Return the address of new memory of ``device``, -1 for the host."""
        with self.lock:
            address = self._next
            self._next += max(nbytes, 1) + _ALIGNMENT - max(nbytes, 1) % _ALIGNMENT
            self._memory[address] = np.full(nbytes, 0xAB, np.uint8), device
            return address

    def free(self, address: int) -> None:
        with self.lock:
            if self._memory.pop(address, None) is None:
                raise DeviceError(f"cudaFree: {address:#x} is not allocated")

    def memory(self, address: int, nbytes: int) -> Array:
        """Return allocated memory as bytes.  Raises ``DeviceError`` for other addresses, and records a fault."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        with self.lock:
            for start, (block, _) in self._memory.items():
                if start <= address and address + nbytes <= start + len(block):
                    return block[address - start : address - start + nbytes]
        self.faults.append(f"illegal memory access: {nbytes} bytes at {address:#x}")
        raise DeviceError(self.faults[-1])

    def bytes_on(self, device: int) -> list[int]:
        """Return the sizes of allocations on ``device``, -1 for pinned memory of the host, that were not freed."""
        return [len(block) for block, on in self._memory.values() if on == device]

    @property
    def allocations(self) -> int:
        """The number of allocations that were not freed."""
        return len(self._memory)

    # -- streams and events ----------------------------------------------------------------------------------------

    @property
    def streams(self) -> int:
        """The number of streams that were not destroyed."""
        return len(self._stream_devices)

    @property
    def events(self) -> int:
        """The number of events that were not destroyed."""
        return len(self._events)

    def handle(self) -> int:
        self._handles += 1
        return self._handles

    def create_stream(self, device: int) -> int:
        with self.lock:
            stream = self.handle()
            self._stream_devices[stream] = device
            self._streams[stream] = deque()
            return stream

    def destroy_stream(self, stream: int) -> None:
        """Forget a stream; work in it still runs, as on a device."""
        with self.lock:
            if self._stream_devices.pop(stream, None) is None:
                raise DeviceError(f"cudaStreamDestroy: {stream} is no stream")

    def stream_device(self, stream: int) -> int | None:
        if stream <= 2:
            return None
        if stream not in self._stream_devices:
            raise DeviceError(f"{stream} is no stream")
        return self._stream_devices[stream]

    def create_event(self, device: int) -> int:
        with self.lock:
            event = self.handle()
            self._events[event] = 0, set()
            self._event_devices[event] = device
            return event

    def destroy_event(self, event: int) -> None:
        with self.lock:
            if self._events.pop(event, None) is None:
                raise DeviceError(f"cudaEventDestroy: {event} is no event")
            del self._event_devices[event]

    def record_event(self, event: int, stream: int) -> None:
        with self.lock:
            recorded, coming = self._events[event]
            if self.stream_device(stream) not in (None, self._event_devices[event]):
                raise DeviceError("cudaEventRecord: cudaErrorInvalidResourceHandle: event and stream of two devices")
            number = recorded + 1
            coming.add(number)
            self._events[event] = number, coming
        self.enqueue(stream, _Simple(lambda: coming.discard(number)))

    def wait_event(self, stream: int, event: int) -> None:
        """Wait for the record that is currently the last one, whatever is recorded later."""
        with self.lock:
            number, coming = self._events[event]
        self.enqueue(stream, _Wait(lambda: number not in coming))

    def query_event(self, event: int) -> bool:
        with self.lock:
            self.tick()
            number, coming = self._events[event]
            return number not in coming

    def enqueue(self, stream: int, work: StreamWork) -> None:
        """Append ``work`` to ``stream``."""
        with self.lock:
            if stream > 2 and stream not in self._stream_devices:
                raise DeviceError(f"{stream} is no stream")
            delay = self.random.randint(0, self.longest_delay)
            self._streams.setdefault(stream, deque()).append([delay, work])

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        def run() -> None:
            self.memory(target, nbytes)[...] = self.memory(source, nbytes)

        self.enqueue(stream, _Simple(run))

    def run(self, work: Callable[[], object], stream: int) -> None:
        """Call ``work`` when ``stream`` reaches it, like a kernel."""
        self.enqueue(stream, _Simple(work))

    def tick(self) -> None:
        """Advance time on all devices."""
        with self.lock:
            self.ticks += 1
            busy = [queue for queue in self._streams.values() if queue]
            self.random.shuffle(busy)
            for queue in busy:
                self._run_head(queue)

    def _run_head(self, queue: deque[list[Any]]) -> None:
        head = queue[0]
        if head[0] > 0:
            head[0] -= 1
            return
        try:
            is_over = head[1].step()
        except DeviceError:
            is_over = True  # the fault is recorded
        if is_over:
            queue.popleft()

    def drop_work(self) -> None:
        """Forget all work in streams that has not run."""
        with self.lock:
            for queue in self._streams.values():
                queue.clear()

    def end_waits(self, stream: int) -> None:
        """Let the work in ``stream`` begin now, whatever its delay."""
        with self.lock:
            for one in self._streams.get(stream, ()):
                one[0] = 0

    def synchronize(self, stream: int, *, ticks: int = 10_000) -> bool:
        """Advance time until ``stream`` is empty; return False if it is not after so many ticks: it hangs."""
        for _ in range(ticks):
            if not self._streams.get(stream):
                return True
            self.tick()
        return False


class FakeKernels(ArrayLibrary):
    """A library of kernels for the arrays of ``cluster``."""

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(np)
        self.name = "asyncpar"
        self.launches = 0
        """The number of times work was put into a stream."""
        self._cluster = cluster

    def view(self, array: DeviceArray) -> Array:
        return self._cluster.memory(array.pointer, array.nbytes).view(array.dtype)

    def launch(self, work: Callable[[], None], *, device: int, stream: int) -> None:
        self.launches += 1
        on = self._cluster.stream_device(stream)
        assert on in (None, device), f"a kernel of cuda:{device} in a stream of cuda:{on}"

        def run() -> None:
            with np.errstate(all="ignore"):
                work()

        self._cluster.run(run, stream)


class FakeDeviceArray:
    """An array on a device of ``cluster``; its memory is freed with it."""

    def __init__(
        self,
        cluster: FakeCluster,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        device: int = 0,
        *,
        is_writable: bool = True,
    ) -> None:
        self.cluster, self.shape, self.dtype, self.index = cluster, tuple(shape), np.dtype(dtype), device
        self.is_writable = is_writable
        self.strides: tuple[int, ...] | None = None
        self.stream = LEGACY_DEFAULT_STREAM
        self.nbytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        self.address = cluster.allocate(self.nbytes, device)

    @classmethod
    def of(cls, cluster: FakeCluster, values: Array, device: int = 0) -> FakeDeviceArray:
        """Return an array on ``device`` with these values."""
        array = cls(cluster, values.shape, values.dtype, device)
        array.set(values)
        return array

    def set(self, values: Array) -> None:
        """Overwrite the array at once, bypassing all streams."""
        self.cluster.memory(self.address, self.nbytes)[...] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)

    def get(self) -> Array:
        """Return the current values, bypassing all streams."""
        copied: Array = self.cluster.memory(self.address, self.nbytes).copy().view(self.dtype).reshape(self.shape)
        return copied

    def __float__(self) -> float:
        """Return the only value, once the array's stream has reached it."""
        assert self.cluster.synchronize(self.stream), "its stream hangs"
        return float(self.get().reshape(()))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, not self.is_writable),
            "strides": self.strides,
            "version": 3,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.index

    def __asyncpar_empty__(self, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> FakeDeviceArray:
        return FakeDeviceArray(self.cluster, shape, dtype or self.dtype, self.index)

    def __asyncpar_stream__(self) -> int:
        return self.stream

    def __asyncpar_kernels__(self) -> KernelLibrary[Any] | None:
        return self.cluster.kernels

    def __del__(self) -> None:
        cluster: FakeCluster | None = getattr(self, "cluster", None)
        if cluster is not None and hasattr(self, "address"):
            cluster.free(self.address)


@contextmanager
def nothing_leaks(cluster: FakeCluster) -> Iterator[None]:
    """Check that streams and events made in the block are destroyed in it, and that no work failed."""
    before = cluster.streams, cluster.events
    yield
    assert (cluster.streams, cluster.events) == before, "streams or events were left behind"
    assert cluster.faults == []
