"""The communicator of blocking programs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from asyncpar.blocking.array_operations import ArrayOperations
from asyncpar.blocking.seat import Seat
from asyncpar.blocking.starting import Starting
from asyncpar.collectives import communicator
from asyncpar.collectives.reduction import Array
from asyncpar.collectives.statistics import Traffic


class Communicator(ArrayOperations):
    """Operations over the ranks of a group: those of ``asyncpar.Communicator``, which block until they are over.

    From any thread, several at once, too; the ranks of a group must call its operations in the same order, whichever
    threads they call them from (or pass equal ``key``).  After ``timeout`` seconds, or if Ctrl-C ends the wait, an
    operation is cancelled: here it raises ``PeerTimeout``, which says who is missing, on the others ``PeerCancelled``.
    The group stays usable.

    ``start`` has the same operations in a form that does not wait: ``pending = comm.start.all_reduce(x)``, and then
    ``pending.wait()``.  ``on_loop`` is the same group for coroutines that ``Node.run`` runs.
    """

    def __init__(self, seat: Seat, on_loop: communicator.Communicator) -> None:
        super().__init__(seat, on_loop)
        self.start = Starting(seat, on_loop)

    def __repr__(self) -> str:
        return f"<blocking communicator {self.name!r}: rank {self.rank} of {self.size}>"

    # -- who -------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return self.on_loop.rank

    @property
    def size(self) -> int:
        return self.on_loop.size

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks in world numbering, in the order of the group."""
        return self.on_loop.ranks

    @property
    def local_rank(self) -> int:
        """This process's number among the ranks of its host."""
        return self.on_loop.local_rank

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of this group by host, in this group's numbering."""
        return self.on_loop.hosts

    @property
    def group(self) -> int:
        """The group's number on the wire."""
        return self.on_loop.group

    @property
    def name(self) -> str:
        """The group's name in messages."""
        return self.on_loop.name

    @property
    def timeout(self) -> float | None:
        """Seconds that an operation may go without progress before it raises ``PeerTimeout``; None: for ever."""
        return self.on_loop.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self.on_loop.timeout = seconds

    @property
    def traffic(self) -> Traffic:
        """What the finished operations of this rank have sent: a snapshot."""
        return self._seat.do("traffic", lambda: self.on_loop.traffic)

    @property
    def may_share_memory(self) -> bool:
        """May ranks of one host share memory?  Equal on all ranks, also where a host turned out to have none."""
        return self.on_loop.may_share_memory

    @property
    def bandwidth(self) -> float:
        """Bytes/s that this rank can send here, as measured."""
        return self.on_loop.bandwidth

    def algorithms(self, operation: str) -> tuple[str, ...]:
        """Return the names that ``operation`` takes as ``algorithm`` in this group."""
        return self.on_loop.algorithms(operation)

    def is_pinned(self, operation: str) -> bool:
        """Has the user pinned algorithms of ``operation``?"""
        return self.on_loop.is_pinned(operation)

    def algorithm_table(self) -> str:
        """Return which algorithm is used for which operation and size, with the estimates behind it."""
        return self.on_loop.algorithm_table()

    def predict(self, operation: str, payload: int, *, algorithm: str | None = None) -> float:
        """Return the seconds that the cost model expects of ``operation`` on a buffer of ``payload`` bytes."""
        return self.on_loop.predict(operation, payload, algorithm=algorithm)

    def calibrate(self, *, timeout: float | None = None) -> None:
        """Measure latency and bandwidth from rank 0 and choose algorithms by its figures, on all ranks alike."""
        self._seat.wait("calibrate", self.on_loop.calibrate, timeout)

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> Array:
        """Return a new array of undefined content, in memory that the ranks of this host share if they do."""
        return self._seat.do("empty", lambda: self.on_loop.empty(shape, dtype))

    # -- sub-groups ------------------------------------------------------------------------------------------------

    def subgroup(
        self,
        ranks: Iterable[int],
        *,
        name: str | None = None,
        key: str | None = None,
        has_own_timeout: bool = True,
    ) -> Communicator | None:
        """Return the communicator over ``ranks`` of this group, in that order; None if this rank is not one of them."""
        return self._wrapped(
            self._seat.do(
                "subgroup",
                lambda: self.on_loop.subgroup(ranks, name=name, key=key, has_own_timeout=has_own_timeout),
            )
        )

    def split(
        self, color: int | None, key: int = 0, *, name: str | None = None, timeout: float | None = None
    ) -> Communicator | None:
        """Return the communicator over the ranks that pass the same ``color``, ordered by ``key``, then by rank."""
        return self._wrapped(self._seat.wait("split", lambda: self.on_loop.split(color, key, name=name), timeout))

    def claim(self, name: str, owner: object, *, kind: str | None = None) -> None:
        """Reserve ``name``, from which ``owner`` derives the keys of its operations, until it is released or collected.

        Raises ``UsageError`` while another object has it.
        """
        self._seat.do("claim", lambda: self.on_loop.claim(name, owner, kind=kind))

    def release(self, name: str, owner: object) -> None:
        """Give back a name that ``owner`` has claimed; does nothing if it has not."""
        self._seat.do("release", lambda: self.on_loop.release(name, owner))

    def give_up(self, rank: int, text: str) -> None:
        """End this group on this rank with ``PeerCancelled``: its operations that are not over, and all later calls."""
        self._seat.do("give_up", lambda: self.on_loop.give_up(rank, text))

    def close(self) -> None:
        """End this group on this rank and give back its memory; its operations raise ``UsageError`` then."""
        self._seat.do("close", self.on_loop.close)

    def refuse(self, operation: str, error: BaseException, *, key: str | None = None) -> None:
        """Give a call of ``operation`` its place that is refused with ``error`` before it gets here."""
        self._seat.do("refuse", lambda: self.on_loop.refuse(operation, error, key=key))

    def refuse_send(self, error: BaseException, dest: int, *, tag: int = 0) -> None:
        """Give a send its place that is refused with ``error`` before it gets here."""
        self._seat.do("refuse_send", lambda: self.on_loop.refuse_send(error, dest, tag=tag))

    def refuse_recv(self, error: BaseException, source: int | None = None, *, tag: int = 0) -> None:
        """Let a receive that is refused with ``error`` before it gets here take its message."""
        self._seat.do("refuse_recv", lambda: self.on_loop.refuse_recv(error, source, tag=tag))

    def describe_waits(self) -> list[str]:
        """Say of each operation of this rank that runs how long it has waited, for whom, and what is known of that."""
        return self._seat.do("describe_waits", self.on_loop.describe_waits)

    def _wrapped(self, made: communicator.Communicator | None) -> Communicator | None:
        return None if made is None else Communicator(self._seat, made)

    # -- messages between two ranks --------------------------------------------------------------------------------

    def send(self, x: Array, dest: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send ``x`` to ``dest``, which receives it with the same ``tag``; returns when ``x`` may be reused."""
        self._seat.wait("send", lambda: self.on_loop.send(x, dest, tag=tag), timeout)

    def recv(
        self, source: int | None = None, *, out: Array | None = None, tag: int = 0, timeout: float | None = None
    ) -> Array:
        """Return the next array that ``source`` (None: any rank) sends with ``tag``, in ``out`` if given."""
        return self._seat.wait("recv", lambda: self.on_loop.recv(source, out=out, tag=tag), timeout)

    def recv_any(self, *, out: Array | None = None, tag: int = 0, timeout: float | None = None) -> tuple[int, Array]:
        """Return the rank that sends the next array with ``tag``, and the array."""
        return self._seat.wait("recv_any", lambda: self.on_loop.recv_any(out=out, tag=tag), timeout)

    def send_object(self, value: object, dest: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """Send a value of plain data, dataclasses, msgspec structs and arrays to ``dest``; see ``send``."""
        self._seat.wait("send_object", lambda: self.on_loop.send_object(value, dest, tag=tag), timeout)

    def recv_object(
        self, source: int | None = None, *, tag: int = 0, wanted: Any = Any, timeout: float | None = None
    ) -> Any:
        """Return the next value that ``source`` (None: any rank) sends with ``tag``; it must be of type ``wanted``."""
        return self._seat.wait("recv_object", lambda: self.on_loop.recv_object(source, tag=tag, wanted=wanted), timeout)

    # -- objects ---------------------------------------------------------------------------------------------------

    def broadcast_object(
        self,
        value: object = None,
        *,
        root: int = 0,
        key: str | None = None,
        wanted: Any = Any,
        timeout: float | None = None,
    ) -> Any:
        """Return the ``value`` that ``root`` passes, as ``wanted``."""
        return self._seat.wait(
            "broadcast_object",
            lambda: self.on_loop.broadcast_object(value, root=root, key=key, wanted=wanted),
            timeout,
        )

    def all_gather_object(
        self, value: object, *, key: str | None = None, wanted: Any = Any, timeout: float | None = None
    ) -> list[Any]:
        """Return the values of all ranks, in their order."""
        return self._seat.wait(
            "all_gather_object", lambda: self.on_loop.all_gather_object(value, key=key, wanted=wanted), timeout
        )

    def gather_object(
        self,
        value: object,
        *,
        root: int = 0,
        key: str | None = None,
        wanted: Any = Any,
        timeout: float | None = None,
    ) -> list[Any] | None:
        """Return the values of all ranks at ``root``; the others get None."""
        return self._seat.wait(
            "gather_object", lambda: self.on_loop.gather_object(value, root=root, key=key, wanted=wanted), timeout
        )

    def scatter_object(
        self,
        values: Sequence[object] | None = None,
        *,
        root: int = 0,
        key: str | None = None,
        wanted: Any = Any,
        timeout: float | None = None,
    ) -> Any:
        """Return ``values[rank]`` of the values that ``root`` passes, one per rank; the others pass None."""
        return self._seat.wait(
            "scatter_object", lambda: self.on_loop.scatter_object(values, root=root, key=key, wanted=wanted), timeout
        )
