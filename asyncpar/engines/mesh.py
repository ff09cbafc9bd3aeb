"""Actors on ranks that an engine has placed, driven by a caller that is one more node of their world, the last.

The caller serves the rendezvous.  Ranks learn an actor's class when it is spawned: by its name, or, if the caller
consents, as code.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

from asyncpar.actors.meshes.mesh_ref import MeshRef
from asyncpar.actors.meshes.nodes import Nodes
from asyncpar.actors.meshes.shape import mesh_table
from asyncpar.actors.meshes.values import MeshError
from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.registry import class_path
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.engines.awaited_arguments import values_of
from asyncpar.engines.function_call import FunctionCall, describe_object, find_object
from asyncpar.engines.rendezvous import make_environment, serve_rendezvous
from asyncpar.errors import LaunchError, PeerError, UsageError
from asyncpar.node import Node

A = TypeVar("A", bound=Actor)

_END_SECONDS = 15.0
"""Seconds that the ranks of a failing job may take to end, and to report the reason."""
_CLASSES = "asyncpar-classes"
"""The name of the actor on each rank that learns classes."""


class ActorClasses(Actor):
    """Registers classes of actors on its rank; code only with ``may_pickle``."""

    def __init__(self, may_pickle: bool) -> None:
        self._may_pickle = may_pickle
        self._known: dict[str, object] = {}

    @endpoint
    async def learn(self, path: str, call: FunctionCall) -> None:
        """Import the class at ``path``, or load it from its pickle."""
        if call.pickled and not self._may_pickle:
            raise UsageError("actor class: it came as code, which this job does not take; pass pickle=True")
        found = find_object(call)
        if isinstance(found, type):
            # A script's own classes are in __main__ at the caller; cloudpickle keeps no qualified names.
            found.__module__, _, found.__qualname__ = path.partition(":")
        self._known[path] = found


async def serve_actors(rendezvous: str, size: int, may_pickle: bool) -> None:
    """Serve a rank of a world of ``size`` whose last rank drives the others, until the last rank leaves."""
    environment = LaunchEnvironment.from_mapping(os.environ)
    if environment is None:
        raise UsageError("serve_actors: expected a rank that an engine has placed")
    await serve_actors_at(dataclasses.replace(environment, world_size=size, rendezvous=rendezvous), may_pickle)


async def serve_actors_at(environment: LaunchEnvironment, may_pickle: bool) -> None:
    """Serve a rank at the place that ``environment`` describes, until the last rank leaves."""
    node = await Node.start(environment)
    last = f"rank {node.size - 1} "
    try:
        await node.spawn(ActorClasses, may_pickle, name=_CLASSES)
        await node.world.barrier()
        async for change in node.watch_world():
            if any(who.startswith(last) for who in change.left):
                break
    finally:
        await node.stop()


def refuse_bounds(ranks: object) -> None:
    """Raise ``UsageError`` if ``ranks`` are the bounds of an elastic job: the world of a mesh keeps its size."""
    if isinstance(ranks, tuple):
        raise UsageError(f"ranks: expected a number, as the world of a mesh keeps its size, got {ranks}")


class ClusterMesh:
    """Ranks on which actors can be started: ``await mesh.spawn(Trainer)``.  ``node`` is the caller's."""

    def __init__(self, node: Node, nodes: Nodes, *, pickle: bool, taught: dict[str, object]) -> None:
        self.node = node
        self.nodes = nodes
        self._pickle = pickle
        self._taught = taught

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in mesh order."""
        return self.nodes.ranks

    def __len__(self) -> int:
        return len(self.nodes)

    def reshape(self, **sizes: int) -> ClusterMesh:
        """Return the same ranks along other axes.  See ``Nodes.reshape``."""
        return self._over(self.nodes.reshape(**sizes))

    def slice(self, **chosen: int | slice) -> ClusterMesh:
        """Return a part of the mesh.  See ``Nodes.slice``."""
        return self._over(self.nodes.slice(**chosen))

    def select(self, ranks: Iterable[int]) -> ClusterMesh:
        """Return a mesh of some of the ranks.  See ``Nodes.select``."""
        return self._over(self.nodes.select(ranks))

    async def spawn(self, actor: type[A], *args: Any, name: str | None = None, **kwargs: Any) -> MeshRef[A]:
        """Start an actor on every rank, all or none.  See ``Nodes.spawn``; ranks need not know the class before.

        Arguments that have no value yet, such as futures of Dask, are awaited.

        Raises ``UsageError`` for a class that cannot be imported by its name, like those of notebooks, unless the mesh
        was made with ``pickle=True``.
        """
        args, kwargs = await values_of(args, "arguments"), await values_of(kwargs, "arguments")
        await self._teach(actor)
        return await self.nodes.spawn(actor, *args, name=name, **kwargs)

    async def _teach(self, actor: type[Actor]) -> None:
        path = class_path(actor)
        if self._taught.get(path) is actor:
            return
        call = describe_object(actor, "actor class", pickle=self._pickle)
        refs = [self.node.ref(_CLASSES, rank, actor_class=ActorClasses) for rank in range(self.node.size - 1)]
        await asyncio.gather(*(ref.learn(path, call) for ref in refs))
        self._taught[path] = actor

    def _over(self, nodes: Nodes) -> ClusterMesh:
        return ClusterMesh(self.node, nodes, pickle=self._pickle, taught=self._taught)

    def __repr__(self) -> str:
        return f"<cluster: {self.nodes!r}>"

    def _repr_html_(self) -> str:
        """Return the mesh as HTML for notebooks: the place of each node."""
        return mesh_table(self.nodes.shape, "nodes of a cluster")


RunRanks = Callable[[str], Awaitable[object]]
"""Runs ``serve_actors`` on all ranks to their end, given the address of the rendezvous."""


@asynccontextmanager
async def open_mesh(
    run: RunRanks, *, job: str, ranks: int, secret: bytes, address: str, timeout: float, pickle: bool
) -> AsyncIterator[ClusterMesh]:
    """Join, as the last node, the world of ``ranks`` ranks that ``run`` starts, and end them at the end of the block.

    ``address`` is this host's address that the ranks reach.  If they fail, the error of ``run`` ends the block.
    """
    async with AsyncExitStack() as stack:
        rendezvous = await serve_rendezvous(stack, job=job, size=ranks + 1, secret=secret, address=address)
        running = asyncio.ensure_future(run(rendezvous))
        stack.push_async_callback(_end, running)
        environment = make_environment(
            stack,
            rank=ranks,
            size=ranks + 1,
            rendezvous=rendezvous,
            job=job,
            secret=secret,
            address=address,
            timeout=timeout,
        )
        node = await _start(environment, running)
        try:
            await node.world.barrier()
            nodes = node.nodes.select(range(ranks))
            yield ClusterMesh(node, nodes, pickle=pickle, taught={})
        except Exception as error:
            await _explain(error, running)
            raise
        finally:
            await node.stop()
        await running


async def _start(environment: LaunchEnvironment, running: asyncio.Future[object]) -> Node:
    """Join the world, unless the ranks end first."""
    starting = asyncio.ensure_future(Node.start(environment))
    try:
        waited: set[asyncio.Future[Any]] = {starting, running}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
        running.result()
        raise LaunchError("the ranks ended before they had joined the caller")
    finally:
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})


async def _explain(error: Exception, running: asyncio.Future[object]) -> None:
    """Add the reason why ranks have failed, if they have, to ``error``, of which it may be the cause."""
    if isinstance(error, PeerError | MeshError):
        await asyncio.wait({running}, timeout=_END_SECONDS)
    if running.done() and not running.cancelled() and (failure := running.exception()) is not None:
        error.add_note(f"the ranks have failed: {failure}")


async def _end(running: asyncio.Future[object]) -> None:
    if not running.done():
        running.cancel()
        await asyncio.wait({running})
    if not running.cancelled():
        running.exception()  # it was reported, or explains the error raised
