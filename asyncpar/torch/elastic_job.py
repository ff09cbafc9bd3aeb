"""Elastic training of plain torch programs: steps that commit on all ranks or on none, with the same bits in any world.

Theory of operation.  Each step of the job is the block of a task on the loop thread; the program calls into that task.
When the world changes, the task is cancelled where it waits, but the block is left only at the program's next call, so
nothing is restored while the program computes.  That call raises ``WorldChanged``, which ends the program's own block,
and ``with step`` swallows it.

SIGTERM is handled in the main thread, which must not wait there: the loop asks the agent, and if this process may not
leave in good order, the loop has the main thread handle a second signal, which raises ``SystemExit``.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import numpy as np
import torch

from asyncpar.blocking.pending import Pending
from asyncpar.blocking.program import ended_in_order, report_failures, terminate_main_thread
from asyncpar.blocking.thread import LoopThread, background
from asyncpar.core.concurrency.tasks import off_loop
from asyncpar.core.config.names import CodecName
from asyncpar.elasticity.arithmetic import TORCH_KERNEL
from asyncpar.elasticity.interruption import is_world_changed, program_errors
from asyncpar.elasticity.job import ElasticJob
from asyncpar.elasticity.state import ElasticState
from asyncpar.elasticity.step import ElasticStep
from asyncpar.elasticity.worlds import WorldSource
from asyncpar.errors import UsageError, WorldChanged
from asyncpar.hosts.messages import WorldChange
from asyncpar.torch.elastic_state import Arithmetic, ModelState, OptimizerState, checked_optimizers

T = TypeVar("T")
_SEEDS: Final = 1 << 63


class ElasticTraining:
    """One process of an elastic job that trains a torch model.  Made by ``asyncpar.torch.elastic``; use as ``with``."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: object,
        *,
        portions: int,
        seed: int,
        source: WorldSource | None,
        codecs: dict[str, Any],
        extra: dict[str, Any],
    ) -> None:
        self._model = ModelState(model)
        self._optimizers = [
            OptimizerState(f"torch_optimizer{number or ''}", optimizer, self._model.names)
            for number, optimizer in enumerate(checked_optimizers(optimizers))
        ]
        self._thread = background()
        self._ending = ExitStack()
        if codecs["codec"] is not None and self._model.has_running_statistics:
            raise UsageError(
                "codec: the running statistics of the model's normalizations are averaged with the gradients, and must "
                "not be encoded; use a normalization without, such as torch.nn.GroupNorm"
            )
        arrays = dict(self._model.others)
        for one in self._optimizers:
            arrays.update(one.others)
        values: dict[str, Any] = {**arrays, "arithmetic": Arithmetic(), **{one.name: one for one in self._optimizers}}
        for name in extra:
            if name in values or name in self._model.trained or name in inspect.signature(ElasticJob.state).parameters:
                raise UsageError(f"{name}: the state has this name already; choose another")
        self._job = self._thread.do(lambda: ElasticJob(portions=portions, seed=seed, source=source))
        if self._job.arithmetic:
            self._job.arithmetic[TORCH_KERNEL] = torch.backends.cpu.get_cpu_capability()
        self.state: ElasticState = self._thread.do(
            lambda: self._job.state(self._model.trained, **codecs, **values, **extra)
        )
        """The committed state: ``state["name"]`` reads a value that was given by name."""

    def __enter__(self) -> Self:
        report_failures()
        with ExitStack() as stack:
            stack.enter_context(ended_in_order(self._ask_to_leave))
            self._call(self._job.__aenter__)
            stack.push(self._leave)
            self._ending = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.__exit__(kind, error, traceback)

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._call(lambda: self._job.__aexit__(kind, error, traceback))

    def _ask_to_leave(self, _: Callable[[], None]) -> bool:
        """Request to leave, in a signal handler: the loop does it, and ends this process if the request is refused."""

        def ask() -> None:
            if not self._job.ask_to_leave(terminate_main_thread):
                terminate_main_thread()

        self._thread.loop.call_soon_threadsafe(ask)
        return True

    def steps(self, *, until: int) -> Iterator[TorchStep]:
        """Yield the steps from here to ``until``; after a fault the same number is yielded again.

        Each is used as ``with step``, once, before the next is requested.  Ends early when this process is to leave:
        under an agent the first SIGTERM lets it finish its step and the second one ends it (``SystemExit``), as does
        the first one if no other rank would continue.
        """
        steps = self._job.steps(self.state, until=until)
        try:
            while (step := self._next(steps)) is not None:
                yield TorchStep(self._thread, step, self._job, self._model, self._optimizers)
        finally:
            if asyncio._get_running_loop() is self._thread.loop:  # it collects this, and cannot wait for itself
                self._thread.start(steps.aclose)
            elif not self._thread.is_closed:  # else its end has closed them
                self._call(steps.aclose)

    def _next(self, steps: AsyncIterator[ElasticStep]) -> ElasticStep | None:
        """Return the next step.  An exception that ends the wait, such as that of a signal, ends ``steps`` first."""

        async def following() -> ElasticStep | None:
            return await anext(steps, None)

        pending = self._thread.start(following)
        try:
            return pending.wait()
        except BaseException:
            _await_end(pending)
            raise

    @property
    def is_drained(self) -> bool:
        """Whether this process is not a member at the end; see ``ElasticJob``."""
        return self._job.is_drained

    @property
    def rank(self) -> int:
        """This process's rank in the current world."""
        return self._job.rank

    @property
    def size(self) -> int:
        """Number of ranks of the current world."""
        return self._job.size

    @property
    def generation(self) -> int:
        """The generation of the current world."""
        return self._job.generation

    def _call(self, make: Callable[[], Awaitable[T]]) -> T:
        async def called() -> T:
            return await make()

        return self._thread.call(called)


class TorchStep:
    """One step of an elastic training: use as ``with step``.  See ``asyncpar.elasticity.step.ElasticStep``."""

    def __init__(
        self,
        thread: LoopThread,
        step: ElasticStep,
        job: ElasticJob,
        model: ModelState,
        optimizers: list[OptimizerState],
    ) -> None:
        self._thread = thread
        self._step = step
        self._job = job
        self._model = model
        self._optimizers = optimizers
        self._block: StepBlock | None = None
        self._pending: Pending[None] | None = None
        self._random: torch.Tensor | None = None

    @property
    def number(self) -> int:
        return self._step.number

    @property
    def loss(self) -> float:
        """The mean of the portions' losses, once ``update`` has returned."""
        return self._step.loss / self._job.portions

    @property
    def is_committed(self) -> bool:
        return self._step.is_committed

    @property
    def is_replay(self) -> bool:
        """Whether this newcomer repeats a step that the others have committed; then it has no portions."""
        return self._step.is_replay

    @property
    def change(self) -> WorldChange | None:
        """The change of the world that ended this step, or followed it; None if there was none."""
        return self._step.change

    @property
    def portions(self) -> Iterator[int]:
        """The portions of this rank in this step.

        Before each, torch's random numbers are seeded by (seed, step, portion), so that dropout does not depend on the
        rank; after the step they continue as before.
        """
        for portion in self._step.portions:
            self._check()
            torch.manual_seed(int(self.rng(portion).integers(_SEEDS)))
            self._model.begin_portion()
            yield portion

    def rng(self, portion: int) -> np.random.Generator:
        """Return the random stream of ``portion`` in this step: the same on any rank, and when it is repeated."""
        return self._step.rng(portion)

    def add(self, portion: int, loss: torch.Tensor | float) -> None:
        """Add the current gradients of the model's parameters, from one of this rank's portions, and its mean loss.

        Afterwards the parameters have no gradients.  Raises ``UsageError`` for a portion that is not of this rank or
        was added before, and for a model whose tensors are not those that it had when the job began.
        """
        self._model.check_same()
        gradients = self._model.portion()
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
        nbytes = sum(gradient.nbytes for gradient in gradients)
        self._run(lambda: off_loop(lambda: self._step.add(portion, gradients, loss=value), nbytes=nbytes))
        self._model.end_portion()

    def update(self, *, max_norm: float | None = None) -> None:
        """Step the optimizers with the mean of all portions' gradients.

        With ``max_norm`` gradients are scaled so that their global norm is at most that.
        """
        means = self._run(lambda: self._step.reduce("mean"))
        self._model.take(means)
        if max_norm is not None:
            groups = [group for state in self._optimizers for group in state.optimizer.param_groups]
            torch.nn.utils.clip_grad_norm_([one for group in groups for one in group["params"]], max_norm)
        for state in self._optimizers:
            state.optimizer.step()
            state.check_same()
        self._model.drop_gradients()

    # -- the block -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._model.check_same()
        self._random = torch.get_rng_state()
        self._block = self._thread.do(lambda: StepBlock(self._step))
        self._pending = self._thread.start(self._block.run)
        try:
            self._thread.call(self._block.entered)
        except BaseException as error:
            self._abandon(error)
            raise
        self._model.begin_step()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        assert self._block is not None
        assert self._pending is not None
        assert self._random is not None
        block, pending = self._block, self._pending
        torch.set_rng_state(self._random)
        self._model.drop_gradients()
        own = None if error is None else program_errors(error, is_world_changed)
        if own is not None:
            self._abandon(own)
            if own is not error:
                raise own from own.__cause__
            return False
        self._thread.do(lambda: block.leave(error))
        try:
            pending.wait()
        except BaseException:
            _await_end(pending)
            raise
        return error is not None

    def _abandon(self, error: BaseException) -> None:
        """End the block with ``error``, which is raised; its further consequences are less informative."""
        assert self._block is not None
        assert self._pending is not None
        block, pending = self._block, self._pending
        self._thread.do(lambda: block.leave(error))
        with suppress(Exception):
            pending.wait()

    def _run(self, make: Callable[[], Awaitable[T]]) -> T:
        block = self._expect_block()
        return self._thread.call(lambda: block.call(make))

    def _check(self) -> None:
        """Raise ``WorldChanged`` if the world is over."""
        block = self._expect_block()
        self._thread.do(block.check)

    def _expect_block(self) -> StepBlock:
        if self._block is None:
            raise UsageError(f"step {self.number}: use it as `with step:`")
        return self._block


class StepBlock:
    """The block of ``step``, as a task of the loop that serves requests of another thread."""

    def __init__(self, step: ElasticStep) -> None:
        self.is_interrupted = False
        """Whether the block was ended from outside."""
        self._step = step
        self._task: asyncio.Task[Any] | None = None
        self._is_over = False
        self._results: set[asyncio.Future[Any]] = set()
        self._calls: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._entered: asyncio.Future[None] = loop.create_future()

    async def run(self) -> None:
        """Enter the step, serve requests, leave it."""
        self._task = asyncio.current_task()
        try:
            async with self._step:
                self._entered.set_result(None)
                await self._serve()
        except BaseException as error:
            if not self._entered.done():
                self._entered.set_exception(error)
                self._entered.exception()  # the program may no longer wait for it
            raise
        finally:
            self._is_over = True
            for result in self._results:
                if not result.done():
                    result.set_exception(self._left())

    async def entered(self) -> None:
        """Wait until the step is entered, or raise the error that prevented it."""
        await asyncio.shield(self._entered)

    async def _serve(self) -> None:
        try:
            while True:
                call = await self._calls.get()
                await call()
        except _Left as left:
            self._end(left.error)
        except asyncio.CancelledError:
            self.is_interrupted = True
            while True:  # until the program has reached the end of its block
                call = await self._calls.get()
                try:
                    await call()
                except _Left:
                    break
            raise

    def _end(self, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            raise error from None
        if error is not None:  # such as KeyboardInterrupt, which would end the loop
            raise asyncio.CancelledError
        self.check()

    def check(self) -> None:
        """Raise ``WorldChanged`` if the world is over, and ``UsageError`` if the block has been left."""
        if self._is_over:
            raise self._left()
        if self.is_interrupted:
            raise self._changed()

    def _left(self) -> UsageError:
        number = self._step.number
        return UsageError(f"step {number}: its block has been left; add and update within `with step:`")

    def _changed(self) -> WorldChanged:
        number, generation = self._step.number, self._step.began_in
        return WorldChanged(f"step {number}: the world of generation {generation} is over", generation=generation)

    async def call(self, make: Callable[[], Awaitable[T]]) -> T:
        """Make the block await the awaitable of ``make``, and return its result."""
        if self._is_over:
            raise self._left()
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._results.add(result)
        result.add_done_callback(self._results.discard)

        async def run() -> None:
            try:
                self.check()
                value = await make()
            except asyncio.CancelledError:
                self.is_interrupted = True
                _fail(result, self._changed())
                raise
            except WorldChanged as error:
                self.is_interrupted = True
                _fail(result, error)
            except BaseException as error:  # noqa: BLE001  # raised by the program's call
                _fail(result, error)
            else:
                if not result.done():
                    result.set_result(value)

        self._calls.put_nowait(run)
        return await result

    def leave(self, error: BaseException | None) -> None:
        """Handle the end of the program's block, with ``error``; an error of a signal cancels what is in progress."""

        async def run() -> None:
            raise _Left(error)

        self._calls.put_nowait(run)
        if error is not None and not isinstance(error, Exception) and self._task is not None:
            self._task.cancel()


def _fail(result: asyncio.Future[Any], error: BaseException) -> None:
    """Make a call raise ``error``, if the program still waits for it."""
    if not result.done():
        result.set_exception(error)


def _await_end(pending: Pending[Any]) -> None:
    """Cancel what the program no longer waits for, and return when it has ended."""
    if not pending.is_done:
        pending.cancel()
        with suppress(Exception):
            pending.wait()


class _Left(Exception):  # noqa: N818
    """The program has left its block."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.error = error


def elastic(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | list[torch.optim.Optimizer],
    *,
    portions: int,
    seed: int = 0,
    codec: CodecName | None = None,
    residual_codec: CodecName | None = None,
    source: WorldSource | None = None,
    **extra: Any,
) -> ElasticTraining:
    """Return an elastic training of ``model``: ``with asyncpar.torch.elastic(model, optimizer, portions=16) as job``.

    Ranks may leave and join; every step is committed on all ranks or on none, and the run ends with the bits of an
    undisturbed one.  Every global batch has ``portions`` parts: choose a power of two, at least the largest number of
    ranks there will ever be.  ``codec`` and ``residual_codec`` are those of ``ElasticJob.state``.  ``extra`` are values
    by name that steps change: plain data, and objects with ``state_dict`` and ``load_state_dict``, such as a scheduler.
    ``source`` provides the worlds; by default that is the launcher of this process, or without one a single world of
    one rank.

    Model and optimizers stay in the CPU's memory.  Raises ``UsageError`` for anything that cannot be the state of a
    job.

    ``seed`` determines all random numbers, whatever the world.
    """
    codecs = {"codec": codec, "residual_codec": residual_codec}
    return ElasticTraining(model, optimizer, portions=portions, seed=seed, source=source, codecs=codecs, extra=extra)
