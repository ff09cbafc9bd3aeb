"""The communicator of blocking programs, and its operations without waiting: ``comm.start.all_reduce(x)``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from asyncpar.blocking.node_handle import NodeHandle
from asyncpar.blocking.operations import Operations
from asyncpar.blocking.pending import Pending
from asyncpar.collectives import communicator
from asyncpar.collectives.all_reduce import AllReduce
from asyncpar.core.tables import html_table

P = ParamSpec("P")
T = TypeVar("T")


def _started(
    operation: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Starting, P], Pending[T]]:
    """Return the method that starts ``operation`` of the communicator, with the same arguments."""
    name = operation.__name__

    def start(starting: Starting, /, *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        return starting._handle.start(name, lambda: operation(starting._on_loop, *args, **kwargs))

    functools.update_wrapper(start, operation)
    return start


class Starting:
    """The operations of a communicator, each of which returns a ``Pending`` at once.

    They take their place in the order of the group's operations when they are called here.
    """

    def __init__(self, handle: NodeHandle, on_loop: communicator.Communicator) -> None:
        self._handle = handle
        self._on_loop = on_loop

    all_reduce = _started(AllReduce.all_reduce)
    all_reduce_many = _started(communicator.Communicator.all_reduce_many)
    reduce = _started(communicator.Communicator.reduce)
    reduce_scatter = _started(communicator.Communicator.reduce_scatter)
    all_gather = _started(communicator.Communicator.all_gather)
    all_gather_v = _started(communicator.Communicator.all_gather_v)
    gather = _started(communicator.Communicator.gather)
    scatter = _started(communicator.Communicator.scatter)
    broadcast = _started(communicator.Communicator.broadcast)
    barrier = _started(communicator.Communicator.barrier)
    all_to_all = _started(communicator.Communicator.all_to_all)
    all_to_all_v = _started(communicator.Communicator.all_to_all_v)
    agree = _started(communicator.Communicator.agree)
    send = _started(communicator.Communicator.send)
    recv = _started(communicator.Communicator.recv)
    recv_any = _started(communicator.Communicator.recv_any)
    send_object = _started(communicator.Communicator.send_object)
    recv_object = _started(communicator.Communicator.recv_object)
    broadcast_object = _started(communicator.Communicator.broadcast_object)
    all_gather_object = _started(communicator.Communicator.all_gather_object)
    gather_object = _started(communicator.Communicator.gather_object)
    scatter_object = _started(communicator.Communicator.scatter_object)
    calibrate = _started(communicator.Communicator.calibrate)


class Communicator(Operations):
    """Operations over the ranks of a group: those of ``asyncpar.Communicator``, which block until they are over.

    They may be called from any thread, and from several at once; the ranks of a group must call its operations in the
    same order, whichever threads they call them from (or pass equal ``key``).  After ``timeout`` seconds, or if Ctrl-C
    ends the wait, an operation is cancelled: here it raises ``PeerTimeout``, which names the missing rank, on the
    others ``PeerCancelled``.  The group stays usable.

    Options mean the same in all operations, and as in ``asyncpar.Communicator``.  ``op`` is sum, mean, prod, min, max,
    band, bor or bxor.  ``out`` receives the result; ``algorithm`` pins one (None: the cost model chooses); ``key``
    matches by name instead of by order; ``stream`` is a CUDA stream on which the operation is enqueued; ``source`` and
    ``tag`` distinguish messages; ``wanted`` is the type as which a value is decoded; ``name`` names a new group in
    messages; ``dtype`` is numpy's.

    ``start`` has the same operations in a non-blocking form: ``pending = comm.start.all_reduce(x)``, and then
    ``pending.wait()``.  ``on_loop`` is the same group for coroutines that ``Node.run`` runs.
    """

    def __init__(self, handle: NodeHandle, on_loop: communicator.Communicator) -> None:
        super().__init__(handle, on_loop)
        self.start = Starting(handle, on_loop)

    def run(
        self,
        make: Callable[[communicator.Communicator], Coroutine[Any, Any, T]],
        *,
        what: str = "run",
        timeout: float | None = None,
    ) -> T:
        """Run the coroutine that ``make`` returns for this group, on the loop, and return its result.

        ``make`` is called on the loop, with the group for coroutines, in the order of calls; ``what`` names the call in
        messages.  ``comm.run(lambda group: synchronizer.synchronize(group))``.  ``timeout`` is in seconds.
        """
        return self._handle.wait(what, lambda: make(self.on_loop), timeout)

    def __repr__(self) -> str:
        return f"<blocking communicator {self.name!r}: rank {self.rank} of {self.size}>"

    def _repr_html_(self) -> str:
        """Return the same for notebooks."""
        return html_table([("blocking communicator", self.name), ("rank", f"{self.rank} of {self.size}")])

    @property
    def timeout(self) -> float | None:
        """Seconds that an operation may go without progress before it raises ``PeerTimeout``; None: forever."""
        return self.on_loop.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self.on_loop.timeout = seconds
