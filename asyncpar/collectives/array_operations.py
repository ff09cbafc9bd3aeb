"""The array operations of a communicator."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from asyncpar.collectives import coalesced, exchanges, gathers, reductions, rooted
from asyncpar.collectives.arrays import Array
from asyncpar.collectives.engine import Engine


class ArrayOperations:
    """Collective operations on arrays.  ``Communicator`` says what they have in common."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    # -- combining -------------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        key: str | None = None,
    ) -> Coroutine[Any, Any, Array]:
        """Combine ``x`` of all ranks, in place (or into ``out``), and return it.

        ``op`` is sum, mean, prod, min, max, band, bor or bxor.  The result has the same bits on every rank, and again
        whenever the same values are reduced by the same algorithm.  A mean is the sum, divided at the end; in float16,
        which may not hold the sum, each rank's part is divided first (values below 6e-5 lose digits by that).  Needs
        8 MiB of memory besides at most.
        """
        try:
            return reductions.all_reduce(self._engine, x, op=op, out=out, algorithm=algorithm, key=key)
        except Exception as error:
            self._engine.refuse("all_reduce", error, key)
            raise

    def all_reduce_many(
        self,
        arrays: Iterable[Array],
        op: str = "sum",
        *,
        algorithm: str | None = None,
        key: str | None = None,
    ) -> Coroutine[Any, Any, list[Array]]:
        """Combine each of ``arrays`` of all ranks, in place, and return them in a list.

        One operation for all of them, which is much faster than one for each where they are small.  They may differ in
        shape, layout and dtype, but must not overlap; all ranks pass the same shapes and dtypes in the same order.
        Results are as those of ``all_reduce``, with the same bits on every rank.
        """
        return self._engine.checked(
            "all_reduce_many",
            key,
            lambda: coalesced.all_reduce_many(self._engine, arrays, op=op, algorithm=algorithm, key=key),
        )

    def reduce(
        self,
        x: Array,
        op: str = "sum",
        *,
        root: int = 0,
        out: Array | None = None,
        algorithm: str | None = None,
        key: str | None = None,
    ) -> Coroutine[Any, Any, Array | None]:
        """Combine ``x`` of all ranks at ``root``, which gets the result (in ``out``); the others get None."""
        return self._engine.checked(
            "reduce",
            key,
            lambda: reductions.reduce(self._engine, x, op=op, root=root, out=out, algorithm=algorithm, key=key),
        )

    def reduce_scatter(
        self,
        x: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        key: str | None = None,
    ) -> Coroutine[Any, Any, Array]:
        """Combine ``x`` of all ranks and return this rank's slice of the result along axis 0.

        Slices have ``ceil(len(x) / size)`` rows; those of the last ranks may be shorter or empty.
        """
        return self._engine.checked(
            "reduce_scatter",
            key,
            lambda: reductions.reduce_scatter(self._engine, x, op=op, out=out, algorithm=algorithm, key=key),
        )

    # -- collecting and handing out --------------------------------------------------------------------------------

    def all_gather(
        self, x: Array, *, out: Array | None = None, algorithm: str | None = None, key: str | None = None
    ) -> Coroutine[Any, Any, Array]:
        """Return ``x`` of all ranks as one array of shape ``(size, *x.shape)``."""
        return self._engine.checked(
            "all_gather", key, lambda: gathers.all_gather(self._engine, x, out=out, algorithm=algorithm, key=key)
        )

    def all_gather_v(
        self, x: Array, *, out: Array | None = None, algorithm: str | None = None, key: str | None = None
    ) -> Coroutine[Any, Any, Array]:
        """Return ``x`` of all ranks one after another along axis 0, in which they may differ."""
        return self._engine.checked(
            "all_gather_v", key, lambda: gathers.all_gather_v(self._engine, x, out=out, algorithm=algorithm, key=key)
        )

    def gather(
        self,
        x: Array,
        *,
        root: int = 0,
        out: Array | None = None,
        algorithm: str | None = None,
        key: str | None = None,
    ) -> Coroutine[Any, Any, Array | None]:
        """Return ``x`` of all ranks at ``root``, as ``all_gather`` does; the others get None."""
        return self._engine.checked(
            "gather", key, lambda: rooted.gather(self._engine, x, root=root, out=out, algorithm=algorithm, key=key)
        )

    def scatter(
        self,
        x: Array | None = None,
        *,
        root: int = 0,
        out: Array | None = None,
        algorithm: str | None = None,
        key: str | None = None,
    ) -> Coroutine[Any, Any, Array]:
        """Return ``x[rank]`` of the ``x`` that ``root`` passes, of shape ``(size, ...)``.

        The other ranks pass no ``x``, but ``out``, which says shape and dtype.
        """
        return self._engine.checked(
            "scatter", key, lambda: rooted.scatter(self._engine, x, root=root, out=out, algorithm=algorithm, key=key)
        )

    def broadcast(
        self, x: Array, *, root: int = 0, algorithm: str | None = None, key: str | None = None
    ) -> Coroutine[Any, Any, Array]:
        """Overwrite ``x`` with that of ``root``, and return it."""
        return self._engine.checked(
            "broadcast", key, lambda: rooted.broadcast(self._engine, x, root=root, algorithm=algorithm, key=key)
        )

    def barrier(self, *, algorithm: str | None = None, key: str | None = None) -> Coroutine[Any, Any, None]:
        """Wait until all ranks have come here."""
        return self._engine.checked("barrier", key, lambda: gathers.barrier(self._engine, algorithm=algorithm, key=key))

    def all_to_all(
        self, x: Array, *, out: Array | None = None, algorithm: str | None = None, key: str | None = None
    ) -> Coroutine[Any, Any, Array]:
        """Send ``x[r]`` to each rank ``r`` and return what they sent, entry ``r`` from rank ``r``; shapes as ``x``."""
        return self._engine.checked(
            "all_to_all", key, lambda: exchanges.all_to_all(self._engine, x, out=out, algorithm=algorithm, key=key)
        )

    def all_to_all_v(
        self, x: Array, counts: Sequence[int], *, out: Array | None = None, key: str | None = None
    ) -> Coroutine[Any, Any, tuple[Array, list[int]]]:
        """Send the first ``counts[0]`` rows of ``x`` to rank 0, the next ``counts[1]`` to rank 1, and so on.

        Returns the rows received, by rank of their sender, and how many came from each.
        """
        return self._engine.checked(
            "all_to_all_v", key, lambda: exchanges.all_to_all_v(self._engine, x, counts, out=out, key=key)
        )
