"""The node of blocking programs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

import asyncpar.node
from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.runtime.ref import ActorRef
from asyncpar.blocking.communicator import Communicator
from asyncpar.blocking.node_handle import NodeHandle
from asyncpar.blocking.pending import Cancelled, Pending
from asyncpar.blocking.program import ended_in_order, report_failures
from asyncpar.blocking.refs import Ref
from asyncpar.blocking.thread import LoopThread, background
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.config.names import LaneName
from asyncpar.core.config.world import World
from asyncpar.core.observe.loop_watch import BLOCKED_AFTER
from asyncpar.core.tables import html_table
from asyncpar.errors import UsageError
from asyncpar.net.transport.serving import Register

T = TypeVar("T")
A = TypeVar("A", bound=Actor)


class Node:
    """One rank of a world, for programs without an event loop; its loop runs in a background thread.

    It is made by ``asyncpar.blocking.init``, ``Node.start`` or ``asyncpar.testing.blocking_world``, and usable from all
    threads, including notebooks.  ``world`` is the communicator over all ranks.  ``on_loop`` is the node for
    coroutines: the parts of asyncpar without a blocking form are used with it, by ``run`` and ``call``.
    """

    def __init__(self, thread: LoopThread, on_loop: asyncpar.node.Node) -> None:
        self.on_loop = on_loop
        self._handle = NodeHandle(thread, on_loop.rank)
        self.world = Communicator(self._handle, on_loop.world)
        thread.at_close(self, on_loop.stop)

    @classmethod
    def start(
        cls,
        environment: LaunchEnvironment | None = None,
        *,
        transport: LaneName | None = None,
        serve: str | None = None,
        services: Sequence[Register] = (),
        public_services: Sequence[str] = (),
        blocked_after: float | None = BLOCKED_AFTER,
    ) -> Node:
        """Join the world of ``environment`` (default: this process's), and return when all ranks are present.

        ``transport``, ``serve``, ``services``, ``public_services``, ``blocked_after`` and errors are those of
        ``asyncpar.Node.start``.  A program that does not ``close`` the node still leaves the world in good order at its
        end.
        """
        report_failures()
        thread = background()
        return cls(
            thread,
            thread.call(
                lambda: asyncpar.node.Node.start(
                    environment,
                    transport=transport,
                    serve=serve,
                    services=services,
                    public_services=public_services,
                    blocked_after=blocked_after,
                ),
                what="start",
            ),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<blocking node: rank {self.rank} of {self.size}{', closed' if self.is_closed else ''}>"

    def _repr_html_(self) -> str:
        """Return the same for notebooks."""
        state = "closed" if self.is_closed else "running"
        return html_table([("blocking node", f"rank {self.rank} of {self.size}"), ("state", state)])

    # -- identity --------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.on_loop.rank

    @property
    def size(self) -> int:
        return self.on_loop.size

    @property
    def membership(self) -> World:
        """The members of this generation of the world."""
        return self.on_loop.membership

    @property
    def address(self) -> str:
        """``host:port`` of the node's gRPC server; empty for a node that lives only in this process."""
        return self.on_loop.address

    @property
    def has_arena(self) -> bool:
        """Whether the ranks of this host share memory."""
        return self.on_loop.has_arena

    @property
    def bytes_sent(self) -> int:
        """Bytes of frames that left this rank, and payload that it has shown to others in shared memory."""
        return self.on_loop.bytes_sent

    @property
    def is_closed(self) -> bool:
        return self._handle.is_closed

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return a new array of ``dtype`` in memory that the ranks of this host share, like ``node.world.empty``."""
        return self.world.empty(shape, dtype)

    # -- coroutines ------------------------------------------------------------------------------------------------

    def run(self, make: Callable[[], Coroutine[Any, Any, T]], *, timeout: float | None = None) -> T:
        """Run the coroutine that ``make`` returns on the node's loop, and return its result.

        ``node.run(lambda: synchronizer.synchronize(node.on_loop.world))``: ``make`` is called on the loop, in the order
        of the calls of this node.  Ctrl-C and the end of ``timeout`` seconds (None: never) cancel it.
        """
        return self._handle.wait("run", make, timeout)

    def begin(self, make: Callable[[], Coroutine[Any, Any, T]]) -> Pending[T]:
        """Begin the coroutine that ``make`` returns on the node's loop, and return its pending result."""
        return self._handle.start("begin", make)

    def call(self, function: Callable[[], T]) -> T:
        """Call ``function`` on the node's loop, and return its result; it must be quick.

        Use it to create objects that belong to the loop.  Raises ``UsageError`` for a coroutine function: use ``run``.
        """
        made = self._handle.do("call", function)
        if asyncio.iscoroutine(made):
            made.close()
            raise UsageError("call: the function returned a coroutine; node.run() awaits what coroutine functions do")
        return made

    # -- actors ----------------------------------------------------------------------------------------------------

    def spawn(self, actor: type[A], *args: Any, name: str | None = None, **kwargs: Any) -> Ref[A]:
        """Start an actor on this rank and return the reference to it when its ``on_start`` has ended.

        The constructor gets ``args`` and ``kwargs`` themselves, not copies.  Without ``name`` a new name is generated.
        Raises the exception of the constructor or ``on_start``, and ``UsageError`` for a name that is taken.
        """
        made: Any = self._handle.wait("spawn", lambda: self.on_loop.spawn(actor, *args, name=name, **kwargs))
        return Ref(self._handle, made)

    def ref(self, name: str, rank: int | None = None, *, actor_class: type[A] | None = None) -> Ref[A]:
        """Return the reference to the actor called ``name`` on ``rank`` (default: this one); nothing is sent.

        With ``actor_class`` results are typed, and wrong calls are refused before they are sent.
        """
        self._handle.check_open("ref")
        made: Any = (
            self.on_loop.ref(name, rank)
            if actor_class is None
            else self.on_loop.ref(name, rank, actor_class=actor_class)
        )
        return Ref(self._handle, made)

    def wrap(self, reference: ActorRef[A]) -> Ref[A]:
        """Return the blocking form of a reference that came inside of another value."""
        return Ref(self._handle, reference)

    def stop_actor(self, reference: ActorRef[Any], *, timeout: float | None = None) -> None:
        """Stop an actor of any rank, once it has handled waiting messages.  ``timeout`` is in seconds."""
        self._handle.wait("stop_actor", lambda: self.on_loop.stop_actor(reference), timeout)

    def kill_actor(self, reference: ActorRef[Any], *, timeout: float | None = None) -> None:
        """Kill an actor of any rank, with its children; its ``on_stop`` is not run.  ``timeout`` is in seconds."""
        self._handle.wait("kill_actor", lambda: self.on_loop.kill_actor(reference), timeout)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the world in good order: actors stop, peers are notified, lanes and server close.  Idempotent.

        Operations that other threads wait for raise; later calls raise ``NodeClosed``.  It does nothing in a child of a
        fork, which has no node.
        """
        thread = self._handle.thread
        if thread.is_closed:
            self._handle.is_closed = True
            return
        thread.check_may_wait()
        self._handle.is_closed = True
        thread.forget(self)
        with suppress(Cancelled):  # another call closes the whole thread
            thread.call(self.on_loop.stop, what="close")


@contextmanager
def init(*, transport: LaneName | None = None) -> Iterator[Node]:
    """Join the world that ``asyncpar launch`` describes in the environment; without a launcher, be a world of one.

    ``with asyncpar.blocking.init() as node:``.  SIGTERM leaves the block like an exception and ends the program with
    status 143.  Raises like ``Node.start``.

    ``transport`` pins the lane kind, as in ``Node.start``.
    """
    with ended_in_order(), Node.start(transport=transport) as node:
        yield node
