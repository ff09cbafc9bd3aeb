"""Healing, the newcomer's side: fetch a pinned state in blocks from all donors, then the updates that came later."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from asyncpar.core.concurrency.tasks import CleanTaskGroup
from asyncpar.elasticity.donors import Donor, SnapshotDescription, StepUpdate
from asyncpar.elasticity.lineage import BLOCK_BYTES, checksum
from asyncpar.elasticity.settings import check_settings
from asyncpar.elasticity.state import ElasticState
from asyncpar.errors import AsyncparError, DivergedState, NotFound, PeerLost, ProtocolError, StaleGeneration, UsageError

MOST_DONORS = 2
"""Of so many the state is fetched at a time: each of them copies all of it."""

ATTEMPTS = 8
"""How often a newcomer tries to have a state pinned before it gives up."""

_AT_A_TIME = 2
"""Blocks asked of one donor at the same time."""

_LOST = (PeerLost, NotFound, ConnectionError)


class Healing:
    """Brings ``state`` to what the donors have, and then along with them."""

    def __init__(self, donors: Sequence[Donor], state: ElasticState) -> None:
        self._donors = list(donors[:MOST_DONORS])
        self._state = state
        self._pinned: dict[int, SnapshotDescription] = {}
        """By place of its donor."""

    async def fetch(self) -> None:
        """Fetch a snapshot, check it, and go on from it.

        Raises ``PeerLost`` when no donor is left, ``UsageError`` naming what differs when this program has another
        state or other settings, ``SnapshotTooLarge`` when no donor has memory, ``AuthenticationError`` for another
        secret, ``DivergedState`` if donors differ.
        """
        for attempt in range(ATTEMPTS):
            if not self._donors:
                break
            with suppress(StaleGeneration):  # training is faster than we are: aim at a later step
                await self._pin(ahead=1 + attempt)
                await self._fetch_blocks()
                return
        raise PeerLost(f"healing: no snapshot could be pinned in {ATTEMPTS} attempts", cause="steps go by too quickly")

    async def _pin(self, *, ahead: int) -> None:
        await self._forget()
        results = await asyncio.gather(*(donor.position() for donor in self._donors), return_exceptions=True)
        self._donors = [donor for donor, found in zip(self._donors, results, strict=True) if isinstance(found, int)]
        positions = [found for found in results if isinstance(found, int)]
        if not positions:
            raise _first_error(results)
        step = max(positions) + ahead
        pinned = await asyncio.gather(*(donor.pin(step) for donor in self._donors), return_exceptions=True)
        self._pinned = {place: found for place, found in enumerate(pinned) if isinstance(found, SnapshotDescription)}
        if not self._pinned:
            raise _first_error(pinned)
        first, *_ = self._pinned.values()
        for place, found in self._pinned.items():
            if found.lineage != first.lineage or found.digest != first.digest:
                raise DivergedState(
                    f"healing: donors differ at step {step}: {self._donors[place].name} has {found.lineage}, another "
                    f"{first.lineage}"
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
        digest = await self._state.adopt(description.lineage, description.values, description.sums)
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
                block = await donor.block(described.pin, name, number)
            except _LOST:
                wanted.append((name, number))
                self._pinned.pop(place, None)
                return
            content = memoryview(block).cast("B")
            if checksum(content) != described.sums[name][number]:
                raise ProtocolError(f"healing: block {number} of {name!r} from {donor.name} is damaged")
            array = self._state.committed_array(name)
            place_in = array.reshape(-1).view(np.uint8).data
            place_in[number * BLOCK_BYTES : number * BLOCK_BYTES + len(content)] = content

    async def next_update(self) -> StepUpdate:
        """Return the update of the next step that this state has not seen, once it is committed by a donor.

        Raises ``PeerLost`` when no donor has it any more: then ``fetch`` anew.
        """
        number = self._state.step
        while self._pinned:
            place = sorted(self._pinned)[number % len(self._pinned)]
            try:
                return await self._donors[place].update(self._pinned[place].pin, number)
            except _LOST:
                self._pinned.pop(place, None)
        raise PeerLost(f"healing: no donor has the update of step {number}", cause="all donors are lost")

    async def _forget(self) -> None:
        for place, described in self._pinned.items():
            with suppress(AsyncparError, ConnectionError):
                await self._donors[place].unpin(described.pin)
        self._pinned = {}

    async def close(self) -> None:
        """Let the donors forget what they keep for this newcomer."""
        await self._forget()


def _first_error(results: Sequence[object]) -> BaseException:
    errors = [found for found in results if isinstance(found, BaseException)]
    stale = next((error for error in errors if isinstance(error, StaleGeneration)), None)
    refusal = stale or next((error for error in errors if not isinstance(error, _LOST)), None)
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
