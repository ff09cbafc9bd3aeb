"""State that is cut into parts: each is changed by one rank, held by two, and moves when the world changes.

Theory of operation.  ``placement.py`` decides which rank has what.  A step changes a part in a second buffer
(``open``).  Before a rank votes it sends its changes to its mirror, gets those that it mirrors, and learns the
checksums of all parts: they are in the digest of the state, so all ranks have one lineage although each has other
parts.  A prepared rank has all of that, so when all survivors are prepared, a lost rank's changes are with its mirror.
In a new world the ranks announce what they have, and send each other what is missing; unneeded parts are dropped only
with the next commit, because that world may be lost before all ranks have their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.collectives.communicator import Communicator
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.elasticity.lineage import checksum
from asyncpar.elasticity.placement import PartMove, PartPlacement, plan_moves
from asyncpar.elasticity.transfer import PartKind, Place, transfer
from asyncpar.errors import DivergedState, StateLost, UsageError

Array: TypeAlias = NDArray[Any]
PartSums: TypeAlias = Mapping[str, tuple[int, ...]]
"""By kind, the checksum of each part."""


class StateParts:
    """The parts of a state on one rank.  ``place`` computes their placement on given hosts."""

    def __init__(
        self, count: int, kinds: Sequence[PartKind], place: Callable[[Sequence[Sequence[int]]], PartPlacement]
    ) -> None:
        self.count = count
        self.kinds = {kind.name: kind for kind in kinds}
        self._place = place
        self._committed: dict[Place, Array] = {}
        self._next: dict[Place, Array] = {}
        self._spare: dict[Place, Array] = {}
        self._is_initial = True
        self._rank = 0
        self._placement = PartPlacement((0,) * count, (None,) * count)
        self.sums: PartSums = {kind.name: _initial_sums(kind) for kind in self.kinds.values()}
        """Checksums of the committed parts."""
        self._next_sums: PartSums | None = None

    # -- the owner's interface -----------------------------------------------------------------------------------------

    @property
    def changed(self) -> tuple[int, ...]:
        """The parts that this rank changes in this world, alone or as others do."""
        return self._placement.changed(self._rank)

    @property
    def owned(self) -> tuple[int, ...]:
        """The parts that this rank owns in this world: each has one owner."""
        return self._placement.owned(self._rank)

    def committed(self, kind: str, part: int) -> Array:
        """Return the committed values of a part of this rank; they must not be changed."""
        return self._committed[kind, part]

    def latest(self, kind: str, part: int) -> Array:
        """Return the values of a part of this rank that a commit would keep."""
        return self._next.get((kind, part), self._committed[kind, part])

    def open(self, kind: str, part: int) -> Array:
        """Return the second buffer of an owned part, to be filled; its content is undefined."""
        place = kind, part
        if place not in self._next:
            spare = self._spare.pop(place, None)
            self._next[place] = np.empty_like(self._committed[place]) if spare is None else spare
        return self._next[place]

    def withdraw(self, kinds: Iterable[str]) -> None:
        """Forget the opened buffers of ``kinds``."""
        names = set(kinds)
        self._next = {place: array for place, array in self._next.items() if place[0] not in names}

    # -- one step ------------------------------------------------------------------------------------------------------

    @property
    def next_sums(self) -> PartSums:
        """The checksums that a commit would keep."""
        return self.sums if self._next_sums is None else self._next_sums

    async def exchange(self, communicator: Communicator) -> None:
        """Send changes to the mirrors, and their checksums to all ranks.  Raises ``PeerError`` as operations do.

        All ranks call it, whatever they have changed.
        """
        mine, kinds = self.changed, list(self.kinds)
        words = np.zeros((2, len(kinds), self.count), np.uint64)
        changed = {place: array for place, array in self._next.items() if place[1] in mine}
        nbytes = sum(array.nbytes for array in changed.values())
        sums = await off_loop(lambda: {place: _sum(array) for place, array in changed.items()}, nbytes=nbytes)
        owned = self.owned
        for (kind, part), found in ((place, found) for place, found in sums.items() if place[1] in owned):
            words[0, kinds.index(kind), part], words[1, kinds.index(kind), part] = found, 1
        if communicator.size > 1:
            await communicator.all_reduce(words, "bor")
        self._next_sums = {
            kind: tuple(
                int(found) if is_changed else before
                for found, is_changed, before in zip(*words[:, row], self.sums[kind], strict=True)
            )
            for row, kind in enumerate(kinds)
        }
        for (kind, part), found in sums.items():
            if found != self._next_sums[kind][part]:
                raise DivergedState(f"part {part} of {kind}: rank {communicator.rank} and its owner differ in it")
        if communicator.size == 1 or not words[1].any():
            return
        moves = [
            PartMove(part, owner, mirror)
            for part, (owner, mirror) in enumerate(zip(self._placement.owners, self._placement.mirrors, strict=True))
            if mirror is not None
        ]
        touched = {(kind, part) for row, kind in enumerate(kinds) for part in np.flatnonzero(words[1, row]).tolist()}
        if not moves:
            return
        received = await transfer(communicator, moves, touched, self.kinds, lambda place: self._next[place])
        await self._check(received, self._next_sums)
        self._next.update(received)

    def replay(self, sums: PartSums) -> None:
        """Set the parts of a rank that has none yet and repeats a step, after which they have ``sums``."""
        self._next_sums = self._checked_sums(sums)

    def commit(self) -> None:
        """Keep the changes, and drop parts that are not needed in this world."""
        owned, held = set(self.changed), self._placement.held(self._rank)
        for place, array in self._next.items():
            before = self._committed.get(place)
            if before is not None and place[1] in owned:
                self._spare[place] = before
            self._committed[place] = array
        for arrays in (self._committed, self._spare):
            for place in [place for place in arrays if place[1] not in held]:
                del arrays[place]
        self.sums, self._next_sums = self.next_sums, None
        self._next = {}
        self._is_initial = False

    def abort(self) -> None:
        """Undo the changes; buffers are not reused, since a thread or an operation may still write to them."""
        self._next, self._next_sums = {}, None

    # -- worlds --------------------------------------------------------------------------------------------------------

    def adopt(self, sums: PartSums) -> None:
        """Set the parts of a newcomer from the others' parts, which have ``sums``."""
        self.sums = self._checked_sums(sums)
        self._committed, self._next, self._spare, self._next_sums = {}, {}, {}, None
        self._is_initial = False

    def _checked_sums(self, sums: PartSums) -> PartSums:
        for kind in self.kinds.values():
            if len(sums.get(kind.name, ())) != self.count:
                raise UsageError(
                    f"state: {kind.name!r} has {self.count} parts here, and {len(sums.get(kind.name, ()))} on the "
                    "ranks that train; a newcomer runs the same program with the same settings"
                )
        return {name: tuple(sums[name]) for name in self.kinds}

    async def reshard(self, communicator: Communicator, hosts: Sequence[Sequence[int]], step: int) -> None:
        """Get the parts that this rank is to have in a new world; ``step`` steps are committed.

        Raises ``StateLost``, on all ranks, for parts that no rank has any more, and ``PeerError`` as operations do.
        """
        self._rank, self._placement = communicator.rank, self._place(hosts)
        mine = self._placement.held(self._rank)
        if self._is_initial:
            for kind in self.kinds.values():
                for part in mine:
                    if (kind.name, part) not in self._committed:
                        self._committed[kind.name, part] = np.array(kind.initial(part))
        present = {part for _, part in self._committed}
        have = np.array([[part in present for part in range(self.count)]], np.uint8)
        holders = have if communicator.size == 1 else await communicator.all_gather(have[0])
        moves, lost = plan_moves([frozenset(np.flatnonzero(row).tolist()) for row in holders], self._placement)
        if lost:
            raise StateLost(
                f"parts {', '.join(map(str, lost))} of {', '.join(self.kinds)}: the rank that had them and its mirror "
                f"are lost with them; {step} steps were committed: go on from a checkpoint of step {step} or before",
                step=step,
                parts=lost,
            )
        if moves:
            places = {(kind, part) for kind in self.kinds for part in range(self.count)}
            received = await transfer(communicator, moves, places, self.kinds, lambda place: self._committed[place])
            await self._check(received, self.sums)
            self._committed.update(received)

    async def _check(self, received: Mapping[Place, Array], sums: PartSums) -> None:
        nbytes = sum(array.nbytes for array in received.values())
        found = await off_loop(lambda: {place: _sum(array) for place, array in received.items()}, nbytes=nbytes)
        for (kind, part), number in found.items():
            if number != sums[kind][part]:
                raise DivergedState(f"part {part} of {kind}: it came with other bits than were committed")


def _sum(array: Array) -> int:
    return checksum(array.view(np.uint8).data)


def _initial_sums(kind: PartKind) -> tuple[int, ...]:
    if not kind.is_uniform:
        return tuple(_sum(kind.initial(part)) for part in range(len(kind.lengths)))
    one_of_each = {length: part for part, length in enumerate(kind.lengths)}
    by_length = {length: _sum(kind.initial(part)) for length, part in one_of_each.items()}
    return tuple(by_length[length] for length in kind.lengths)
