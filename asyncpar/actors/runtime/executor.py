"""Execution of the user code of one actor: its hooks, and its endpoints with the received arguments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from asyncpar.actors.runtime.actor import Actor
from asyncpar.actors.runtime.callee import Callee
from asyncpar.actors.runtime.calls import CURRENT, Delivery, Execution
from asyncpar.actors.runtime.ending import End, Ending
from asyncpar.actors.runtime.endpoint import EndpointSpec
from asyncpar.actors.runtime.message import USAGE
from asyncpar.core.concurrency.tasks import is_task_cancelled
from asyncpar.core.concurrency.worker import ENDS_PROGRAM, WorkerThread
from asyncpar.core.observe.records import EventState
from asyncpar.errors import AsyncparError, ProtocolError, UsageError


class SelfCancelled(AsyncparError):  # noqa: N818
    """User code raised ``CancelledError`` although its task was not cancelled."""

    def __init__(self, text: str, error: asyncio.CancelledError) -> None:
        super().__init__(text)
        self.__cause__ = error


class Owner(Protocol):
    """Receives the error of a told endpoint."""

    def fail(self, error: BaseException) -> None:
        """End because of ``error``."""


class EndpointGuard(Protocol):
    """Called where each endpoint of an actor begins and ends."""

    def begin(self) -> None:
        """Prepare for an endpoint that is about to run alone.  Exceptions count as errors of the endpoint."""

    async def finish(self) -> None:
        """Finish an endpoint that has run to its end; it is answered when this returns."""

    def judge(self, error: BaseException, *, is_alone: bool) -> tuple[BaseException, bool]:
        """Return the error for an endpoint's caller in place of ``error``, and whether it is a fault of the endpoint.

        It may undo the endpoint's changes.  Raises if that fails, which is a failure of the actor.
        """
        ...


class Executor:
    """Runs the endpoints and hooks of one actor, whose cell is the ``owner``."""

    __slots__ = ("_callee", "_ending", "_guard", "_name", "_owner", "_running", "_thread", "actor")

    def __init__(
        self,
        name: str,
        ending: Ending,
        callee: Callee,
        *,
        owner: Owner,
        guard: EndpointGuard | None = None,
    ) -> None:
        self.actor: Actor | None = None
        self._name = name
        self._ending = ending
        self._callee = callee
        self._owner = owner
        self._guard = guard
        self._thread: WorkerThread | None = None
        self._running: Execution | None = None

    async def handle(self, delivery: Delivery, thread: WorkerThread | None = None) -> None:
        """Handle one message in the actor's own task, or with ``thread`` in another task.

        A plain ``def`` endpoint runs in ``thread``, or in the actor's own one.
        """
        owed = delivery.window.take(delivery.cost)
        if owed:
            self._callee.return_credit(delivery.sender, delivery.actor, owed)
        if delivery.is_cancelled:
            return
        spec = delivery.spec
        assert spec is not None
        bound = self._bind(delivery, spec)
        if bound is None:
            return
        args, kwargs = bound
        execution = delivery.execution = Execution()
        if thread is None:
            self._running = execution
        token = CURRENT.set(delivery)
        ticket, state = self._callee.begin(delivery), EventState.COMPLETED
        try:
            if self._guard is not None and thread is None:
                self._guard.begin()
            value = await self._run(delivery, partial(getattr(self.actor, spec.name), *args, **kwargs), thread)
            if self._guard is not None:
                await self._finish_endpoint(delivery, self._guard, is_own=thread is None)
        except BaseException as error:  # noqa: BLE001  # user code; its caller or its owner is notified
            state = EventState.FAILED if isinstance(error, Exception) else EventState.CANCELLED
            self._broken_off(delivery, error, is_alone=thread is None)
        else:
            # other endpoints may modify a result of a concurrent endpoint: it is copied at once
            await self._callee.answered(delivery, value, may_change=thread is not None and spec.is_async)
        finally:
            self._callee.end(ticket, state)
            CURRENT.reset(token)
            delivery.forget()
            if delivery.streams is not None:
                delivery.streams.close()
            if thread is None:
                self._running = None

    async def attempt(self, hook: str, work: Awaitable[object]) -> BaseException | None:
        """Await user code in the actor's own task, where ``interrupt`` cancels it, and return its exception.

        ``SelfCancelled`` naming ``hook`` replaces a ``CancelledError`` that is not a cancellation of the task itself.
        """
        self._running = Execution()
        try:
            await self._running.run(work)
        except ENDS_PROGRAM:
            raise
        except asyncio.CancelledError as error:
            if is_task_cancelled():
                raise
            return SelfCancelled(f"actor {self._name!r}: {hook} cancelled itself", error)
        except BaseException as error:  # noqa: BLE001  # user code; the owner or the spawner is notified
            return error
        finally:
            self._running = None
        return None

    def interrupt(self) -> None:
        """Cancel the user code in the actor's own task."""
        if self._running is not None:
            self._running.interrupt()

    def decline(self, delivery: Delivery, reason: str, text: str) -> None:
        """Refuse ``delivery``, which does not enter the mailbox."""
        self._callee.taken(delivery)
        self._callee.refused(delivery, reason, text)

    def turn_away(self, delivery: Delivery) -> None:
        """Refuse ``delivery``, taken from the mailbox, because the actor ends."""
        self._callee.taken(delivery)
        self._refuse_by_end(delivery)

    def close(self) -> None:
        """End the thread.  Called when nothing runs in it."""
        if self._thread is not None:
            self._thread.close()

    # -- internals -------------------------------------------------------------------------------------------------

    async def _run(self, delivery: Delivery, call: Callable[[], Any], thread: WorkerThread | None) -> object:
        """Return the result of the endpoint of ``delivery``, None for a stream."""
        spec, execution = delivery.spec, delivery.execution
        assert spec is not None
        assert execution is not None
        if spec.is_stream:
            assert delivery.streams is not None, "a told call never streams"
            await execution.run(delivery.streams.produce(call(), lambda: execution.is_interrupted))
            return None
        if spec.is_async:
            return await execution.run(call())
        return await execution.run((thread or self._own_thread()).run(call))

    async def _finish_endpoint(self, delivery: Delivery, guard: EndpointGuard, *, is_own: bool) -> None:
        """Run the guard's work before the answer; it can be interrupted like the endpoint, and ends with the actor."""
        if self._ending.is_urgent or delivery.is_cancelled:
            raise asyncio.CancelledError("the actor ends before its endpoint was finished")
        execution = delivery.execution = Execution()
        if is_own:
            self._running = execution
        await execution.run(guard.finish())

    def _bind(self, delivery: Delivery, spec: EndpointSpec) -> tuple[list[Any], dict[str, Any]] | None:
        """Return the arguments of a message; None if they are wrong, of which its sender is notified."""
        try:
            if spec.has_streams:
                self._callee.open_streams(delivery)
            return spec.bind(delivery.arguments, delivery.keywords, delivery.payload, delivery.streams)
        except (UsageError, ProtocolError) as error:
            self._callee.refused(delivery, USAGE, str(error))
            return None

    def _broken_off(self, delivery: Delivery, error: BaseException, *, is_alone: bool) -> None:
        """Handle an ``error`` that ended an endpoint."""
        if isinstance(error, ENDS_PROGRAM):
            raise error
        judged, is_fault = error, True
        if self._guard is not None:
            try:
                judged, is_fault = self._guard.judge(error, is_alone=is_alone)
            except Exception as failure:  # noqa: BLE001  # user code; without it the actor cannot continue
                self._owner.fail(failure)
        if isinstance(error, asyncio.CancelledError):
            self._cancelled(delivery, error)
        elif is_fault or delivery.call is not None:
            self._raised(delivery, judged)

    def _raised(self, delivery: Delivery, error: BaseException) -> None:
        if delivery.call is not None:
            self._callee.raised(delivery, error)
            return
        with suppress(AttributeError, TypeError):  # some exceptions take no notes
            error.add_note(f"in {delivery.endpoint} of actor {self._name!r}, told by rank {delivery.sender}")
        self._owner.fail(error)

    def _cancelled(self, delivery: Delivery, error: asyncio.CancelledError) -> None:
        """Handle a cancellation of an endpoint: by its caller, by itself, by the actor's end, or of the whole task."""
        if is_task_cancelled():
            self._ending.begin(End.CLOSE)
            self._refuse_by_end(delivery)
            raise error
        if self._ending.is_urgent:
            self._refuse_by_end(delivery)
        elif delivery.call is not None:
            self._raised(delivery, error)
        else:
            self._raised(delivery, SelfCancelled(f"{delivery.endpoint} cancelled itself", error))

    def _refuse_by_end(self, delivery: Delivery) -> None:
        self._callee.refused(delivery, self._ending.refusal, self._ending.exit_reason)

    def _own_thread(self) -> WorkerThread:
        if self._thread is None:
            self._thread = WorkerThread(f"actor {self._name}")
        return self._thread
