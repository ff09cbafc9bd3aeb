"""Healing: a newcomer gets the state from the memory of the ranks that train, while they go on.

Theory of operation.  The newcomer asks several *donors* to pin the state of one step: the one committed now, until the
sums of the step under way arrive, and after that the one of the next commit.  Each donor lends the arrays that hold
it, and goes on in new memory: nothing is copied.  The newcomer fetches them in blocks from all donors, and checks each
block's checksum and, in the end, the digest.  From the pinned step on, donors also keep the result of each step's
reduction: with these the newcomer runs the steps that it has missed itself, the program's own block without portions,
and so reaches the state of the others.  With the donors' lineage after such a step it proves that it computes the same,
before it asks to join.  The loss of a donor does no harm; a newcomer that leaves is forgotten.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from asyncpar.core.array_pool import ArrayPool
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.elasticity.lineage import ArrayShape, block_of
from asyncpar.elasticity.memory import check_room, populate
from asyncpar.elasticity.reduction import Description, GradientLayout
from asyncpar.elasticity.state import ElasticState, StateIdentity
from asyncpar.errors import NotFound
from asyncpar.hosts.lineage import Lineage

Array: TypeAlias = NDArray[Any]

PIN_SECONDS = 30.0
"""Seconds without use after which a pin is dropped: its newcomer is gone."""

MOST_UPDATES = 64
"""A newcomer that is this many steps behind begins anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotDescription:
    """Description of a pinned state; ``digest`` is that of the state alone, ``settings`` are those of the run."""

    pin: int
    lineage: Lineage
    digest: bytes
    shapes: tuple[ArrayShape, ...]
    sums: Mapping[str, tuple[int, ...]]
    values: Mapping[str, bytes]
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUpdate:
    """The result of the reduction of step ``number``: the flat sums, their layout, and the sum of the losses.

    Of a sharded state there are the checksums of its parts after the step, too; ``is_updated`` shows whether its
    optimizer was updated, and ``values`` are then those of all parameters, unless they are sharded as well.
    """

    number: int
    layout: Description
    flats: Sequence[Array]
    loss: float
    part_sums: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    is_updated: bool = False
    values: Array | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes of its arrays."""
        return sum(flat.nbytes for flat in self.flats)

    def copied(self) -> StepUpdate:
        """Return a copy with arrays of its own."""
        values = None if self.values is None else np.array(self.values)
        return replace(self, flats=[np.array(flat) for flat in self.flats], values=values)


class Donor(Protocol):
    """A member that has the state.  All calls raise ``PeerError`` when it is gone, ``NotFound`` for a forgotten pin."""

    @property
    def name(self) -> str: ...

    async def position(self) -> int:
        """Return the number of its committed steps."""
        ...

    async def pin(self, step: int) -> SnapshotDescription:
        """Pin the first possible state after at least ``step`` committed steps, and return its description.

        Raises ``SnapshotTooLarge`` if it has no memory to go on in.
        """
        ...

    async def block(self, pin: int, name: str, number: int) -> bytes | memoryview:
        """Return a block of the array ``name`` of a pinned state."""
        ...

    async def update(self, pin: int, number: int) -> StepUpdate:
        """Return the update of step ``number``, once that is reduced; its arrays belong to the caller.

        A caller that asks for it has the snapshot, and all earlier updates.
        """
        ...

    async def lineage(self, pin: int, step: int) -> Lineage:
        """Return its lineage after ``step`` committed steps, once it has committed them.

        A caller that asks for it has the updates of all these steps, and of at most one more.
        """
        ...

    async def unpin(self, pin: int) -> None:
        """Forget a pin."""
        ...


@dataclass
class _Pin:
    step: int
    used: float
    taken: asyncio.Future[SnapshotDescription]
    arrays: dict[str, Array] = field(default_factory=dict)
    describing: asyncio.Task[None] | None = None
    """Set once the state is pinned."""
    wanted: int = 0
    """The first update that its newcomer may still request."""


class SnapshotShelf:
    """The snapshots and updates that one process keeps for newcomers: the donor's side.  It outlives worlds."""

    def __init__(self) -> None:
        self._pins: dict[int, _Pin] = {}
        self._numbers = itertools.count(1)
        self._updates: dict[int, StepUpdate] = {}
        self._identities: dict[int, Callable[[], Awaitable[StateIdentity]]] = {}
        """By number of committed steps, the identity of that state."""
        self._news = asyncio.Event()
        self._state: ElasticState | None = None
        self._is_open = False
        """Whether the committed state can be pinned now; not while the program may change it."""
        self._earliest = 0
        """The first state that can be pinned: updates of earlier ones were not kept."""
        self._describing: set[asyncio.Task[None]] = set()
        self._memory = ArrayPool(lambda: sys.maxsize if self._pins else 0)
        """Memory of updates: each reuses that of an earlier one."""
        self._layout = GradientLayout([])
        self._end: str | None = None

    # -- the owner's side ----------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Mapping[str, str]:
        """The settings of the run whose state this is."""
        return {} if self._state is None else self._state.settings

    @property
    def steps(self) -> int:
        """The number of committed steps of the state."""
        return 0 if self._state is None else self._state.step

    def attach(self, state: ElasticState) -> None:
        """Serve ``state`` to newcomers."""
        self._state = state
        self._is_open, self._earliest = not state.has_kept_arrays, state.step
        self._notify()

    def detach(self) -> None:
        """Serve nothing until ``attach``: this process fetches the state anew, and no call may await its next step."""
        self._state, self._is_open = None, False
        self._pins.clear()
        self._updates.clear()
        self._identities.clear()
        self._notify()

    def beginning(self) -> None:
        """Note that a step is about to begin, from which on the program may change the arrays that it keeps."""
        assert self._state is not None
        self._is_open = self._is_open and not self._state.has_kept_arrays

    def begun(self) -> None:
        """Note that a step has begun, in which the committed state can be pinned until the step is reduced."""
        assert self._state is not None
        self._is_open, self._earliest = True, self._state.step
        self._take_pins()

    def reduced(self, layout: GradientLayout) -> bool:
        """Note that the sums of a step, which have ``layout``, are available; return whether a newcomer needs them."""
        assert self._state is not None
        self._is_open, self._earliest, self._layout = False, self._state.step + 1, layout
        return any(pin.step <= self._state.step for pin in self._pins.values())

    async def copy(self, number: int, layout: GradientLayout, flats: Sequence[Array], loss: float) -> StepUpdate | None:
        """Return a copy of the reduced gradients of step ``number``.

        If there is no memory for it, newcomers are forgotten, and the result is None.
        """
        flats = layout.trimmed(flats)
        try:
            check_room(sum(flat.nbytes for flat in flats), "an update that newcomers need")
        except MemoryError:
            self._pins.clear()
            self._updates.clear()
            self._notify()
            return None
        copies = layout.take_from(self._memory)
        await off_loop(lambda: _copy_all(flats, copies), nbytes=sum(flat.nbytes for flat in flats))
        return StepUpdate(number=number, layout=layout.description, flats=copies, loss=loss)

    def keep(self, update: StepUpdate) -> None:
        """Publish the reduced gradients of a step to newcomers, before the step is committed.

        If the step is aborted it is repeated with the same sums.
        """
        self._updates[update.number] = update
        self._notify()

    def committed(self) -> None:
        """Note a committed step."""
        assert self._state is not None
        now, self._is_open = asyncio.get_running_loop().time(), not self._state.has_kept_arrays
        for number, pin in list(self._pins.items()):
            if now - pin.used > PIN_SECONDS or self._state.step - max(pin.step, pin.wanted) > MOST_UPDATES:
                del self._pins[number]
        if self._is_open:
            self._take_pins()
        if self._pins:
            self._identities[self._state.step] = self._state.recalled_identity()
        least = min((max(pin.step, pin.wanted) for pin in self._pins.values()), default=self._state.step + 1)
        self._updates = {number: kept for number, kept in self._updates.items() if number >= least}
        self._identities = {number: kept for number, kept in self._identities.items() if number >= least}
        self._memory.trim()
        self._notify()

    async def close(self, reason: str) -> None:
        """Stop serving."""
        self._end = reason
        self._pins.clear()
        self._notify()
        if self._describing:
            await asyncio.wait(self._describing)

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _take_pins(self) -> None:
        """Pin the committed state for the newcomers that wait for it."""
        assert self._state is not None
        for number, pin in list(self._pins.items()):
            if pin.step <= self._state.step and pin.describing is None and not pin.taken.done():
                self._take(number, pin, self._state)

    def _take(self, number: int, pin: _Pin, state: ElasticState) -> None:
        try:
            check_room(state.nbytes, "a snapshot for a newcomer")  # steps go on in memory of their own
        except MemoryError as error:
            del self._pins[number]
            pin.taken.set_exception(error)
            return
        pin.step, pin.arrays = state.step, state.lend_all()
        pin.describing = asyncio.create_task(
            self._describe(number, pin, state, dict(state.values), state.identity()),
            name="asyncpar snapshot",
        )
        self._describing.add(pin.describing)
        pin.describing.add_done_callback(self._describing.discard)

    async def _describe(
        self, number: int, pin: _Pin, state: ElasticState, values: dict[str, bytes], identity: Awaitable[StateIdentity]
    ) -> None:
        """Describe the pinned state, and take the memory in which the next steps go on."""
        shapes, fresh = state.shapes, [*state.fresh_arrays, *self._layout.take_from(self._memory)]
        try:
            known = await identity
        except Exception as error:  # noqa: BLE001  # raised in the newcomer that waits for the pin
            failure = NotFound(f"snapshot: step {pin.step} has no digest: {error}")
            failure.__cause__ = error
            if not pin.taken.done():
                pin.taken.set_exception(failure)
            return
        if not pin.taken.done():
            pin.taken.set_result(
                SnapshotDescription(
                    pin=number,
                    lineage=known.lineage,
                    digest=known.digest,
                    shapes=shapes,
                    sums=known.sums,
                    values=values,
                    settings=state.settings,
                )
            )
        await off_loop(partial(populate, fresh), nbytes=sum(array.nbytes for array in fresh))

    # -- the newcomer's side -------------------------------------------------------------------------------------------

    def _check(self) -> ElasticState:
        if self._end is not None or self._state is None:
            raise NotFound(f"snapshot: there is none: {self._end or 'this rank has no state yet'}")
        return self._state

    def _find(self, pin: int) -> _Pin:
        self._check()
        found = self._pins.get(pin)
        if found is None:
            raise NotFound(f"snapshot: pin {pin} is forgotten; begin anew")
        found.used = asyncio.get_running_loop().time()
        return found

    async def position(self) -> int:
        """See ``Donor``."""
        return self._check().step

    async def pin(self, step: int) -> SnapshotDescription:
        """See ``Donor``."""
        state = self._check()
        number, step = next(self._numbers), max(step, self._earliest)
        pin = self._pins[number] = _Pin(
            step, asyncio.get_running_loop().time(), asyncio.get_running_loop().create_future()
        )
        if step <= state.step and self._is_open:
            self._take(number, pin, state)
        try:
            while not pin.taken.done():
                self._find(number)
                news = asyncio.ensure_future(self._news.wait())
                try:
                    waited: set[asyncio.Future[Any]] = {pin.taken, news}
                    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
        except BaseException:
            self._pins.pop(number, None)
            raise
        return pin.taken.result()

    async def block(self, pin: int, name: str, number: int) -> memoryview:
        """See ``Donor``."""
        array = self._find(pin).arrays.get(name)
        if array is None or not 0 <= number < max(1, ArrayShape.of(name, array).blocks):
            raise NotFound(f"snapshot: there is no block {number} of {name!r}")
        return block_of(array, number)

    async def update(self, pin: int, number: int) -> StepUpdate:
        """See ``Donor``."""
        asking = self._find(pin)
        asking.arrays, asking.wanted = {}, number  # it has the snapshot, and all earlier updates
        while (update := self._updates.get(number)) is None:
            if self._find(pin).step > number or self._check().step > number:
                raise NotFound(f"snapshot: the update of step {number} was not kept; begin anew")
            await self._news.wait()
        self._find(pin)
        return update

    async def lineage(self, pin: int, step: int) -> Lineage:
        """See ``Donor``."""
        while (identity := self._identities.get(step)) is None:
            self._find(pin)
            if self._check().step >= step:
                raise NotFound(f"snapshot: the lineage of step {step} was not kept; begin anew")
            await self._news.wait()
        return (await identity()).lineage

    async def unpin(self, pin: int) -> None:
        """See ``Donor``."""
        self._pins.pop(pin, None)


def _copy_all(sources: Sequence[Array], copies: Sequence[Array]) -> None:
    for source, copy in zip(sources, copies, strict=True):
        np.copyto(copy, source)
