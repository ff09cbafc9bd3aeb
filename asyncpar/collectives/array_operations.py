"""The array operations of a communicator."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, overload

import numpy as np

from asyncpar.collectives import coalesced, exchanges, gathers, reductions, rooted
from asyncpar.collectives.all_reduce import AllReduce, EngineOperations, MethodWithParts, is_elsewhere
from asyncpar.collectives.arrays import Array
from asyncpar.core.config.names import (
    AllGatherAlgorithm,
    AllReduceAlgorithm,
    AllToAllAlgorithm,
    BarrierAlgorithm,
    BroadcastAlgorithm,
    ReduceAlgorithm,
    ReduceOp,
    ReduceScatterAlgorithm,
    RootedAlgorithm,
)
from asyncpar.core.foreign_arrays import ArrayT, HostArray, is_foreign

_NUMPY = {np.ndarray}


def _all_reduce_of(operations: EngineOperations) -> AllReduce:
    return AllReduce(operations._engine)


class ArrayOperations(EngineOperations):
    """Collective operations on arrays.  ``Communicator`` describes what they have in common.

    Arrays are numpy's, or others in the memory of the host: torch tensors, JAX arrays, columns of pandas, polars and
    Arrow without missing values, and everything with DLPack or Python's buffer protocol (``array.array``,
    ``memoryview``, ``mmap``).  They are read without a copy where their library hands out its memory, and results are
    of the same kind: an operation in place writes into ``x``, or returns a new array where ``x`` never changes, as
    those of JAX, columns and read-only buffers.  A torch tensor that requires grad is refused outside of
    ``torch.no_grad()``.  Labels of a pandas column stay where each element belongs to that in its place; arrays of two
    dimensions become a ``DataFrame``, in Arrow lists of fixed size, and of buffers a ``memoryview``.

    Arrays may live on CUDA devices, on all ranks or on none: contiguous arrays of any library that supports
    ``__cuda_array_interface__`` or DLPack (torch, CuPy, JAX).  NCCL moves them where all ranks have it, in the order in
    which ranks agree on operations; otherwise they go through the host, which is reported by one warning.  Results are
    arrays of the caller's library.  Work that the caller has enqueued before the call on its library's current stream
    comes first.  With ``stream``, a CUDA stream or its handle, the operation is enqueued on that stream, and the call
    returns then: later work on that stream sees the result, and arrays are lent until the operation is over.
    ``algorithm`` is nccl or staged.  An operation that fails while it runs on the devices ends all others that do so in
    the group.
    """

    # -- combining -------------------------------------------------------------------------------------------------

    all_reduce = MethodWithParts(AllReduce.all_reduce, _all_reduce_of)

    @overload
    def all_reduce_many(
        self,
        arrays: Iterable[Array],
        op: ReduceOp = "sum",
        *,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
    ) -> Coroutine[Any, Any, list[Array]]: ...

    @overload
    def all_reduce_many(
        self,
        arrays: Iterable[HostArray],
        op: ReduceOp = "sum",
        *,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
    ) -> Coroutine[Any, Any, list[Any]]: ...

    def all_reduce_many(
        self,
        arrays: Iterable[HostArray],
        op: ReduceOp = "sum",
        *,
        algorithm: AllReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
    ) -> Coroutine[Any, Any, list[Any]]:
        """Combine each of ``arrays`` of all ranks, in place, and return them in a list.

        All of them are one operation, which is much faster than one per array where they are small.  They may differ in
        shape, layout and dtype, but must not overlap; all ranks pass the same shapes and dtypes in the same order.
        Results are as those of ``all_reduce``, with the same bits on every rank.
        """
        arrays = _listed(arrays)
        if isinstance(arrays, list) and arrays and _are_elsewhere(arrays, stream):
            return self._elsewhere("all_reduce_many", arrays, op=op, algorithm=algorithm, key=key, stream=stream)
        return self._engine.checked(
            "all_reduce_many",
            key,
            lambda: coalesced.all_reduce_many(self._engine, arrays, op=op, algorithm=algorithm, key=key),
        )

    def reduce(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        root: int = 0,
        out: HostArray | None = None,
        algorithm: ReduceAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
    ) -> Coroutine[Any, Any, ArrayT | None]:
        """Combine ``x`` of all ranks at ``root``, which gets the result (in ``out``); other ranks get None."""
        if (type(x) is not np.ndarray or stream is not None) and is_elsewhere(x, stream):
            return self._elsewhere("reduce", x, op=op, root=root, out=out, algorithm=algorithm, key=key, stream=stream)
        return self._engine.checked(
            "reduce",
            key,
            lambda: reductions.reduce(self._engine, x, op=op, root=root, out=out, algorithm=algorithm, key=key),
        )

    def reduce_scatter(
        self,
        x: ArrayT,
        op: ReduceOp = "sum",
        *,
        out: HostArray | None = None,
        algorithm: ReduceScatterAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
    ) -> Coroutine[Any, Any, ArrayT]:
        """Combine ``x`` of all ranks and return this rank's slice of the result along axis 0.

        Slices have ``ceil(len(x) / size)`` rows; those of the last ranks may be shorter or empty.  ``x`` has the same
        shape on all ranks, and ``op`` is sum, mean, prod, min, max, band, bor or bxor.  ``out`` receives the result
        (None: a new array).  ``algorithm`` is one of ``comm.algorithms("reduce_scatter")`` (None: the fastest by the
        cost model).  Calls with equal ``key`` match each other, in any order.  ``stream`` is for arrays on CUDA
        devices.

        Example::

            mine = await comm.reduce_scatter(np.ones(2 * comm.size))  # [size, size]
        """
        if (type(x) is not np.ndarray or stream is not None) and is_elsewhere(x, stream):
            return self._elsewhere("reduce_scatter", x, op=op, out=out, algorithm=algorithm, key=key, stream=stream)
        return self._engine.checked(
            "reduce_scatter",
            key,
            lambda: reductions.reduce_scatter(self._engine, x, op=op, out=out, algorithm=algorithm, key=key),
        )

    # -- gathering and scattering ----------------------------------------------------------------------------------

    def all_gather(
        self,
        x: ArrayT,
        *,
        out: HostArray | None = None,
        algorithm: AllGatherAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
    ) -> Coroutine[Any, Any, ArrayT]:
        """Return ``x`` of all ranks as one array of shape ``(size, *x.shape)``.

        ``x`` has the same shape and dtype on all ranks; ``all_gather_v`` accepts different lengths.  ``out`` receives
        the result (None: a new array).  ``algorithm`` is one of ``comm.algorithms("all_gather")`` (None: the fastest by
        the cost model).  Calls with equal ``key`` match each other, in any order.  ``stream`` is for arrays on CUDA
        devices.

        Example::

            ranks = await comm.all_gather(np.array([comm.rank]))  # [[0], [1], ...]
        """
        if (type(x) is not np.ndarray or stream is not None) and is_elsewhere(x, stream):
            return self._elsewhere("all_gather", x, out=out, algorithm=algorithm, key=key, stream=stream)
        return self._engine.checked(
            "all_gather", key, lambda: gathers.all_gather(self._engine, x, out=out, algorithm=algorithm, key=key)
        )

    def all_gather_v(
        self,
        x: ArrayT,
        *,
        out: HostArray | None = None,
        algorithm: AllGatherAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
    ) -> Coroutine[Any, Any, ArrayT]:
        """Return ``x`` of all ranks, concatenated along axis 0, in which they may differ."""
        if (type(x) is not np.ndarray or stream is not None) and is_elsewhere(x, stream):
            return self._elsewhere("all_gather_v", x, out=out, algorithm=algorithm, key=key, stream=stream)
        return self._engine.checked(
            "all_gather_v", key, lambda: gathers.all_gather_v(self._engine, x, out=out, algorithm=algorithm, key=key)
        )

    def gather(
        self,
        x: ArrayT,
        *,
        root: int = 0,
        out: HostArray | None = None,
        algorithm: RootedAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
    ) -> Coroutine[Any, Any, ArrayT | None]:
        """Return ``x`` of all ranks at ``root``, as ``all_gather`` does; other ranks get None."""
        if (type(x) is not np.ndarray or stream is not None) and is_elsewhere(x, stream):
            return self._elsewhere("gather", x, root=root, out=out, algorithm=algorithm, key=key, stream=stream)
        return self._engine.checked(
            "gather", key, lambda: rooted.gather(self._engine, x, root=root, out=out, algorithm=algorithm, key=key)
        )

    def scatter(
        self,
        x: ArrayT | None = None,
        *,
        root: int = 0,
        out: ArrayT | None = None,
        algorithm: RootedAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
    ) -> Coroutine[Any, Any, ArrayT]:
        """Return ``x[rank]`` of the ``x`` that ``root`` passes, of shape ``(size, ...)``.

        The other ranks pass no ``x`` but ``out``, which gives shape and dtype.
        """
        if (type(x) is not np.ndarray or stream is not None) and is_elsewhere(x if x is not None else out, stream):
            return self._elsewhere("scatter", x, root=root, out=out, algorithm=algorithm, key=key, stream=stream)
        return self._engine.checked(
            "scatter", key, lambda: rooted.scatter(self._engine, x, root=root, out=out, algorithm=algorithm, key=key)
        )

    def broadcast(
        self,
        x: ArrayT,
        *,
        root: int = 0,
        algorithm: BroadcastAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
    ) -> Coroutine[Any, Any, ArrayT]:
        """Overwrite ``x`` with that of ``root``, and return it.

        ``x`` is an array of the same shape and dtype on all ranks.  ``algorithm`` is one of
        ``comm.algorithms("broadcast")`` (None: the fastest by the cost model).  Calls with equal ``key`` match each
        other, in any order.  ``stream`` is for arrays on CUDA devices.

        Example::

            weights = await comm.broadcast(np.full(3, comm.rank), root=1)  # [1, 1, 1]
        """
        if (type(x) is not np.ndarray or stream is not None) and is_elsewhere(x, stream):
            return self._elsewhere("broadcast", x, root=root, algorithm=algorithm, key=key, stream=stream)
        return self._engine.checked(
            "broadcast", key, lambda: rooted.broadcast(self._engine, x, root=root, algorithm=algorithm, key=key)
        )

    def barrier(
        self, *, algorithm: BarrierAlgorithm | None = None, key: str | None = None
    ) -> Coroutine[Any, Any, None]:
        """Wait until all ranks have called it.

        ``algorithm`` is one of ``comm.algorithms("barrier")`` (None: the fastest by the cost model).  Calls with equal
        ``key`` match each other, in any order.

        Example::

            await comm.barrier()
        """
        return self._engine.checked("barrier", key, lambda: gathers.barrier(self._engine, algorithm=algorithm, key=key))

    def all_to_all(
        self,
        x: ArrayT,
        *,
        out: HostArray | None = None,
        algorithm: AllToAllAlgorithm | None = None,
        key: str | None = None,
        stream: object = None,
    ) -> Coroutine[Any, Any, ArrayT]:
        """Send ``x[r]`` to each rank ``r`` and return an array like ``x``, whose entry ``r`` came from rank ``r``."""
        if (type(x) is not np.ndarray or stream is not None) and is_elsewhere(x, stream):
            return self._elsewhere("all_to_all", x, out=out, algorithm=algorithm, key=key, stream=stream)
        return self._engine.checked(
            "all_to_all", key, lambda: exchanges.all_to_all(self._engine, x, out=out, algorithm=algorithm, key=key)
        )

    def all_to_all_v(
        self,
        x: ArrayT,
        counts: Sequence[int],
        *,
        out: HostArray | None = None,
        key: str | None = None,
        stream: object = None,
    ) -> Coroutine[Any, Any, tuple[ArrayT, list[int]]]:
        """Send the first ``counts[0]`` rows of ``x`` to rank 0, the next ``counts[1]`` to rank 1, and so on.

        Returns the received rows, in the order of their senders' ranks, and the number of rows from each.
        """
        if (type(x) is not np.ndarray or stream is not None) and is_elsewhere(x, stream):
            return self._elsewhere("all_to_all_v", x, counts, out=out, key=key, stream=stream)
        return self._engine.checked(
            "all_to_all_v", key, lambda: exchanges.all_to_all_v(self._engine, x, counts, out=out, key=key)
        )


def _are_elsewhere(arrays: list[Any], stream: object) -> bool:
    if stream is None and {*map(type, arrays)} == _NUMPY:
        return False
    return is_elsewhere(arrays[0], stream) or any(map(is_foreign, arrays))


def _listed(arrays: Any) -> Any:
    """Return ``arrays`` as a list; if it cannot be one, it is refused later."""
    return list(arrays) if isinstance(arrays, Iterable) else arrays
