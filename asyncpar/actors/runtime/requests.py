"""Requests of other ranks to start and to end actors of this rank."""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, Final

from asyncpar.actors.runtime import message
from asyncpar.actors.runtime.calls import CURRENT
from asyncpar.actors.runtime.cell import Cell
from asyncpar.actors.runtime.failure import describe_failure, error_text
from asyncpar.actors.runtime.lifecycle import Lifecycle
from asyncpar.actors.runtime.outbound import Outbound
from asyncpar.actors.runtime.registry import ActorRegistry
from asyncpar.core.concurrency.worker import ENDS_PROGRAM
from asyncpar.errors import ProtocolError, UsageError
from asyncpar.net.transport.links import MAX_MESSAGE_BYTES
from asyncpar.net.wire.payload import PayloadEncoder

_MOST_STARTED: Final = 1000


class Requests:
    """Serves requests, each in a task of its own, and answers each once unless its sender has gone."""

    def __init__(
        self, registry: ActorRegistry, lifecycle: Lifecycle, *, tasks: asyncio.TaskGroup, outbound: Outbound
    ) -> None:
        self._registry = registry
        self._lifecycle = lifecycle
        self._tasks = tasks
        self._outbound = outbound
        self._serving: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._started: OrderedDict[tuple[int, int], weakref.ref[Cell]] = OrderedDict()
        """Actors that were started last: a cancellation may cross the answer."""
        self._is_closed = False

    @property
    def serving(self) -> int:
        """Requests that arrived and are not answered yet."""
        return len(self._serving)

    def spawn(self, sender: int, request: message.Spawn, payload: memoryview) -> None:
        """Start an actor for ``sender``."""
        self._serve(sender, request.call, self._spawn(sender, request, payload))

    def end(self, sender: int, request: message.EndMessage) -> None:
        """End an actor for ``sender``."""
        self._serve(sender, request.call, self.end_actor(request.actor, is_kill=request.is_kill))

    def cancel(self, rank: int, call: int) -> None:
        """Cancel a request; an actor that it has started is stopped."""
        task = self._serving.pop((rank, call), None)
        if task is not None and task.cancel():
            return
        started = self._started.pop((rank, call), None)
        cell = None if started is None else started()
        if cell is not None:
            cell.stop()

    def peer_lost(self, rank: int) -> None:
        """Cancel the requests of a lost rank."""
        for sender, call in [place for place in self._serving if place[0] == rank]:
            self.cancel(sender, call)

    def close(self) -> None:
        """Answer nothing more, refuse everything new."""
        self._is_closed = True
        for task in self._serving.values():
            task.cancel()

    async def end_actor(self, name: str, *, is_kill: bool) -> None:
        """End an actor of this rank and return when it has ended.  To kill one that has ended is nothing to do.

        Raises ``UsageError`` if there is none, and what its ``on_stop`` raised.
        """
        cell = self._registry.cells.get(name)
        if cell is None:
            gone = self._registry.exit_reason(name)
            if is_kill and gone:
                return
            raise UsageError(
                f"ref: there is no actor {name!r} on rank {self._registry.rank}"
                + (f" any more: {gone}" if gone else "")
            )
        if cell.is_waiting_for():
            raise UsageError(
                f"ref: {cell.ref!r} cannot wait for its own end, nor a child for its owner's; use self.stop_self()"
            )
        if is_kill:
            cell.kill()
        else:
            cell.stop()
        await cell.wait_stopped()

    def _serve(self, sender: int, call: int, work: Coroutine[Any, Any, object]) -> None:
        place = (sender, call)
        if place in self._serving:
            work.close()
            raise ProtocolError(f"actor message: rank {sender} sent request {call} twice")
        if self._is_closed:
            work.close()
            self._outbound.say(sender, message.FailureMessage(call, message.CLOSED, "the node was closed"))
            return
        task = self._tasks.create_task(self._answer(sender, call, work))
        self._serving[place] = task

        def over(_: asyncio.Task[None]) -> None:
            self._serving.pop(place, None)
            work.close()  # it was never begun if the task was cancelled before its first step

        task.add_done_callback(over)

    async def _answer(self, sender: int, call: int, work: Coroutine[Any, Any, object]) -> None:
        CURRENT.set(None)  # whatever opened the link by which the request came is none of its concern
        try:
            value = await work
        except UsageError as error:
            self._outbound.say(sender, message.FailureMessage(call, message.USAGE, error_text(error)))
        except asyncio.CancelledError:
            work.close()
            if self._is_closed:
                self._outbound.say(sender, message.FailureMessage(call, message.CLOSED, "the node was closed"))
        except ENDS_PROGRAM:
            raise
        except BaseException as error:  # noqa: BLE001  # user code; the caller gets the error
            self._outbound.say(sender, describe_failure(call, error))
        else:
            encoder = PayloadEncoder(limit=MAX_MESSAGE_BYTES)
            reply = message.Reply(call, encoder.part(value, what="the answer"))
            self._outbound.send_quietly(sender, encoder.finish(reply, what="the answer"))

    async def _spawn(self, sender: int, request: message.Spawn, payload: memoryview) -> str:
        ref = await self._lifecycle.spawn_for(request, payload)
        cell = self._registry.cells.get(ref.name)
        if cell is not None:
            self._started[sender, request.call] = weakref.ref(cell)
            if len(self._started) > _MOST_STARTED:
                self._started.popitem(last=False)
        return ref.name
