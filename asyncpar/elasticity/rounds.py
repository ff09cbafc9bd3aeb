"""Rounds of DiLoCo among ranks that may leave: inner steps do not communicate, the outer step waits for a quorum.

Theory of operation.  The block of a round trains this rank's workers, one for each of its portions, and sends nothing
to others.  Meanwhile a task of the round represents this rank in an ordinary elastic step: the ranks show each other,
several times a second, which portions are done.  When all are, or a quorum is and the grace period for the others is
over, that step adds up the differences of those, moves the common point, and is committed on all ranks or on none.  A
rank that is lost takes its portions of this round with it, and stops no other: the task enters the next world, the
block goes on.  Portions that finish after the outer step are dropped.  If no rank computes any more and there is no
quorum, the round is repeated, keeping its results, for the portions that are missing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np

from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.core.config.checks import check_count
from asyncpar.elasticity.interruption import Interruption, program_errors
from asyncpar.elasticity.job_worlds import MOST_FUTILE, JobWorlds
from asyncpar.elasticity.local_workers import DIFFERENCE, Contribution, LocalWorkers, momentum_name
from asyncpar.elasticity.placement import PartPlacement, plan_moves
from asyncpar.elasticity.portions import Portions
from asyncpar.elasticity.samples import portion_rng
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.transfer import transfer
from asyncpar.errors import UsageError
from asyncpar.hosts.messages import WorldChange
from asyncpar.nn.optimizers import Optimizer

POLL_SECONDS = 0.05
"""Seconds between exchanges of which portions are done."""


@dataclass
class RoundContents:
    """The portions and sums of round ``number`` so far; they are kept when the round is repeated."""

    number: int
    held: dict[int, Contribution] = field(default_factory=dict)
    """Contributions of this rank, by portion."""
    losses: dict[int, float] = field(default_factory=dict)
    done: frozenset[int] = frozenset()
    """The portions that are done on any rank."""
    is_known: bool = True
    """False for a newcomer, which does not know what the others have done, or are about to do."""
    futile: int = 0
    """The number of times its block has ended as if its world had ended, although it had not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """Settings of rounds; see ``ElasticJob.rounds``."""

    steps: int
    quorum: float
    grace: float

    def __post_init__(self) -> None:
        check_count("steps", self.steps, least=1)
        if not 0.0 < self.quorum <= 1.0:
            raise UsageError(f"quorum: expected a part of the portions, 0 < quorum <= 1, got {self.quorum!r}")
        if not 0.0 <= self.grace < math.inf:
            raise UsageError(f"grace: expected seconds, 0 or more, got {self.grace!r}")

    def is_enough(self, done: int, count: int) -> bool:
        """Return whether ``done`` of ``count`` portions are a quorum."""
        return done >= math.ceil(self.quorum * count)


class _NoQuorumError(Exception):
    """No rank trains any more, and fewer portions are done than the quorum."""


class Worker:
    """A worker within its block: ``optimizer`` makes its inner steps; add its losses to ``loss``."""

    def __init__(self, portion: int, optimizer: Optimizer) -> None:
        self.portion = portion
        self.optimizer = optimizer
        self.loss = 0.0


class ElasticRound:
    """Round ``number`` of a run: use as ``async with round``.

    Train each of ``portions`` in ``with round.worker(portion) as worker`` for ``steps`` inner steps, and let the event
    loop run now and then (``await asyncio.sleep(0)``, or compute in a thread).  When the block ends, or is ended
    because the others have gone on, ``is_committed`` shows whether there was an outer step, ``contributed`` is the
    number of portions in it, ``dropped`` the number of those that were not.  Without an outer step the same number is
    repeated.
    """

    def __init__(
        self, job: JobWorlds, workers: LocalWorkers, plan: RoundPlan, contents: RoundContents, first: ElasticStep
    ) -> None:
        self.number = contents.number
        self.steps = plan.steps
        self.contributed = 0
        self.loss = 0.0
        """The sum of the losses of the portions that contributed."""
        self.change: WorldChange | None = None
        """The last change of the world in this round; None if there was none."""
        self._job = job
        self._workers = workers
        self._plan = plan
        self._contents = contents
        self._step = first
        self._is_computing = True
        self._quorum_at: float | None = None
        self._interruption = Interruption()
        self._meeting: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._taken: asyncio.Future[frozenset[int]] = asyncio.get_running_loop().create_future()
        """The portions that any rank has, or trains, as the ranks show each other first."""
        self._mine: tuple[int, ...] = ()

    # -- the program's interface ---------------------------------------------------------------------------------------

    @property
    def is_replay(self) -> bool:
        """Whether this rank is a newcomer that repeats a round of the others; then it has no portions."""
        return self._step.is_replay

    @property
    def is_committed(self) -> bool:
        return self._step.is_committed

    @property
    def generation(self) -> int:
        """The number of the world in which the outer step was begun."""
        return self._step.began_in

    @property
    def dropped(self) -> int:
        """The number of portions whose training did not count."""
        return self._job.portions - self.contributed if self.is_committed else 0

    @property
    def portions(self) -> tuple[int, ...]:
        """The portions that this rank is to train, known within the block."""
        return self._mine

    def rng(self, portion: int, step: int) -> np.random.Generator:
        """Return the random stream of inner ``step`` of ``portion``: the same on every rank."""
        return portion_rng(self._job.seed, self.number * self.steps + step, portion)

    def worker(self, portion: int) -> AbstractContextManager[Worker]:
        """Make parameters and optimizer those of the worker of ``portion`` for a ``with`` block.

        The parameters begin at the common point, the optimizer where this worker left it in the previous round.
        """
        if self._meeting is None:
            raise UsageError(f"round {self.number}: use it, `async with round:`, before its workers")
        if portion not in self.portions:
            raise UsageError(f"portion: expected one of {self.portions}, got {portion}; see round.portions")
        return self._at_work(portion)

    @contextmanager
    def _at_work(self, portion: int) -> Iterator[Worker]:
        state, contents = self._job.current_state, self._contents
        assert state.sharded is not None
        worker = Worker(portion, self._workers.optimizer)

        def done(contribution: Contribution) -> None:
            contents.held[portion], contents.losses[portion] = contribution, float(worker.loss)
            self._news.set()

        assert self._meeting is not None
        if self._meeting.done():  # the others have gone on, and this block ends where it waits next
            with self._workers.at_work(None, portion, state.latest_array, lambda _: None):
                yield worker
        else:
            with self._workers.at_work(state.sharded.parts, portion, state.latest_array, done):
                yield worker

    # -- the block -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._meeting = asyncio.create_task(self._meet(), name=f"asyncpar round {self.number}")
        if not self.is_replay:
            taken = self._contents.done if self._contents.is_known else await self._receive_taken(self._meeting)
            mine = Portions(self._job.portions, self._job.size).of(self._job.rank)
            self._mine = tuple(portion for portion in mine if portion not in taken)
        self._interruption.begin()
        self._meeting.add_done_callback(self._end_block)
        return self

    async def _receive_taken(self, meeting: asyncio.Task[None]) -> frozenset[int]:
        """Return the portions that the others have, or train; none if the round is over before they show them."""
        self._contents.is_known = True
        try:
            waited: set[asyncio.Future[Any]] = {meeting, self._taken}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            meeting.cancel()
            await asyncio.wait({meeting})
            raise
        return self._taken.result() if self._taken.done() else frozenset()

    def _end_block(self, meeting: asyncio.Task[None]) -> None:
        """End the block: there was an outer step, or there can be none, and further results are of no use."""
        del meeting
        if self._is_computing:
            self._interruption.interrupt()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        meeting, found = self._meeting, error
        assert meeting is not None
        missing = [portion for portion in self._mine if portion not in self._contents.held]
        if found is None and missing and not meeting.done():
            found = UsageError(f"round {self.number}: its block ended without workers of the portions {missing}")
        self._is_computing = False
        if not self.is_replay:
            self._job.meter.waits()
        self._news.set()
        own = None if found is None else program_errors(found, self._job.is_world_over)
        if own is None:  # also if a call of the block met the end of the world: missing portions are repeated
            try:
                await asyncio.wait({meeting})
            except asyncio.CancelledError as cancelled:
                found = own = cancelled
        if self._interruption.end() and found is not None:
            own = program_errors(found, self._job.is_world_over, is_interrupted=True)
        elif found is not None and own is None and self._count_futile():
            own = found
        if own is None:
            meeting.result()
            return found is not None
        meeting.cancel()
        await asyncio.wait({meeting})
        if own is not found:  # its context is what it was taken from
            raise own from own.__cause__
        if own is not error:
            raise own
        return False

    def _count_futile(self) -> bool:
        """Count a block that ended with a world although none has ended; return whether the program is at fault."""
        self._contents.futile = 0 if self.change is not None else self._contents.futile + 1
        return self._contents.futile > MOST_FUTILE

    # -- this rank among the others ------------------------------------------------------------------------------------

    async def _meet(self) -> None:
        """Represent this rank until there was an outer step, or the round has to be repeated."""
        while True:
            try:
                async with self._step as step:
                    if not step.is_replay:
                        if not self._is_computing:
                            self._job.meter.waits()
                        await self._until_enough(step)
                    await self._advance(step)
            except _NoQuorumError:
                return
            self.change = step.change or self.change
            if step.is_committed or self._job.is_drained:
                return
            self._step = ElasticStep(self._job, self.number)

    async def _until_enough(self, step: ElasticStep) -> None:
        """Return when the outer step can be made; raise when it cannot, which all ranks learn at once."""
        count, loop = self._job.portions, asyncio.get_running_loop()
        while True:
            is_over = self._quorum_at is not None and loop.time() - self._quorum_at >= self._plan.grace
            word = np.zeros((count + 1, 2), np.uint8)  # for each portion: whether it is done, and whether it is trained
            word[list(self._contents.held), 0] = word[list(self._mine), 1] = 1
            word[count] = self._is_computing, is_over
            if step.world.size > 1:
                await step.world.all_reduce(word, "bor")
            done, (is_computing, is_over) = np.flatnonzero(word[:count, 0]), word[count].tolist()
            self._contents.done = frozenset(done.tolist())
            if not self._taken.done():
                self._taken.set_result(frozenset(np.flatnonzero(word[:count].any(axis=1)).tolist()))
            is_enough = self._plan.is_enough(done.size, count)
            if done.size == count or (is_enough and (is_over or not is_computing)):
                return
            if not is_computing:
                raise _NoQuorumError
            if is_enough and self._quorum_at is None:
                self._quorum_at = loop.time()
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._news.wait()

    async def _advance(self, step: ElasticStep) -> None:
        """Add up the differences, and move the common point."""
        state, workers = self._job.current_state, self._workers
        assert state.sharded is not None
        if not step.is_replay:
            await self._bring_home(step)
            nothing = [np.zeros(workers.size, workers.dtype), np.zeros(1, workers.dtype)]
            one = np.ones(1, workers.dtype)
            for portion in step.portions:
                held = self._contents.held.get(portion)
                if held is None:
                    step.add(portion, nothing)
                    continue
                step.add(portion, [held[DIFFERENCE], one], loss=self._contents.losses[portion])
                workers.keep(state.sharded.parts, portion, held)
        total, contributed = await step.reduce()
        self.contributed, self.loss = int(contributed[0]), step.loss
        await state.open(workers.optimizer)
        mean = await off_loop(lambda: total / contributed, nbytes=total.nbytes)
        names = [parameter.name for parameter in workers.optimizer.parameters]
        arrays = {
            name: (state.committed_array(name), state.latest_array(name))
            for name in (*names, *map(momentum_name, names))
        }
        await off_loop(lambda: workers.advance(mean, arrays.__getitem__), nbytes=total.nbytes)

    async def _bring_home(self, step: ElasticStep) -> None:
        """Bring each portion to the rank that has it in this world: another may have trained it."""
        world, count, contents = step.world, self._job.portions, self._contents
        if world.size == 1:
            return
        mine = np.zeros(count + 1, np.uint8)
        mine[list(contents.held)] = 1
        rows = (await world.all_gather(mine))[:, :count]
        owners = tuple(Portions(count, world.size).owner(portion) for portion in range(count))
        holders = [frozenset(np.flatnonzero(row).tolist()) for row in rows]
        moves, _ = plan_moves(holders, PartPlacement(owners, (None,) * count))
        if not moves:
            return
        kinds = self._workers.sent_kinds
        places = [(name, move.part) for move in moves for name in kinds]
        losses = np.array([contents.losses.get(portion, 0.0) for portion in range(count)])
        gathered = await world.all_gather(losses)
        came = await transfer(world, moves, places, kinds, lambda place: contents.held[place[1]][place[0]])
        for move in moves:
            if move.dest == world.rank:
                contents.held[move.part] = {name: came[name, move.part] for name in kinds}
                contents.losses[move.part] = float(gathered[move.source, move.part])
