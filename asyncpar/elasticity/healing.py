"""Healing, the newcomer's side: fetch a pinned state in blocks from all donors, then the later updates."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from asyncpar.core.concurrency.tasks import CleanTaskGroup, off_loop
from asyncpar.elasticity.donors import Donor, SnapshotDescription, StepUpdate
from asyncpar.elasticity.lineage import block_of, checksum
from asyncpar.elasticity.memory import populate
from asyncpar.elasticity.settings import check_settings
from asyncpar.elasticity.state import ElasticState
from asyncpar.errors import AsyncparError, DivergedState, NotFound, PeerLost, ProtocolError, UsageError
from asyncpar.hosts.lineage import Lineage, differs_from_group

MOST_DONORS = 2
"""The number of donors from which the state is fetched at a time: each of them goes on in new memory."""

ATTEMPTS = 8
"""Attempts of a newcomer to have the same state pinned by all donors before it gives up."""

_AT_A_TIME = 8
"""Concurrent requests for blocks to one donor, which answers when its event loop gets a turn between computations."""

_LOST = (PeerLost, NotFound, ConnectionError)


class Healing:
    """Brings ``state`` to that of the donors, and then keeps up with them."""

    def __init__(self, donors: Sequence[Donor], state: ElasticState) -> None:
        self._donors = list(donors[:MOST_DONORS])
        self._state = state
        self._pinned: dict[int, SnapshotDescription] = {}
        """By place of its donor."""
        self._behind: int | None = None
        """The number of steps by which this state was behind when that was last checked."""

    async def fetch(self) -> None:
        """Fetch a snapshot, check it, and go on from it.

        Raises ``PeerLost`` when no donor is left, ``UsageError`` that names the difference when this program has
        another state or other settings, ``SnapshotTooLarge`` when no donor has memory, ``AuthenticationError`` for
        another secret, ``DivergedState`` if donors differ.
        """
        arrays = [self._state.committed_array(shape.name) for shape in self._state.shapes] + self._state.fresh_arrays
        taking = off_loop(partial(populate, arrays), nbytes=self._state.nbytes)
        await asyncio.gather(self._fetch_pinned(), taking)

    async def _fetch_pinned(self) -> None:
        await self._pin()
        await self._fetch_blocks()

    async def _pin(self) -> None:
        """Have all donors pin the same state, the first one that they can."""
        await self._forget()
        missing, failures = list(range(len(self._donors))), list[BaseException]()
        for attempt in range(ATTEMPTS):
            step = max((found.lineage.step for found in self._pinned.values()), default=0)
            if attempt > 1:  # training is faster than the attempts: aim at a later step
                step, missing = step + attempt, list(self._pinned)
            await self._forget(missing)
            found = await asyncio.gather(*(self._donors[place].pin(step) for place in missing), return_exceptions=True)
            for place, one in zip(missing, found, strict=True):
                if isinstance(one, SnapshotDescription):
                    self._pinned[place] = one
                else:
                    failures.append(one)
            if not self._pinned:
                raise _first_error(failures)
            latest = max(one.lineage.step for one in self._pinned.values())
            missing = [place for place, one in self._pinned.items() if one.lineage.step < latest]
            if not missing:
                self._check_pinned()
                return
        raise PeerLost(f"healing: no snapshot could be pinned in {ATTEMPTS} attempts", cause="steps go by too quickly")

    def _check_pinned(self) -> None:
        first, *_ = self._pinned.values()
        for place, found in self._pinned.items():
            if found.lineage != first.lineage or found.digest != first.digest:
                raise DivergedState(
                    f"healing: donors differ at step {first.lineage.step}: {self._donors[place].name} has "
                    f"{found.lineage}, another {first.lineage}"
                )
        _check_same(self._state, first)

    async def _fetch_blocks(self) -> None:
        description = next(iter(self._pinned.values()))
        wanted = deque((shape.name, number) for shape in description.shapes for number in range(shape.blocks))
        while wanted:  # again for blocks of a donor that was lost when the others had no more to fetch
            if not self._pinned:
                raise PeerLost("healing: all donors are lost", cause="all donors are lost")
            async with CleanTaskGroup() as group:
                for place in self._pinned:
                    for _ in range(_AT_A_TIME):
                        group.create_task(self._fetch_from(place, wanted))
        digest = self._state.adopt(description.lineage, description.values, description.sums)
        if digest != description.digest:
            raise DivergedState(
                f"healing: the state fetched at {description.lineage} has another digest than the donors'"
            )

    async def _fetch_from(self, place: int, wanted: deque[tuple[str, int]]) -> None:
        """Fetch blocks until none is left; when the donor is lost, leave the rest to the others."""
        donor = self._donors[place]
        while wanted and (described := self._pinned.get(place)) is not None:
            name, number = wanted.popleft()
            try:
                content = await donor.block(described.pin, name, number)
            except _LOST:
                wanted.append((name, number))
                self._pinned.pop(place, None)
                return
            block = block_of(self._state.committed_array(name), number)
            is_whole = len(content) == len(block)
            if is_whole:
                block[:] = memoryview(content).cast("B")
            if not is_whole or checksum(block) != described.sums[name][number]:  # of what this state has from now on
                raise ProtocolError(f"healing: block {number} of {name!r} from {donor.name} is damaged")

    async def is_catching_up(self) -> bool:
        """Return whether this state is behind that of the donors, but nearer than at the last call.

        Then it will soon catch up, and they need not wait for it.  Raises ``PeerLost`` when no donor is left.
        """
        before, self._behind = self._behind, max(0, await self._position() - self._state.step)
        return self._behind > 0 and (before is None or self._behind < before)

    async def _position(self) -> int:
        for place in list(self._pinned):
            try:
                return await self._donors[place].position()
            except _LOST:
                self._pinned.pop(place, None)
        raise PeerLost("healing: all donors are lost", cause="all donors are lost")

    async def update(self, number: int) -> StepUpdate:
        """Return the update of step ``number``, once the donors have it.

        Raises ``PeerLost`` when no donor has it any more: then ``fetch`` anew.
        """
        while self._pinned:
            place = sorted(self._pinned)[number % len(self._pinned)]
            try:
                return await self._donors[place].update(self._pinned[place].pin, number)
            except _LOST:
                self._pinned.pop(place, None)
        raise PeerLost(f"healing: no donor has the update of step {number}", cause="all donors are lost")

    async def prove(self, mine: Lineage) -> None:
        """Return when the donors have committed as many steps as ``mine``, with an equal lineage.

        Raises ``DivergedState`` if it differs: this process computes differently.  Raises ``PeerLost`` when no donor
        can answer any more: then ``fetch`` anew.
        """
        while self._pinned:  # an update that is under way meanwhile may find donors lost, too
            place = min(self._pinned)
            try:
                theirs = await self._donors[place].lineage(self._pinned[place].pin, mine.step)
            except _LOST:
                self._pinned.pop(place, None)
                continue
            if theirs != mine:
                raise DivergedState(differs_from_group(mine))
            return
        raise PeerLost(f"healing: no donor has the lineage of step {mine.step}", cause="all donors are lost")

    async def _forget(self, places: Iterable[int] | None = None) -> None:
        """Make the donors at these places, by default all, forget their pins."""
        for place in list(self._pinned) if places is None else list(places):
            described = self._pinned.get(place)
            if described is not None:
                with suppress(AsyncparError, ConnectionError):
                    await self._donors[place].unpin(described.pin)
                self._pinned.pop(place, None)

    async def close(self) -> None:
        """Make the donors forget everything that they keep for this newcomer."""
        await self._forget()


def _first_error(errors: Sequence[BaseException]) -> BaseException:
    refusal = next((error for error in errors if not isinstance(error, _LOST)), None)
    if refusal is not None:
        return refusal
    lost = PeerLost("healing: no donor is left", cause="no donor is left")
    lost.__cause__ = errors[0] if errors else None
    return lost


def _check_same(state: ElasticState, description: SnapshotDescription) -> None:
    check_settings(state.settings, description.settings)
    mine = {shape.name: shape for shape in state.shapes}
    theirs = {shape.name: shape for shape in description.shapes}
    for name in sorted(mine.keys() | theirs.keys()):
        if mine.get(name) != theirs.get(name):
            have, want = mine.get(name), theirs.get(name)
            shown = ["nothing" if shape is None else f"{shape.dtype}{list(shape.shape)}" for shape in (have, want)]
            raise UsageError(
                f"state: {name!r} is {shown[0]} here and {shown[1]} on the ranks that train; a newcomer runs the same "
                "program with the same settings"
            )
