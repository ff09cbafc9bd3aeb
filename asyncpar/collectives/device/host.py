"""Device resources that all groups of a rank share: the fabric, one poller, and threads for blocking calls."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Final

from asyncpar.collectives.ledger import hash64
from asyncpar.collectives.operation import Closes
from asyncpar.collectives.table import OperationTable
from asyncpar.device.fabric import DeviceDescription, DeviceError, Fabric, FabricUnavailable

_log = logging.getLogger(__name__)

_EAGER_TURNS: Final = 200
"""Number of consecutive turns of the loop in which a wait is polled, before it is polled once in ``_PAUSE`` seconds."""

_PAUSE: Final = 0.001


class Poller:
    """Completes futures when their conditions on devices hold, by polling, without a thread.

    It polls in each turn of the loop at first, which is faster than any timer, and every millisecond later.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []
        self._turns = 0
        self._handle: asyncio.Handle | None = None

    def wait(self, is_done: Callable[[], bool]) -> asyncio.Future[None]:
        """Return a future that is done when ``is_done()`` is true, and fails with its exception; cancel it to stop."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((is_done, future))
        self._turns = 0
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_soon(self._look)
        return future

    def _look(self) -> None:
        self._handle = None
        waiting, self._waiting = self._waiting, []
        still = [(is_done, future) for is_done, future in waiting if not _settle(is_done, future)]
        self._waiting = still + self._waiting  # a callback may have added some
        if not self._waiting or self._handle is not None:
            return
        self._turns += 1
        if self._turns < _EAGER_TURNS:
            self._handle = self._loop.call_soon(self._look)
        else:
            self._handle = self._loop.call_later(_PAUSE, self._look)

    def close(self) -> None:
        """Stop polling, and cancel all waits."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            future.cancel()


def _settle(is_done: Callable[[], bool], future: asyncio.Future[None]) -> bool:
    if future.done():
        return True
    try:
        if not is_done():
            return future.done()
    except DeviceError as error:
        future.set_exception(error)
        return True
    future.set_result(None)
    return True


class DeviceHost:
    """CUDA and NCCL of one rank; one per table of operations.  ``reason`` explains why there is no fabric."""

    def __init__(self, table: OperationTable, fabric: Fabric | None, reason: str = "") -> None:
        self.fabric = fabric
        self.reason = reason
        self.loop = table.loop
        self.poller = Poller(table.loop)
        self.host_ids = tuple(member.host_id for member in table.links.world.members)
        """By rank of the world."""
        self._host_id = self.host_ids[table.links.rank]
        self._devices: dict[int, DeviceDescription] | None = None
        self._warned: set[str] = set()
        self._threads: set[threading.Thread] = set()
        self._channels: weakref.WeakSet[Closes] = weakref.WeakSet()

    @classmethod
    def of(cls, table: OperationTable) -> DeviceHost:
        """Return the host of ``table``, made on first use, when the fabric is opened."""
        found = table.devices
        if found is None:
            fabric, reason = _open()
            found = table.devices = cls(table, fabric, reason)
        assert isinstance(found, cls)
        return found

    def place(self, index: int) -> int:
        """Return a number that distinguishes device ``index`` from all others, including those of other hosts."""
        if self.fabric is None:
            return 0
        if self._devices is None:
            self._devices = {device.index: device for device in self.fabric.devices()}
        found = self._devices.get(index)
        uuid = f"index {index}" if found is None else found.uuid
        return hash64("device", self._host_id, uuid) >> 1

    def warn_once(self, text: str, example: str = "") -> None:
        """Log ``text`` as a warning, once, with the ``example`` of the first time."""
        if text not in self._warned:
            self._warned.add(text)
            _log.warning("%s%s", text, example)

    def in_thread(self, function: Callable[[], object]) -> asyncio.Future[None]:
        """Call ``function``, which may block on a device, in a thread of its own; the future is done when it returns.

        Device errors are logged: nothing can be done about a communicator that cannot be freed.
        """
        done: asyncio.Future[None] = self.loop.create_future()

        def run() -> None:
            try:
                function()
            except DeviceError as error:
                _log.warning("device: %s", error)
            finally:
                self._threads.discard(threading.current_thread())
                self._finish(done)

        thread = threading.Thread(target=run, name="asyncpar device", daemon=True)
        self._threads.add(thread)
        thread.start()
        return done

    def _finish(self, done: asyncio.Future[None]) -> None:
        """Let the loop complete ``done``, unless it is closed, perhaps just now: then nobody waits."""
        try:
            self.loop.call_soon_threadsafe(_finish, done)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def keep(self, channel: Closes) -> None:
        """Close ``channel`` with this host at the latest."""
        self._channels.add(channel)

    def close(self) -> None:
        """End everything on the devices, as the node ends."""
        for channel in list(self._channels):
            channel.close()
        self.poller.close()


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def use_fabric(table: OperationTable, fabric: Fabric) -> DeviceHost:
    """Let the groups of ``table`` move device arrays by ``fabric``, not by NVIDIA's NCCL; call it before they do."""
    table.devices = host = DeviceHost(table, fabric)
    return host


def _open() -> tuple[Fabric | None, str]:
    """Return the fabric of this process, or the reason why there is none."""
    try:
        from asyncpar.device.nccl import open_nccl_fabric  # needs libraries of its own, and only here

        return open_nccl_fabric(), ""
    except FabricUnavailable as error:
        return None, str(error)
