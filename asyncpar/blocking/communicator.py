"""The communicator of blocking programs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from asyncpar.blocking.node_handle import NodeHandle
from asyncpar.blocking.operations import Operations
from asyncpar.blocking.starting import Starting
from asyncpar.collectives import communicator
from asyncpar.core.tables import html_table

T = TypeVar("T")


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
