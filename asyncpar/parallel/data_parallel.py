"""Data parallelism in one process: a replica per device, each with a thread of its own."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from asyncpar.backends import CommunicationRuntime
from asyncpar.errors import UsageError
from asyncpar.parallel.module import Array, Module, Trainable, check_device, check_is_training, set_training
from asyncpar.parallel.scatter import check_count, chunk_rows, count_rows
from asyncpar.parallel.worker import ComputeWorker

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ParallelSaved:
    """What a backward pass over replicas needs: what each replica saved, and how many rows it had.

    A pass in evaluation saves nothing.
    """

    saved: tuple[Any, ...]
    rows: tuple[int, ...]


class DataParallel:
    """Replicas of ``model``, one per device, that share out every batch and average their gradients.

    The first replica is ``model`` itself: an optimizer works on its parameters, and the others copy them before each
    forward pass.  ``forward``, ``backward`` and ``sync_gradients`` together leave the gradients that ``model`` alone
    would get from the whole batch.  A device is a name; each gets a thread, which numpy lets compute beside the others.
    ``runtime`` is kept for the caller: replicas of one process need no communication.

    Raises ``UsageError`` for no devices or one named twice.  What a replica raises is raised here, once all replicas
    have come to their end; after that gradients are incomplete, and must be zeroed before they can be synchronized.
    """

    def __init__(self, model: Module, devices: Sequence[str], runtime: CommunicationRuntime | None = None) -> None:
        if isinstance(devices, str):
            raise UsageError(f'devices: expected a sequence of names such as ["cpu:0"], got {devices!r}')
        self.devices = tuple(check_device(device) for device in devices)
        if not self.devices:
            raise UsageError("devices: No devices provided; expected at least one")
        if len(set(self.devices)) < len(self.devices):
            raise UsageError(f"devices: expected each of them once, got {list(self.devices)}")
        self.runtime = runtime
        self._replicas = (model, *(copy.deepcopy(model) for _ in self.devices[1:]))
        self._workers = tuple(ComputeWorker(device) for device in self.devices)
        self._samples = [0] * len(self.devices)
        """Rows that went into each replica's gradients since the last synchronization."""
        self._is_training = True
        self._is_incomplete = False

    @property
    def replicas(self) -> tuple[Module, ...]:
        """The models, in the order of devices."""
        return self._replicas

    def parameters(self) -> Sequence[Trainable]:
        """Return the parameters of the first replica, which an optimizer changes."""
        return self._replicas[0].parameters()

    def set_training(self, training: bool) -> None:
        """Say whether gradients are wanted: without training there are neither backward passes nor synchronization."""
        self._is_training = training
        for replica in self._replicas:
            set_training(replica, training)

    def zero_grad(self) -> None:
        """Forget the gradients of all replicas."""
        for replica in self._replicas:
            replica.zero_grad()
        self._samples = [0] * len(self.devices)
        self._is_incomplete = False

    # -- passes ------------------------------------------------------------------------------------------------------

    async def forward(self, x: NDArray[Any]) -> tuple[Array, ParallelSaved]:
        """Scatter ``x`` along dimension 0 and return the outputs, concatenated, and what ``backward`` needs.

        Replicas get ``ceil(rows / devices)`` rows each, the last one what is left; some get none when rows run out.
        """
        chunks = chunk_rows(count_rows(x, "input"), len(self.devices))
        outputs, saved = await self._forward([x[chunk] for chunk in chunks])
        return np.concatenate(outputs), saved

    async def forward_parallel(self, inputs: Sequence[NDArray[Any]]) -> tuple[list[Array], ParallelSaved]:
        """Give each replica the input of its place; return the outputs in the same order."""
        check_count("inputs", len(inputs), self.devices)
        return await self._forward(inputs)

    async def backward(self, saved: ParallelSaved, dy: Array) -> Array | None:
        """Scatter ``dy``, the gradient of the loss by the output of ``forward``; return that by its input.

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
        """Give each replica the gradient of its output of ``forward_parallel``; return those of the inputs.

        Each is that of the replica's own loss, a mean over its own rows; ``sync_gradients`` weighs them by rows.
        """
        check_count("dys", len(dys), self.devices)
        return await self._backward(saved, dys, [1.0] * len(dys))

    async def sync_gradients(self) -> None:
        """Replace the gradients of all replicas by their mean, weighted by the rows that each has had since the last.

        Does nothing when not training, or when there was no backward pass since.
        """
        if not self._is_training or not any(self._samples):
            return
        if self._is_incomplete:
            raise UsageError("sync_gradients: a replica failed in its backward pass; call zero_grad and begin anew")
        total = sum(self._samples)
        await self._workers[0].run(self._average, [samples / total for samples in self._samples])
        self._samples = [0] * len(self.devices)

    # -- life --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let the threads go."""
        for worker in self._workers:
            worker.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    async def _forward(self, inputs: Sequence[NDArray[Any]]) -> tuple[list[Array], ParallelSaved]:
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
        if not saved.saved:
            raise UsageError("saved: it is of a forward pass in evaluation; call set_training(True) before forward")
        for index, rows in enumerate(saved.rows):
            self._samples[index] += rows
        passes = zip(saved.saved, dys, shares, strict=True)
        try:
            return await _all(self._workers[i].run(self._backward_one, i, *one) for i, one in enumerate(passes))
        except BaseException:
            self._is_incomplete = True
            raise

    def _backward_one(self, index: int, saved: Any, dy: Array, share: float) -> Array | None:
        """Run one replica as if its loss were a mean over its own rows, of which the batch's has ``share``."""
        if share == 1.0:
            return self._replicas[index].backward(saved, dy)
        dx = self._replicas[index].backward(saved, dy / np.asarray(share, dy.dtype))
        return None if dx is None else dx * np.asarray(share, dx.dtype)

    def _average(self, weights: Sequence[float]) -> None:
        for gradients in zip(*([p.grad for p in replica.parameters()] for replica in self._replicas), strict=True):
            mean = np.zeros_like(gradients[0])
            for gradient, weight in zip(gradients, weights, strict=True):
                if weight:
                    mean += gradient * np.asarray(weight, gradient.dtype)
            for gradient in gradients:
                np.copyto(gradient, mean)


async def _all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Return all results in order; when some fail, wait for all of them and raise the first failure."""
    results: list[T | BaseException] = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
