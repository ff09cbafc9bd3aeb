"""The communicator: collective operations over an ordered set of ranks."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Self

from asyncpar.collectives import exchanges, gathers, reductions
from asyncpar.collectives.cost import CostModel, LaneCosts, costs_of_lane
from asyncpar.collectives.description import hash64
from asyncpar.collectives.engine import Engine
from asyncpar.collectives.group import Limits
from asyncpar.collectives.pin import parse_pin
from asyncpar.collectives.policy import Policy
from asyncpar.collectives.reduction import Array
from asyncpar.collectives.statistics import Traffic
from asyncpar.collectives.table import OperationTable
from asyncpar.errors import UsageError
from asyncpar.transport.links import Links

DEFAULT_TIMEOUT = 300.0
"""Seconds that an operation may go without progress."""


class Communicator:
    """Collective operations over the ranks of a group.

    All ranks of the group call the same operations in the same order; an operation takes its place in that order when
    it is *called*, and runs when what the call returned is awaited, so several may be in flight.  Operations with equal
    ``key`` meet by that name instead, in any order; a key may be used again and again.

    Every operation either gives its result on a rank or raises there.  A rank that calls something else is an
    ``OperationMismatch``, one that is gone ``PeerLost``, one that cancels or fails ``PeerCancelled``, one that does
    not do its part for ``timeout`` seconds ``PeerTimeout``; wrong arguments are ``UsageError`` before anything is sent.
    After all but ``PeerLost`` the group stays usable.  Cancelling an operation takes effect at once.

    ``x`` are numpy arrays of any shape and layout, of any numeric dtype or bool or ``ml_dtypes.bfloat16``.  They must
    not be touched until the operation is over.  ``root``, ``dest`` and ``source`` are ranks of the group.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def world(
        cls,
        links: Links,
        *,
        pin: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        lane: str | LaneCosts | None = None,
    ) -> Self:
        """Return the communicator over all ranks of the world of ``links``; make one per links.

        ``pin`` is described in ``collectives.pin``.  ``lane`` says what the cost model reckons with between hosts: a
        kind of lane or figures, equal on all ranks; by default in-process figures where no rank has an address, else
        those of TCP.
        """
        table = OperationTable(links)
        members = links.world.members
        if lane is None:
            lane = "tcp" if any(member.address for member in members) else "inproc"
        costs = costs_of_lane(lane) if isinstance(lane, str) else lane
        model = CostModel(size=len(members), hosts=links.world.hosts, lane=costs, local=costs)
        engine = Engine(
            table=table,
            number=hash64("world", links.world.generation),
            name="world",
            ranks=tuple(range(len(members))),
            policy=Policy(model=model, pin=parse_pin(pin or "")),
            limits=Limits(_checked_timeout(timeout)),
        )
        return cls(engine)

    # -- who ---------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self._engine.rank

    @property
    def size(self) -> int:
        return self._engine.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks in world numbering, in the order of the group."""
        return self._engine.ranks

    @property
    def group(self) -> int:
        """The group's number on the wire."""
        return self._engine.group.number

    @property
    def name(self) -> str:
        """The group's name in messages."""
        return self._engine.group.name

    @property
    def timeout(self) -> float | None:
        """Seconds that an operation may go without progress before it raises ``PeerTimeout``; None: for ever."""
        return self._engine.group.limits.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._engine.group.limits.timeout = _checked_timeout(seconds)

    @property
    def traffic(self) -> Traffic:
        """What the finished operations of this rank have sent: a snapshot."""
        return self._engine.traffic()

    def algorithm_table(self) -> str:
        """Return which algorithm is used for which operation and size, with the estimates behind it."""
        return self._engine.policy.table()

    # -- combining -----------------------------------------------------------------------------------------------------

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
        whenever the same values are reduced by the same algorithm.  Needs 8 MiB of memory besides at most.
        """
        return reductions.all_reduce(self._engine, x, op=op, out=out, algorithm=algorithm, key=key)

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
        return reductions.reduce(self._engine, x, op=op, root=root, out=out, algorithm=algorithm, key=key)

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
        return reductions.reduce_scatter(self._engine, x, op=op, out=out, algorithm=algorithm, key=key)

    # -- collecting and handing out --------------------------------------------------------------------------------------

    def all_gather(
        self, x: Array, *, out: Array | None = None, algorithm: str | None = None, key: str | None = None
    ) -> Coroutine[Any, Any, Array]:
        """Return ``x`` of all ranks as one array of shape ``(size, *x.shape)``."""
        return gathers.all_gather(self._engine, x, out=out, algorithm=algorithm, key=key)

    def all_gather_v(
        self, x: Array, *, out: Array | None = None, algorithm: str | None = None, key: str | None = None
    ) -> Coroutine[Any, Any, Array]:
        """Return ``x`` of all ranks one after another along axis 0, in which they may differ."""
        return gathers.all_gather_v(self._engine, x, out=out, algorithm=algorithm, key=key)

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
        return gathers.gather(self._engine, x, root=root, out=out, algorithm=algorithm, key=key)

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
        return gathers.scatter(self._engine, x, root=root, out=out, algorithm=algorithm, key=key)

    def broadcast(
        self, x: Array, *, root: int = 0, algorithm: str | None = None, key: str | None = None
    ) -> Coroutine[Any, Any, Array]:
        """Overwrite ``x`` with that of ``root``, and return it."""
        return gathers.broadcast(self._engine, x, root=root, algorithm=algorithm, key=key)

    def barrier(self, *, algorithm: str | None = None, key: str | None = None) -> Coroutine[Any, Any, None]:
        """Wait until all ranks have come here."""
        return gathers.barrier(self._engine, algorithm=algorithm, key=key)

    def all_to_all(
        self, x: Array, *, out: Array | None = None, algorithm: str | None = None, key: str | None = None
    ) -> Coroutine[Any, Any, Array]:
        """Send ``x[r]`` to each rank ``r`` and return what they sent, entry ``r`` from rank ``r``; shapes as ``x``."""
        return exchanges.all_to_all(self._engine, x, out=out, algorithm=algorithm, key=key)

    def all_to_all_v(
        self, x: Array, counts: Sequence[int], *, out: Array | None = None, key: str | None = None
    ) -> Coroutine[Any, Any, tuple[Array, list[int]]]:
        """Send the first ``counts[0]`` rows of ``x`` to rank 0, the next ``counts[1]`` to rank 1, and so on.

        Returns the rows received, by rank of their sender, and how many came from each.
        """
        return exchanges.all_to_all_v(self._engine, x, counts, out=out, key=key)

    # -- sub-groups ------------------------------------------------------------------------------------------------------


def _checked_timeout(seconds: float | None) -> float | None:
    if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
        raise UsageError(f"timeout: expected a positive number of seconds or None, got {seconds!r}")
    return seconds
