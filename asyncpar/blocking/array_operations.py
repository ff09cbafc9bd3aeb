"""The array operations of a blocking communicator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncpar.blocking.seat import Seat
from asyncpar.collectives import communicator
from asyncpar.collectives.reduction import Array


class ArrayOperations:
    """Collective operations on arrays.  ``Communicator`` says what they have in common."""

    def __init__(self, seat: Seat, on_loop: communicator.Communicator) -> None:
        self._seat = seat
        self.on_loop = on_loop
        """The same group for coroutines that run on the loop."""

    # -- combining -------------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Combine ``x`` of all ranks, in place (or into ``out``), and return it.

        ``op`` is sum, mean, prod, min, max, band, bor or bxor.  The result has the same bits on every rank.
        """
        return self._seat.wait(
            "all_reduce", lambda: self.on_loop.all_reduce(x, op, out=out, algorithm=algorithm, key=key), timeout
        )

    def all_reduce_many(
        self,
        arrays: Iterable[Array],
        op: str = "sum",
        *,
        algorithm: str | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> list[Array]:
        """Combine each of ``arrays`` of all ranks, in place and in one operation, and return them in a list."""
        return self._seat.wait(
            "all_reduce_many", lambda: self.on_loop.all_reduce_many(arrays, op, algorithm=algorithm, key=key), timeout
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
        timeout: float | None = None,
    ) -> Array | None:
        """Combine ``x`` of all ranks at ``root``, which gets the result (in ``out``); the others get None."""
        return self._seat.wait(
            "reduce", lambda: self.on_loop.reduce(x, op, root=root, out=out, algorithm=algorithm, key=key), timeout
        )

    def reduce_scatter(
        self,
        x: Array,
        op: str = "sum",
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Combine ``x`` of all ranks and return this rank's slice of the result along axis 0."""
        return self._seat.wait(
            "reduce_scatter", lambda: self.on_loop.reduce_scatter(x, op, out=out, algorithm=algorithm, key=key), timeout
        )

    # -- collecting and handing out --------------------------------------------------------------------------------

    def all_gather(
        self,
        x: Array,
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Return ``x`` of all ranks as one array of shape ``(size, *x.shape)``."""
        return self._seat.wait(
            "all_gather", lambda: self.on_loop.all_gather(x, out=out, algorithm=algorithm, key=key), timeout
        )

    def all_gather_v(
        self,
        x: Array,
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Return ``x`` of all ranks one after another along axis 0, in which they may differ."""
        return self._seat.wait(
            "all_gather_v", lambda: self.on_loop.all_gather_v(x, out=out, algorithm=algorithm, key=key), timeout
        )

    def gather(
        self,
        x: Array,
        *,
        root: int = 0,
        out: Array | None = None,
        algorithm: str | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Array | None:
        """Return ``x`` of all ranks at ``root``, as ``all_gather`` does; the others get None."""
        return self._seat.wait(
            "gather", lambda: self.on_loop.gather(x, root=root, out=out, algorithm=algorithm, key=key), timeout
        )

    def scatter(
        self,
        x: Array | None = None,
        *,
        root: int = 0,
        out: Array | None = None,
        algorithm: str | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Return ``x[rank]`` of the ``x`` that ``root`` passes; the others pass ``out``, which says shape and dtype."""
        return self._seat.wait(
            "scatter", lambda: self.on_loop.scatter(x, root=root, out=out, algorithm=algorithm, key=key), timeout
        )

    def broadcast(
        self,
        x: Array,
        *,
        root: int = 0,
        algorithm: str | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Overwrite ``x`` with that of ``root``, and return it."""
        return self._seat.wait(
            "broadcast", lambda: self.on_loop.broadcast(x, root=root, algorithm=algorithm, key=key), timeout
        )

    def barrier(self, *, algorithm: str | None = None, key: str | None = None, timeout: float | None = None) -> None:
        """Wait until all ranks have come here."""
        self._seat.wait("barrier", lambda: self.on_loop.barrier(algorithm=algorithm, key=key), timeout)

    def all_to_all(
        self,
        x: Array,
        *,
        out: Array | None = None,
        algorithm: str | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Send ``x[r]`` to each rank ``r`` and return what they sent, entry ``r`` from rank ``r``; shapes as ``x``."""
        return self._seat.wait(
            "all_to_all", lambda: self.on_loop.all_to_all(x, out=out, algorithm=algorithm, key=key), timeout
        )

    def all_to_all_v(
        self,
        x: Array,
        counts: Sequence[int],
        *,
        out: Array | None = None,
        key: str | None = None,
        timeout: float | None = None,
    ) -> tuple[Array, list[int]]:
        """Send the first ``counts[0]`` rows of ``x`` to rank 0, the next ``counts[1]`` to rank 1, and so on.

        Returns the rows received, by rank of their sender, and how many came from each.
        """
        return self._seat.wait("all_to_all_v", lambda: self.on_loop.all_to_all_v(x, counts, out=out, key=key), timeout)
