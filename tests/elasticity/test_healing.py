"""A newcomer fetches a state from donors that may be lost at any block, and learns why there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest

from asyncpar.elasticity import donors
from asyncpar.elasticity.donors import SnapshotDescription, SnapshotShelf, StepUpdate
from asyncpar.elasticity.healing import Healing
from asyncpar.elasticity.job import ElasticJob
from asyncpar.elasticity.lineage import BLOCK_BYTES
from asyncpar.elasticity.reduction import GradientLayout
from asyncpar.elasticity.state import ElasticState, StateIdentity
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.worlds import LoneWorld
from asyncpar.errors import NotFound, PeerLost, SnapshotTooLarge
from asyncpar.hosts.lineage import Lineage
from asyncpar.nn.parameter import Parameter
from asyncpar.testing import run_virtual
from tests.soak import chosen

BLOCKS = 5

Reached = Callable[[int], Awaitable[None]]
"""Called with the number of a block before the donor gives it."""


def state_of(value: float) -> ElasticState:
    return ElasticState([Parameter("weight", np.full(BLOCKS * BLOCK_BYTES // 4, value, np.float32))], [], None, {})


class LocalDonor:
    """Gives what is on the shelf of this process; ``reached`` may raise what a lost donor does."""

    def __init__(self, name: str, shelf: SnapshotShelf, reached: Reached) -> None:
        self.name = name
        self._shelf = shelf
        self._reached = reached

    async def position(self) -> int:
        return await self._shelf.position()

    async def pin(self, step: int) -> SnapshotDescription:
        return await self._shelf.pin(step)

    async def block(self, pin: int, name: str, number: int) -> memoryview:
        await self._reached(number)
        return await self._shelf.block(pin, name, number)

    async def update(self, pin: int, number: int) -> StepUpdate:
        return await self._shelf.update(pin, number)

    async def lineage(self, pin: int, step: int) -> Lineage:
        return await self._shelf.lineage(pin, step)

    async def unpin(self, pin: int) -> None:
        await self._shelf.unpin(pin)


async def step_soon(state: ElasticState, shelf: SnapshotShelf) -> None:
    """Make one step when the donors were asked for the state."""
    await asyncio.sleep(1.0)
    await state.begin()
    shelf.begun()
    shelf.reduced(GradientLayout([]))
    state.prepare()
    await state.commit()
    shelf.committed()


def test_blocks_of_a_donor_that_is_lost_last_are_fetched_from_the_donors_that_are_left() -> None:
    """Every block at which the donor may be lost, the last ones when the other donor has nothing more to give."""

    async def heal(lost_at: int) -> None:
        async def is_lost(number: int) -> None:
            await asyncio.sleep(0.0 if number < lost_at else 10.0)  # the other donor ends before
            if number >= lost_at:
                raise PeerLost("donor: its connection ended")

        async def is_well(number: int) -> None:
            await asyncio.sleep(0.1)

        state, newcomer, shelf = state_of(3.0), state_of(0.0), SnapshotShelf()
        shelf.attach(state)
        healing = Healing([LocalDonor("lost", shelf, is_lost), LocalDonor("well", shelf, is_well)], newcomer)
        await asyncio.gather(healing.fetch(), step_soon(state, shelf))
        assert newcomer.step == 0
        assert np.array_equal(newcomer.committed_array("weight"), state.committed_array("weight"))
        await healing.close()

    for lost_at in chosen([0, 1, BLOCKS - 1], soak=range(BLOCKS)):
        run_virtual(heal(lost_at))


def test_without_any_donor_left_healing_says_so() -> None:
    async def main() -> None:
        async def is_lost(number: int) -> None:
            raise PeerLost(f"donor: lost at block {number}")

        state, shelf = state_of(3.0), SnapshotShelf()
        shelf.attach(state)
        healing = Healing([LocalDonor(name, shelf, is_lost) for name in "ab"], state_of(0.0))
        with pytest.raises(PeerLost, match="all donors are lost"):
            await asyncio.gather(healing.fetch(), step_soon(state, shelf))

    run_virtual(main())


class LateWorlds(LoneWorld):
    """Names a donor for ``seconds`` after it is gone; then it knows that the job is complete."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._asked_at: float | None = None

    async def donors(self) -> Sequence[LocalDonor] | None:
        now = asyncio.get_running_loop().time()
        self._asked_at = now if self._asked_at is None else self._asked_at
        return [GoneDonor()] if now < self._asked_at + self._seconds else None


class GoneDonor(LocalDonor):
    """Its process has ended, and connections to it are refused."""

    def __init__(self) -> None:
        self.name = "gone"

    async def pin(self, step: int) -> SnapshotDescription:
        raise PeerLost(f"donor gone: no snapshot of step {step}: connection refused")

    async def unpin(self, pin: int) -> None:
        raise PeerLost(f"donor gone: pin {pin}: connection refused")


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.3, 1.0, 3.0])
def test_a_newcomer_whose_donors_are_all_done_waits_until_it_is_known_that_the_job_is_complete(seconds: float) -> None:
    async def main() -> list[int]:
        async with ElasticJob(portions=1, source=LateWorlds(seconds)) as job:
            return [step.number async for step in job.steps(state_of(0.0), until=5)]

    assert run_virtual(main()) == []


def test_a_newcomer_whose_donors_stay_lost_says_so() -> None:
    async def main() -> None:
        async with ElasticJob(portions=1, source=LateWorlds(60.0)) as job:
            async for _ in job.steps(state_of(0.0), until=5):
                pass

    with pytest.raises(PeerLost, match="healing: no donor is left"):
        run_virtual(main())


def test_a_digest_that_fails_is_raised_in_the_newcomer_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> StateIdentity:
        raise ValueError("the memory is gone")

    async def main() -> None:
        state, shelf = state_of(3.0), SnapshotShelf()
        shelf.attach(state)
        pinning = asyncio.create_task(shelf.pin(0))
        await asyncio.sleep(0)
        monkeypatch.setattr(state, "identity", fail)
        await step_soon(state, shelf)
        async with asyncio.timeout(60):
            with pytest.raises(NotFound, match=r"step 0 has no digest: the memory is gone"):
                await pinning

    run_virtual(main())


def test_what_is_committed_can_be_pinned_until_the_sums_of_the_next_step_are_there() -> None:
    async def unhurt(number: int) -> None:
        await asyncio.sleep(0.1)

    async def main() -> None:
        state, newcomer, shelf = state_of(3.0), state_of(0.0), SnapshotShelf()
        shelf.attach(state)
        await state.begin()
        shelf.begun()
        healing = Healing([LocalDonor("donor", shelf, unhurt)], newcomer)
        fetching = asyncio.create_task(healing.fetch())
        await asyncio.sleep(0.05)
        state.committed_array("weight").fill(4.0)  # as the step under way may do at any time
        await fetching
        assert newcomer.step == 0
        assert np.all(newcomer.committed_array("weight") == 3.0)
        assert shelf.reduced(GradientLayout([])), "the newcomer needs the update of this step"
        late = asyncio.create_task(shelf.pin(0))
        await step_soon(state, shelf)
        await state.begin()
        shelf.begun()
        assert (await late).lineage.step == 1
        await healing.close()

    run_virtual(main())


def test_a_snapshot_that_does_not_fit_into_a_donors_memory_is_raised_in_the_newcomer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The donor goes on, and gives the state when it has memory again; one donor with memory is enough."""

    async def unhurt(number: int) -> None:
        await asyncio.sleep(0.1)

    def refuse(nbytes: int, what: str) -> None:
        raise SnapshotTooLarge(f"{what} need {nbytes} bytes of memory, and there are 3")

    async def main() -> None:
        state, newcomer, shelf = state_of(3.0), state_of(0.0), SnapshotShelf()
        shelf.attach(state)
        with monkeypatch.context() as patched:
            patched.setattr(donors, "check_room", refuse)
            healing = Healing([LocalDonor("small", shelf, unhurt)], newcomer)
            with pytest.raises(SnapshotTooLarge, match=r"a snapshot for a newcomer need .* there are 3"):
                await asyncio.gather(healing.fetch(), step_soon(state, shelf))
            await asyncio.sleep(2.0)
        assert state.step == 1
        healing = Healing([LocalDonor("enough", shelf, unhurt)], newcomer)
        await asyncio.gather(healing.fetch(), step_soon(state, shelf))
        assert newcomer.step == 1
        await healing.close()

    run_virtual(main())


def test_nobody_waits_for_the_next_step_of_a_donor_that_begins_anew_itself() -> None:
    """Two of a world that is lost would be each other's donors, and wait for each other."""

    async def unhurt(number: int) -> None:
        raise AssertionError(f"block {number} is asked for, and nothing is pinned")

    async def main() -> None:
        shelves = [SnapshotShelf(), SnapshotShelf()]
        states = [state_of(3.0), state_of(3.0)]
        healings = []
        for place, (shelf, state) in enumerate(zip(shelves, states, strict=True)):
            shelf.attach(state)
            healings.append(Healing([LocalDonor("other", shelves[1 - place], unhurt)], state))
        waiting = [asyncio.create_task(healing.fetch()) for healing in healings]
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in waiting)
        for shelf in shelves:
            shelf.detach()
        async with asyncio.timeout(1.0):
            for task in waiting:
                with pytest.raises(PeerLost, match="no donor is left"):
                    await task

    run_virtual(main())


class NotedWorld(LoneWorld):
    """Notes how the program has failed when it leaves."""

    def __init__(self) -> None:
        self.failed: list[tuple[int | None, str] | None] = []

    async def leave(self, failed: tuple[int | None, str] | None = None) -> None:
        self.failed.append(failed)


async def fail_at_a_step(source: NotedWorld, *, goes_on: bool) -> None:
    """Fail in the first step; if the program ``goes_on``, make that step again, and end with another error."""
    async with ElasticJob(portions=1, source=source) as job:
        async for step in job.steps(state_of(0.0), until=2):
            try:
                async with step:
                    raise ValueError("in the step")
            except ValueError:
                if not goes_on:
                    raise
            again = ElasticStep(step._job, step.number)  # noqa: SLF001
            async with again:
                again.add(0, {"weight": np.zeros(1, np.float32)})
                await again.reduce()
            break
        raise ValueError("after it")


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_failure_that_the_program_has_gone_on_after_is_not_that_of_its_end(goes_on: bool) -> None:
    async def main() -> list[tuple[int | None, str] | None]:
        source = NotedWorld()
        with pytest.raises(ValueError, match=r"the step|after it"):
            await fail_at_a_step(source, goes_on=goes_on)
        return source.failed

    assert run_virtual(main()) == [(None, "ValueError: after it") if goes_on else (0, "ValueError: in the step")]


@pytest.mark.parametrize(
    ("end", "noted"),
    [
        (None, None),
        (SystemExit(0), None),
        (SystemExit(3), (None, "SystemExit: 3")),
        (asyncio.CancelledError(), (None, "CancelledError")),
        (KeyboardInterrupt(), (None, "KeyboardInterrupt")),
    ],
    ids=["its end", "exit 0", "exit 3", "cancelled", "interrupted"],
)
async def test_a_program_that_is_ended_from_outside_is_not_done(
    end: BaseException | None, noted: tuple[int | None, str] | None
) -> None:
    source = NotedWorld()
    job = ElasticJob(portions=1, source=source)
    await job.__aenter__()
    await job.__aexit__(None if end is None else type(end), end, None)
    assert source.failed == [noted]
