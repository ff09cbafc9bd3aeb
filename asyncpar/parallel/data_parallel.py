"""Data parallelism in one process: a replica per device, each with its own thread."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncpar.backends import CommunicationGroup, CommunicationRuntime
from asyncpar.collectives.communicator import refuse_elastic
from asyncpar.core.callables import CallableTuple
from asyncpar.core.concurrency.worker import WorkerThread
from asyncpar.core.config.slicing import ceil_chunks
from asyncpar.core.not_arrays import describe_other
from asyncpar.core.sums import sum_dtype
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientSynchronizer
from asyncpar.parallel.checked_model import CheckedModel
from asyncpar.parallel.config import DDP_GROUP, SynchronizationMode
from asyncpar.parallel.module import Array, Model, Trainable, check_device, check_is_training, set_training
from asyncpar.parallel.replica_training import Replica, ReplicaTraining
from asyncpar.parallel.replicas import make_equal

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ParallelSaved:
    """Input of a backward pass over replicas: the saved state of each replica, and its number of rows.

    A pass in evaluation saves nothing.
    """

    saved: tuple[Any, ...]
    rows: tuple[int, ...]


class DataParallel:
    """Replicas of ``model``, one per device, that divide every batch and average their gradients.

    The first replica is ``model`` itself: an optimizer works on its parameters, and the others copy them before each
    forward pass.  ``forward``, ``backward`` and ``sync_gradients`` together produce the gradients that ``model`` alone
    would get from the whole batch.  A device is a name; each gets a thread, which numpy lets compute concurrently with
    the others.  With ``runtime``, whose backend must be open, all ranks of its group ``ddp_main`` (or its default
    group) train together: they take the values of rank 0 at the first forward pass, or on entering the block, and all
    of them call ``sync_gradients``, which averages over their replicas, too.

    By default replicas are synchronous.  In the other modes (``set_sync_mode``) each trains by itself: see ``replica``.
    ``name`` distinguishes several models that share a runtime.  ``timeout`` is the number of seconds for which a
    replica waits for slower ones that make no progress (None: forever).

    Raises ``UsageError`` for no devices or one named twice.  Errors of a replica are raised here once all replicas have
    ended; gradients are incomplete then, and must be zeroed before they can be synchronized.
    """

    def __init__(
        self,
        model: Model,
        devices: Sequence[str],
        runtime: CommunicationRuntime | None = None,
        *,
        timeout: float | None = 300.0,
        name: str = "data_parallel",
    ) -> None:
        if isinstance(devices, str):
            raise UsageError(f'devices: expected a sequence of names such as ["cpu:0"], got {devices!r}')
        self.devices = CallableTuple(check_device(device) for device in devices)
        """The names of the devices; ``devices()`` returns them as well."""
        if not self.devices:
            raise UsageError("devices: No devices provided; expected at least one")
        if len(set(self.devices)) < len(self.devices):
            raise UsageError(f"devices: expected each of them once, got {list(self.devices)}")
        if timeout is not None and not timeout > 0.0:
            raise UsageError(f"timeout: expected a positive number of seconds or None, got {timeout!r}")
        self.runtime = runtime
        self._timeout = timeout
        first = CheckedModel(model)
        self._replicas = (first, *(copy.deepcopy(first) for _ in self.devices[1:]))
        self._workers = tuple(WorkerThread(f"compute {device}") for device in self.devices)
        self._samples = [0] * len(self.devices)
        """Rows that contributed to each replica's gradients since the last synchronization."""
        self._is_training = True
        self._is_incomplete = False
        self._mode = SynchronizationMode.SYNCHRONOUS
        self._training: ReplicaTraining | None = None
        self._handles: tuple[Replica, ...] = ()
        self._ranks = None if runtime is None else ReplicaRanks(model.parameters(), runtime, name=name)

    @property
    def replicas(self) -> tuple[Model, ...]:
        """The models, in the order of devices."""
        return tuple(replica.model for replica in self._replicas)

    def parameters(self) -> Sequence[Trainable]:
        """Return the parameters of the first replica, which an optimizer changes."""
        return self._replicas[0].parameters()

    def set_training(self, training: bool) -> None:
        """Set whether gradients are wanted: without training there are neither backward passes nor synchronization."""
        self._is_training = training
        for replica in self._modules():
            set_training(replica.model, training)

    def zero_grad(self) -> None:
        """Forget the gradients of all replicas."""
        for replica in self._modules():
            replica.zero_grad()
        self._samples = [0] * len(self.devices)
        self._is_incomplete = False

    # -- modes -------------------------------------------------------------------------------------------------------

    @property
    def mode(self) -> SynchronizationMode:
        """The mode, which determines how many steps replicas may be apart."""
        return self._mode

    def set_sync_mode(self, mode: SynchronizationMode) -> None:
        """Run replicas in ``mode`` from now on; also start afresh after a replica has failed.

        SYNCHRONOUS: gradients are averaged by ``sync_gradients``.  ASYNCHRONOUS: no replica waits for another.
        BOUNDED_STALENESS(n): none begins a step while it is more than n updates ahead of the slowest.  Raises
        ``UsageError`` while replicas train by themselves, and for the other two over several ranks.
        """
        if not isinstance(mode, SynchronizationMode):
            raise UsageError(f"mode: expected a SynchronizationMode, got {mode!r}")
        self._check_quiet("set_sync_mode")
        if not mode.is_synchronous and self._ranks is not None and self._ranks.group.size > 1:
            raise UsageError(
                f"mode: expected synchronous with a runtime of {self._ranks.group.size} ranks, got {mode}; "
                "DistributedDataParallel has it over ranks"
            )
        self._mode, self._training, self._handles = mode, None, ()
        if mode.is_synchronous:
            return
        replicas = (copy.deepcopy(self._replicas[0]), *self._replicas[1:])
        self._training = ReplicaTraining(self._replicas[0], replicas, self._workers, mode=mode, timeout=self._timeout)
        self._handles = tuple(Replica(self._training, index, device) for index, device in enumerate(self.devices))
        self.set_training(self._is_training)
        self.zero_grad()

    def replica(self, index: int) -> Replica:
        """Return replica ``index``, which trains by itself.  Raises ``UsageError`` in synchronous mode."""
        if not self._handles:
            raise UsageError("replica: expected another mode than synchronous; see set_sync_mode")
        if not 0 <= index < len(self._handles):
            raise UsageError(f"index: expected 0..{len(self._handles) - 1}, got {index}")
        check_is_training(self._is_training)
        return self._handles[index]

    # -- passes ------------------------------------------------------------------------------------------------------

    async def forward(self, x: NDArray[Any]) -> tuple[Array, ParallelSaved]:
        """Scatter ``x`` along dimension 0 and return the concatenated outputs and the state for ``backward``.

        Replicas get ``ceil(rows / devices)`` rows each, the last one the rest; some get none if rows run out.
        """
        chunks = chunk_rows(count_rows(x, "input"), len(self.devices))
        outputs, saved = await self._forward([x[chunk] for chunk in chunks])
        return np.concatenate(outputs), saved

    async def forward_parallel(self, inputs: Sequence[NDArray[Any]]) -> tuple[list[Array], ParallelSaved]:
        """Pass each replica its own input; return the outputs in the same order."""
        self._check_count("inputs", len(inputs))
        return await self._forward(inputs)

    async def backward(self, saved: ParallelSaved, dy: Array) -> Array | None:
        """Scatter ``dy``, the gradient of the loss with respect to the output of ``forward``; return that of its input.

        The loss is that of the whole batch, and so are the gradients after ``sync_gradients``.
        """
        total, got = sum(saved.rows), count_rows(dy, "dy")
        if got != total:
            raise UsageError(f"dy: expected {total} rows, as many as the output has, got {got}")
        shares = [rows / total for rows in saved.rows]
        stops = np.cumsum(saved.rows).tolist()
        chunks = [dy[stop - rows : stop] for stop, rows in zip(stops, saved.rows, strict=True)]
        gradients = await self._backward(saved, chunks, shares)
        inputs = [gradient for gradient in gradients if gradient is not None]
        return np.concatenate(inputs) if inputs else None

    async def backward_parallel(self, saved: ParallelSaved, dys: Sequence[Array]) -> list[Array | None]:
        """Pass each replica the gradient of its output of ``forward_parallel``; return those of the inputs.

        Each is that of the replica's own loss, a mean over its own rows; ``sync_gradients`` weighs them by rows.
        """
        self._check_count("dys", len(dys))
        return await self._backward(saved, dys, [1.0] * len(dys))

    async def sync_gradients(self) -> None:
        """Replace the gradients of all replicas by their mean, weighted by the rows of each since the last
        synchronization.

        Does nothing if not training, or if there was no backward pass since then on any rank.
        """
        if not self._is_training:
            return
        self._check_batches("sync_gradients")
        rows = sum(self._samples)
        share = await self._share(rows)
        if share is None:
            return
        self._is_incomplete = True  # until all of it is done
        weights = [share * samples / rows if rows else 0.0 for samples in self._samples]
        await self._workers[0].run(self._average, weights)
        if self._ranks is not None:
            await self._ranks.average()
            await self._workers[0].run(self._spread)
        self._samples = [0] * len(self.devices)
        self._is_incomplete = False

    # -- life --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads."""
        for worker in self._workers:
            worker.close()
        if self._ranks is not None:
            self._ranks.close()

    async def __aenter__(self) -> Self:
        if self._ranks is not None:
            await self._ranks.prepare()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _modules(self) -> Iterator[CheckedModel]:
        """Yield all models: the replicas, and that of the first device's computation if they train by themselves."""
        yield from self._replicas
        if self._training is not None:
            yield self._training.replicas[0]

    def _check_quiet(self, what: str) -> None:
        busy = [replica.index for replica in self._handles if replica.is_open]
        if busy:
            raise UsageError(f"{what}: expected no replica to train by itself, but replica {busy[0]} does")

    def _check_batches(self, what: str) -> None:
        """Raise ``UsageError`` unless batches are divided: replicas that train by themselves take their own."""
        if self._training is not None and self._is_training:
            raise UsageError(f"{what}: in {self._mode} mode each replica trains by itself; use replica(index)")
        self._check_quiet(what)

    def _check_count(self, name: str, got: int) -> None:
        """Raise ``UsageError`` unless there is one array for each device."""
        if got != len(self.devices):
            raise UsageError(f"{name}: expected {len(self.devices)} arrays, one for each device, got {got}")

    async def _share(self, rows: int) -> float | None:
        """Return this rank's part of the mean over all ranks, times their number; None if there are no rows."""
        if self._ranks is not None:
            return await self._ranks.share(rows, is_incomplete=self._is_incomplete)
        if not rows:
            return None
        if self._is_incomplete:
            raise UsageError("sync_gradients: a replica failed in its backward pass; call zero_grad and begin anew")
        return 1.0

    async def _forward(self, inputs: Sequence[NDArray[Any]]) -> tuple[list[Array], ParallelSaved]:
        self._check_batches("forward")
        if self._ranks is not None:
            await self._ranks.prepare()
        rows = tuple(count_rows(x, f"input {index}") for index, x in enumerate(inputs))
        done = await _all(self._workers[i].run(self._forward_one, i, x) for i, x in enumerate(inputs))
        saved = tuple(kept for _, kept in done) if self._is_training else ()
        return [output for output, _ in done], ParallelSaved(saved, rows)

    def _forward_one(self, index: int, x: NDArray[Any]) -> tuple[Array, Any]:
        if index:
            for mine, first in zip(self._replicas[index].parameters(), self.parameters(), strict=True):
                np.copyto(mine.value, first.value)
        return self._replicas[index].forward(x)

    async def _backward(
        self, saved: ParallelSaved, dys: Sequence[Array], shares: Sequence[float]
    ) -> list[Array | None]:
        check_is_training(self._is_training)
        self._check_batches("backward")
        if not saved.saved:
            raise UsageError(
                "saved: it belongs to a forward pass in evaluation; call set_training(True) before forward"
            )
        for index, rows in enumerate(saved.rows):
            self._samples[index] += rows
        passes = zip(saved.saved, dys, shares, strict=True)
        try:
            return await _all(self._workers[i].run(self._backward_one, i, *one) for i, one in enumerate(passes))
        except BaseException:
            self._is_incomplete = True
            raise

    def _backward_one(self, index: int, saved: Any, dy: Array, share: float) -> Array | None:
        """Run one replica as if its loss were a mean over its own rows, whose part of the batch's is ``share``."""
        if share == 1.0:
            return self._replicas[index].backward(saved, dy)
        dx = self._replicas[index].backward(saved, dy / np.asarray(share, dy.dtype))
        return None if dx is None else dx * np.asarray(share, dx.dtype)

    def _average(self, weights: Sequence[float]) -> None:
        for gradients in zip(*([p.grad for p in replica.parameters()] for replica in self._replicas), strict=True):
            dtype = sum_dtype(gradients[0].dtype)
            mean = np.zeros(gradients[0].shape, dtype)
            for gradient, weight in zip(gradients, weights, strict=True):
                if weight:
                    mean += gradient * np.asarray(weight, dtype)
            for gradient in gradients:
                np.copyto(gradient, mean, casting="same_kind")

    def _spread(self) -> None:
        """Copy the first replica's gradients to all."""
        for first, *others in zip(*([p.grad for p in one.parameters()] for one in self._replicas), strict=True):
            for gradient in others:
                np.copyto(gradient, first)


async def _all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results in order; if some fail, wait for all of them and raise the first failure."""
    results: list[T | BaseException] = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def chunk_rows(rows: int, parts: int) -> tuple[slice, ...]:
    """Return at most ``parts`` chunks of ``ceil(rows / parts)`` rows, the last of which may be shorter; none is empty.

    Thus there are fewer chunks than parts if rows run out.
    """
    if rows < 1:
        raise UsageError(f"input: expected at least one row along dimension 0, got {rows}")
    return tuple(slice(start, stop) for start, stop in ceil_chunks(rows, parts) if start < stop)


def count_rows(x: object, name: str) -> int:
    """Return the length along dimension 0.  Raises ``UsageError`` for anything without rows."""
    if not isinstance(x, np.ndarray) or x.ndim < 1 or x.shape[0] < 1:
        got = f"shape {x.shape}" if isinstance(x, np.ndarray) else describe_other(x)
        raise UsageError(f"{name}: expected an array of at least one row along dimension 0, got {got}")
    return int(x.shape[0])


class ReplicaRanks:
    """Averages the gradients of ``parameters`` over the ranks of ``runtime``, weighted by their numbers of rows.

    The ranks are those of its group ``ddp_main``, or of its default group.  ``name`` belongs to one live object at a
    time.
    """

    def __init__(self, parameters: Sequence[Trainable], runtime: CommunicationRuntime, *, name: str) -> None:
        self._runtime = runtime
        self._parameters = tuple(parameters)
        self._claimed = self._name = name
        self._turn = asyncio.Lock()
        self._synchronizer: GradientSynchronizer | None = None

    @property
    def group(self) -> CommunicationGroup:
        """All ranks.  Raises ``NoGroup`` while no backend is open."""
        return self._runtime.get_group(DDP_GROUP if DDP_GROUP in self._runtime.groups else None)

    async def prepare(self) -> None:
        """Check that all ranks have the same parameters, and take the values of rank 0; once, on all ranks."""
        async with self._turn:
            if self._synchronizer is not None:
                return
            communicator = self.group.communicator
            refuse_elastic(communicator, "DataParallel with a runtime", "replicas")
            communicator.claim(self._claimed, self)
            try:
                word = await make_equal(self._parameters, (), communicator, key=f"{self._name}/start")
            except BaseException:
                communicator.release(self._claimed, self)
                raise
            self._name = f"{self._name}/{word}"
            self._synchronizer = GradientSynchronizer.data_parallel(communicator, name=f"{self._name}/gradients")

    def close(self) -> None:
        """Release the name."""
        if self._synchronizer is not None:
            self._synchronizer.close()
            self._synchronizer = None
            self.group.communicator.release(self._claimed, self)

    async def share(self, rows: int, *, is_incomplete: bool) -> float | None:
        """Return the factor for this rank's mean that makes the mean over ranks that over all rows.

        Return None if no rank has any rows.  Raises ``UsageError``, on every rank, if gradients are incomplete on some.
        """
        await self.prepare()
        communicator = self.group.communicator
        mine = np.array([rows, is_incomplete], np.int64)
        counts = await communicator.all_gather(mine, key=f"{self._name}/rows")
        broken = np.flatnonzero(counts[:, 1])
        if broken.size:
            raise UsageError(
                f"sync_gradients: a replica of rank {broken[0]} failed in its backward pass; call zero_grad on all "
                "ranks and begin anew"
            )
        total = int(counts[:, 0].sum())
        return rows * communicator.size / total if total else None

    async def average(self) -> None:
        """Replace the gradients by their mean over ranks."""
        assert self._synchronizer is not None, "share comes first"
        async with self._synchronizer.step(self._parameters):
            pass
