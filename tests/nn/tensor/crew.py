"""Tensor-parallel ranks as threads that meet at a board, with a record of what they exchange."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from asyncpar.core.config.placement import Replication
from asyncpar.nn import Array, Parameter
from asyncpar.nn.tensor import TensorGroup
from asyncpar.shards.plan import split_bounds

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One exchange: what is done, and how many bytes of whole activations it is about."""

    operation: str
    nbytes: int


class Board:
    """Where ``size`` threads hand arrays to each other, in rounds."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._posts: list[Any] = [None] * size

    def meet(self, rank: int, what: tuple[Any, ...], x: Array) -> list[Array]:
        """Return what all have posted, copied; all must have come to do the same."""
        self._posts[rank] = (what, x.copy())
        self._barrier.wait()
        posts = list(self._posts)
        self._barrier.wait()
        assert len({post[0] for post in posts}) == 1, f"ranks came for different things: {[post[0] for post in posts]}"
        return [post[1] for post in posts]

    def abort(self) -> None:
        self._barrier.abort()


@dataclass
class ThreadGroup(TensorGroup):
    """The face of one thread.  Sums are taken in rank order, so they are equal on all."""

    board: Board
    place: int
    count: int
    calls: list[Call] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.place

    @property
    def size(self) -> int:
        return self.count

    def start_all_reduce(self, x: Array) -> Callable[[], Array]:
        assert x.flags.c_contiguous
        self.calls.append(Call("all_reduce", x.nbytes))
        before = x.copy()

        def wait() -> Array:
            np.testing.assert_array_equal(x, before)
            x[...] = sum(self.board.meet(self.place, ("all_reduce", x.shape, x.dtype), x))
            return x

        return wait

    def all_reduce_max(self, x: Array) -> Array:
        self.calls.append(Call("all_reduce_max", x.nbytes))
        x[...] = np.maximum.reduce(self.board.meet(self.place, ("max", x.shape, x.dtype), x))
        return x

    def all_gather(self, x: Array, dim: int) -> Array:
        whole = np.concatenate(self.board.meet(self.place, ("all_gather", dim), x), axis=dim)
        assert (
            split_bounds(whole.shape[dim], self.count)[self.place][1] - self.bounds(whole.shape[dim])[0] == x.shape[dim]
        )
        self.calls.append(Call("all_gather", whole.nbytes))
        return whole

    def reduce_scatter(self, x: Array, dim: int) -> Array:
        self.calls.append(Call("reduce_scatter", x.nbytes))
        total: Array = np.asarray(sum(self.board.meet(self.place, ("reduce_scatter", x.shape, dim), x)))
        return np.ascontiguousarray(total[(slice(None),) * dim + (slice(*self.bounds(x.shape[dim])),)])


def run_ranks(size: int, function: Callable[[ThreadGroup], T]) -> list[T]:
    """Return what ``function`` returns on each of ``size`` ranks; if one fails, so does this, with its error."""
    board = Board(size)

    def run(rank: int) -> T:
        try:
            return function(ThreadGroup(board, rank, size))
        except BaseException:
            board.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def errors_of(size: int, function: Callable[[ThreadGroup], Any]) -> list[BaseException | None]:
    """Return what ``function`` raises on each rank; it must not exchange anything before."""

    def catch(group: ThreadGroup) -> BaseException | None:
        try:
            function(group)
        except Exception as error:  # noqa: BLE001 — handed to the test
            assert group.calls == [], "something was exchanged before"
            return error
        return None

    return run_ranks(size, catch)


def whole_values(ranks: Sequence[Sequence[Parameter]]) -> dict[str, Array]:
    """Return the values of whole parameters by name; copies must be equal to the last bit."""
    whole = _Whole()
    for parameter in _every(ranks):
        whole.add(parameter, parameter.value, are_summed=False)
    return whole.checked()


def whole_gradients(ranks: Sequence[Sequence[Parameter]]) -> dict[str, Array]:
    """Return the gradients of whole parameters by name; copies are equal to the last bit or added, as placed."""
    whole = _Whole()
    for parameter in _every(ranks):
        whole.add(parameter, parameter.grad, are_summed=parameter.placement.replicated is Replication.PARTIAL)
    return whole.checked()


def _every(ranks: Sequence[Sequence[Parameter]]) -> Iterator[Parameter]:
    return (parameter for parameters in ranks for parameter in parameters)


class _Whole:
    """Whole arrays that are put together from parts, which must cover everything, once."""

    def __init__(self) -> None:
        self._arrays: dict[str, Array] = {}
        self._counts: dict[str, Any] = {}

    def add(self, parameter: Parameter, array: Array, *, are_summed: bool) -> None:
        part = parameter.slice
        target = self._arrays.setdefault(parameter.name, np.zeros(part.global_shape, array.dtype))
        count = self._counts.setdefault(parameter.name, np.zeros(part.global_shape, np.int64))
        is_copy = parameter.placement.replicated is not None and count.all()
        if is_copy and are_summed:
            target += array
        elif is_copy:
            np.testing.assert_array_equal(array, target, err_msg=parameter.name)
        else:
            part.put(part.cut(count) + 1, count)
            part.put(array, target)

    def checked(self) -> dict[str, Array]:
        for name, count in self._counts.items():
            assert (count == 1).all(), f"{name} is not covered once everywhere"
        return self._arrays
