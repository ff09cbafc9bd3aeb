"""The devices of one group: its NCCL communicator, which is made on demand and broken when it fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from asyncpar.collectives.algorithms.catalog import NCCL
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.device.channel import ChannelEnd, DeviceChannel, Origin
from asyncpar.collectives.device.host import DeviceHost
from asyncpar.collectives.device.records import LaunchOrder, RankRecord, Way, next_order
from asyncpar.collectives.device.route import NoRoute, RouteProof
from asyncpar.collectives.operation import Closes, Operation

_MOST_KEPT: Final = 64

if TYPE_CHECKING:
    from asyncpar.collectives.engine import Engine


class DeviceGroup:
    """The state of a group's work on devices.  It does not keep its engine alive, which closes it."""

    def __init__(self, host: DeviceHost, ranks: Sequence[int], place: int, parent: Origin | None = None) -> None:
        self.host = host
        self.ranks = tuple(ranks)
        self.size, self.place = len(ranks), place
        self.is_spread = len({host.host_ids[rank] for rank in self.ranks}) > 1
        """Whether its ranks are on several hosts."""
        self.by_host: Closes | None = None
        """Its parts on this host and between hosts, once they were used: see ``by_host.py``."""
        self._pairs: dict[tuple[int, int], DeviceGroup] = {}
        """Pairs for its messages, by places of receiver and sender."""
        self.parent = parent
        """The origin of the first communicator of this group, if all ranks have it."""
        self.last_order: LaunchOrder | None = None
        """The last order of an operation by NCCL, at the first rank, which decides."""
        self.no_route = ""
        """The reason why NCCL does not connect the hosts of this group, as its ranks have found out."""
        self._no_route_epoch = -1
        """The epoch of the operation that found it out."""
        self.has_route = False
        """Whether its ranks have found out that NCCL connects its hosts."""
        self._whole: DeviceGroup | None = None
        """For a pair: the group of its ranks, which may know of a route."""
        self._epoch = 0
        """The first epoch that this rank accepts."""
        self._end = ChannelEnd("it was closed")
        """The end of the last channel that was broken."""
        self._channel: DeviceChannel | None = None
        self._rows: dict[tuple[object, ...], Array] = {}
        self._known: tuple[bytes, tuple[RankRecord, ...]] = (b"", ())
        """The last records of the ranks, which mostly stay the same."""

    @classmethod
    def of(cls, engine: Engine) -> DeviceGroup:
        """Return the state of ``engine``, made on first use."""
        found = engine.devices
        if found is None:
            found = engine.devices = cls(DeviceHost.of(engine.table), engine.ranks, engine.rank)
        assert isinstance(found, cls)
        return found

    def record(self, device: int, counts: Sequence[int] = ()) -> RankRecord:
        """Return this rank's record for an operation on its ``device``."""
        fabric = self.host.fabric
        if fabric is None:
            return RankRecord(reason=self.host.reason or "it has none", counts=tuple(counts))
        no_route, has_route = self._known_route()
        return RankRecord(
            version=fabric.versions.nccl,
            place=self.host.place(device),
            index=device,
            may_share=fabric.allows_shared_devices,
            reason=no_route,
            has_route=fabric.reaches_other_hosts and not no_route,
            is_proved=fabric.reaches_other_hosts and has_route and not no_route,
            epoch=self._epoch,
            parent=-1 if self.parent is None else self.parent.channel.epoch,
            counts=tuple(counts),
        )

    def _known_route(self) -> tuple[str, bool]:
        """Return the reason why NCCL has no route, and whether it has one, as far as this rank knows."""
        whole = self._whole
        if whole is None:
            return self.no_route, self.has_route
        return self.no_route or whole.no_route, self.has_route or whole.has_route

    def row(self, device: int, counts: Sequence[int] = ()) -> Array:
        """Return the record of this rank as words, which must not be written to."""
        parent = -1 if self.parent is None else self.parent.channel.epoch
        key = (device, self._epoch, parent, *self._known_route(), *counts)
        found = self._rows.get(key)
        if found is None:
            if len(self._rows) >= _MOST_KEPT:
                self._rows.clear()
            found = self._rows[key] = self.record(device, counts).encode()
        return found

    def records(self, rows: Sequence[Array]) -> tuple[RankRecord, ...]:
        """Decode ``rows`` into records."""
        encoded = b"".join([row.tobytes() for row in rows])
        if encoded != self._known[0]:
            self._known = encoded, tuple(RankRecord.decode(row) for row in rows)
        return self._known[1]

    def usable(self, device: int) -> DeviceChannel | None:
        """Return the channel that an operation on ``device`` will most likely use, if there is one that works."""
        channel = self._channel
        if channel is None or channel.failure is not None or channel.device != device or channel.epoch < self._epoch:
            return None
        return channel

    @property
    def connected(self) -> DeviceChannel | None:
        """The channel with a working communicator; None if there is none."""
        channel = self._channel
        return None if channel is None or channel.communicator is None or channel.failure is not None else channel

    def pair(self, receiver: int, sender: int) -> DeviceGroup:
        """Return the state for messages from place ``sender`` to place ``receiver``, one of which is this rank's."""
        found = self._pairs.get((receiver, sender))
        if found is None:
            ranks = self.ranks[receiver], self.ranks[sender]
            found = self._pairs[receiver, sender] = DeviceGroup(self.host, ranks, int(self.place == sender))
            found._whole = self
        return found

    def decide(self, records: Sequence[RankRecord], way: Way | None) -> LaunchOrder:
        """Return the place of an operation, at the first rank, which decides; one without ``way`` is refused."""
        is_by_nccl = way is not None and way.algorithm == NCCL
        fabric = self.host.fabric
        unique_id = None if fabric is None else fabric.get_unique_id
        order = next_order(records, self.last_order, by_nccl=is_by_nccl, unique_id=unique_id)
        if is_by_nccl:
            self.last_order = order
        return order

    def miss(self, order: LaunchOrder, error: BaseException) -> None:
        """End the epoch of ``order``, whose operation is not launched here: later ones would wait for it."""
        if order.number < 0:
            return
        self._refuse(order.epoch, ChannelEnd.of(error))
        if self._channel is not None and self._channel.epoch == order.epoch:
            self._channel.break_off(error)

    def skip(self, error: BaseException) -> None:
        """Miss an operation that others may launch: this rank can only join them in a later epoch.

        Running operations go on.
        """
        self._refuse(self._epoch if self._channel is None else self._channel.epoch, ChannelEnd.of(error))

    def proof(self, order: LaunchOrder, operation: Operation) -> RouteProof | None:
        """Return the test of whether NCCL has a route; None if all ranks know, or are on one host."""
        if not self.is_spread or all(record.is_proved for record in order.records):
            return None
        return RouteProof(operation, self.ranks, self.place)

    def channel(self, order: LaunchOrder, label: str) -> DeviceChannel:
        """Return the channel of the epoch of ``order``.

        Raises ``NoRoute`` if NCCL does not connect the group, ``PeerCancelled`` if the channel was broken here.
        """
        if self.no_route and order.epoch <= self._no_route_epoch:
            raise NoRoute(self.no_route)  # later epochs belong to ranks whose operation failed before they knew
        if order.epoch < self._epoch:
            raise self._end.error(label)
        if self._channel is not None and self._channel.epoch != order.epoch:
            self._channel.retire()
            self._channel = None
        if self._channel is None:
            self._epoch = order.epoch
            self._channel = DeviceChannel(self.host, order, self.place, self._origin(order), self._broken)
        return self._channel

    def note_route(self, order: LaunchOrder, why_not: str) -> None:
        """Record the result of the operation of ``order``: that NCCL has a route, or ``why_not``."""
        if order.epoch < self._no_route_epoch:
            return
        self.no_route = why_not
        self.has_route = not why_not
        self._no_route_epoch = order.epoch if why_not else -1

    def _broken(self, channel: DeviceChannel, end: ChannelEnd) -> None:
        """Drop ``channel``, which cannot be used any more."""
        self._refuse(channel.epoch, end)

    def _refuse(self, epoch: int, end: ChannelEnd) -> None:
        """Accept only epochs later than ``epoch``, because of ``end``."""
        if epoch >= self._epoch:
            self._epoch = epoch + 1
            self._end = end

    def survivors(self, ranks: Sequence[int], place: int) -> DeviceGroup:
        """Return the state of the group of ``ranks``, survivors of this one: it shrinks this one's communicator."""
        channel = self._channel
        if channel is None or channel.communicator is None:
            return DeviceGroup(self.host, ranks, place)
        exclude = tuple(number for number, rank in enumerate(self.ranks) if rank not in ranks)
        places = tuple(channel.places[self.ranks.index(rank)] for rank in ranks)
        return DeviceGroup(self.host, ranks, place, Origin(channel, places, exclude))

    def close(self) -> None:
        """Free the communicator; operations on it are over, or end now."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._forget_parent()
        for pair in self._pairs.values():
            pair.close()
        if self.by_host is not None:
            self.by_host.close()

    def _forget_parent(self) -> None:
        parent, self.parent = self.parent, None
        if parent is not None and parent.made is not None:
            self.host.in_thread(parent.made.abort)

    def _origin(self, order: LaunchOrder) -> Origin | None:
        """Return the origin of the communicator, if all ranks still have the same, on the current devices."""
        parent = self.parent
        epochs = {record.parent for record in order.records}
        places = tuple(record.place for record in order.records)
        if parent is None or epochs != {parent.channel.epoch} or parent.places != places:
            self._forget_parent()
            return None
        self.parent = None
        return parent


def inherit(engine: Engine, left: Engine) -> None:
    """Let the group of ``left``, survivors of the group of ``engine``, shrink its NCCL communicator, if it has one.

    It uses ``ncclCommShrink`` with the abort flag, at the first operation of the survivors on devices: their processes,
    their memory and NCCL's knowledge of the machines stay.
    """
    if isinstance(engine.devices, DeviceGroup):
        left.devices = engine.devices.survivors(left.ranks, left.rank)
