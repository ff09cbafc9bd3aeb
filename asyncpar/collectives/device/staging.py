"""Copies between devices and the host, for operations that NCCL does not have, or not on all ranks."""

from __future__ import annotations

import asyncio
import sys
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np

from asyncpar.collectives.arrays import Array
from asyncpar.collectives.device.host import DeviceHost
from asyncpar.collectives.operation import Operation
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.device.arrays import DeviceArray
from asyncpar.device.fabric import DeviceError, Fabric
from asyncpar.errors import UsageError

Wait: TypeAlias = Callable[[asyncio.Future[None]], Awaitable[None]]

_ENDING_SECONDS: Final = 1.0
"""Seconds that a failed operation waits for its copies; a stream that hangs cannot be made to end."""

_LONGEST: Final = 10.0
_PAUSE: Final = 0.001


class PinnedCopies:
    """Pinned memory for the arrays of one operation, and the stream of copies to and from it.

    The arrays are lent until nothing copies from or to them any more, even if the operation fails before.
    """

    def __init__(self, host: DeviceHost, fabric: Fabric, wait: Wait, device: int) -> None:
        self._host, self._fabric, self._wait = host, fabric, wait
        self._stream = fabric.create_stream(device)
        self._event = fabric.create_event(device)
        self._blocks: list[tuple[int, Array]] = []
        """Address and bytes.  Each is freed with the last array of it, which a lane may read longer than this object
        lives."""
        self._lent: list[DeviceArray] = []
        self._is_idle = True

    async def to_host(self, arrays: Sequence[DeviceArray], caller_stream: int) -> list[Array]:
        """Return the content of ``arrays`` in pinned memory, after the current work of their streams."""
        self._begin(arrays)
        self._follow({caller_stream, *(array.stream for array in arrays if array.stream)})
        copies = [self.empty(array) for array in arrays]
        for array, (address, _) in zip(arrays, self._blocks[-len(arrays) :], strict=True):
            if array.nbytes:
                self._fabric.copy(address, array.pointer, array.nbytes, self._stream)
        await self._done()
        return copies

    async def to_device(self, copies: Sequence[Array], arrays: Sequence[DeviceArray]) -> None:
        """Write ``copies`` into ``arrays``, after the current work of their streams."""
        self._begin(arrays)
        self._follow({array.stream for array in arrays if array.stream})
        for copied, array in zip(copies, arrays, strict=True):
            staged = self.empty(array)
            staged[...] = copied
            if array.nbytes:
                self._fabric.copy(array.pointer, self._blocks[-1][0], array.nbytes, self._stream)
        await self._done()

    def empty(self, array: DeviceArray) -> Array:
        """Return pinned memory for the content of ``array``."""
        nbytes = max(array.nbytes, 1)
        address = self._fabric.allocate_pinned(nbytes)
        block: Array = np.frombuffer(self._fabric.pinned_view(address, nbytes), np.uint8)
        weakref.finalize(block, self._fabric.free_pinned, address).atexit = False
        self._blocks.append((address, block))
        copied: Array = block[: array.nbytes].view(array.dtype).reshape(array.shape)
        return copied

    def _begin(self, arrays: Sequence[DeviceArray]) -> None:
        self._is_idle = False
        self._lent += arrays

    def _follow(self, streams: Iterable[int]) -> None:
        """Make later work wait for the current work of ``streams``."""
        for stream in streams:
            self._fabric.record_event(self._event, stream)
            self._fabric.wait_event(self._stream, self._event)

    async def _done(self) -> None:
        self._fabric.record_event(self._event, self._stream)
        coming = self._host.poller.wait(lambda: self._fabric.query_event(self._event))
        try:
            await self._wait(coming)
        finally:
            coming.cancel()
        self._is_idle = True

    async def close(self) -> None:
        """Free everything when the copies are over; wait for that, unless a stream hangs."""
        if self._is_idle:
            self._release()
            return
        fabric, event = self._fabric, self._event
        try:
            fabric.record_event(event, self._stream)
        except DeviceError:  # the device has failed, which is raised where it was detected
            self._release()
            return
        over = self._host.poller.wait(lambda: fabric.query_event(event))
        over.add_done_callback(self._over)
        await asyncio.wait(
            [over], timeout=_ENDING_SECONDS
        )  # a caller that is cancelled here leaves the rest to ``_over``

    def _over(self, over: asyncio.Future[None]) -> None:
        if over.cancelled():  # the node ends
            self._host.in_thread(self._release_later)
            return
        over.exception()  # from work in the stream, which was raised where it was waited for
        self._release()

    def _release_later(self) -> None:
        try:
            end = time.monotonic() + _LONGEST
            while not self._fabric.query_event(self._event) and time.monotonic() < end:
                time.sleep(_PAUSE)
        finally:
            self._release()

    def _release(self) -> None:
        self._fabric.destroy_event(self._event)
        self._fabric.destroy_stream(self._stream)
        self._blocks.clear()
        self._lent.clear()


class LibraryCopies:
    """Copies by the arrays' own library, on ranks without a fabric."""

    async def to_host(self, arrays: Sequence[DeviceArray], caller_stream: int) -> list[Array]:  # noqa: ARG002
        """Return the content of ``arrays``."""
        return [await off_loop(partial(_get, array), nbytes=array.nbytes, inline=0) for array in arrays]

    async def to_device(self, copies: Sequence[Array], arrays: Sequence[DeviceArray]) -> None:
        """Write ``copies`` into ``arrays``."""
        for copied, array in zip(copies, arrays, strict=True):
            await off_loop(partial(_set, array, copied), nbytes=array.nbytes, inline=0)

    async def close(self) -> None:
        pass


def copies_for(host: DeviceHost, operation: Operation | None, device: int) -> PinnedCopies | LibraryCopies:
    """Return the copies between ``device`` and the host on this rank, as a part of ``operation`` or after one."""
    if host.fabric is None:
        return LibraryCopies()
    wait = _plain_wait if operation is None else partial(operation.wait, None)
    return PinnedCopies(host, host.fabric, wait, device)


async def _plain_wait(coming: asyncio.Future[None]) -> None:
    await coming


def _get(array: DeviceArray) -> Array:
    owner: Any = array.owner
    if array.kind == "torch":
        torch = sys.modules["torch"]
        flat = owner.detach().cpu().contiguous().view(torch.uint8) if owner.dim() else owner.detach().cpu().reshape(1)
        return np.asarray(flat.view(torch.uint8).numpy()).view(array.dtype).reshape(array.shape)
    if hasattr(owner, "get"):
        return np.asarray(owner.get())
    if array.kind in ("jax", "jaxlib"):
        return np.asarray(owner)
    raise _cannot(array)


def _set(array: DeviceArray, copied: Array) -> None:
    owner: Any = array.owner
    if array.kind == "torch":
        torch = sys.modules["torch"]
        staged = torch.from_numpy(np.ascontiguousarray(copied).reshape(-1).view(np.uint8)).view(owner.dtype)
        owner.detach().copy_(staged.view(array.shape))
    elif hasattr(owner, "set"):
        owner.set(np.ascontiguousarray(copied))
    else:
        raise _cannot(array)


def _cannot(array: DeviceArray) -> UsageError:
    return UsageError(
        f"x: asyncpar cannot copy arrays of {array.kind} to the host without NCCL; install asyncpar[nccl], or pass "
        "numpy arrays"
    )
