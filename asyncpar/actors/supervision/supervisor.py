"""Supervisors: actors that start, restart and stop other actors."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from functools import partial
from typing import Final, TypeVar

from asyncpar.actors.runtime.actor import Actor, endpoint
from asyncpar.actors.runtime.ending import Down, DownReason
from asyncpar.actors.supervision import events
from asyncpar.actors.supervision.child import (
    Child,
    ChildRecord,
    ChildStatus,
    check_children,
    describe_briefly,
    name_children,
)
from asyncpar.actors.supervision.machine import SupervisorMachine
from asyncpar.actors.supervision.policy import Backoff, Intensity, Strategy, parse_strategy
from asyncpar.core.concurrency.worker import ENDS_PROGRAM
from asyncpar.errors import ActorDown, RestartsExceeded, UsageError

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_CALLERS: Final = 64
"""Number of callers that may ask a supervisor for the same thing at once."""


class Supervisor(Actor):
    """Keeps its children running: starts them in order, restarts those that fail, stops them in reverse order.

    ``strategy`` selects the children restarted together with a failed one, ``intensity`` limits the restarts,
    ``backoff`` delays them: see ``policy``.  If a child cannot be started at first, those before it are stopped, and
    spawning the supervisor raises the child's error.  If more restarts are needed than ``intensity`` allows, all
    children are stopped and the supervisor fails with ``RestartsExceeded``; its owner is notified, so a supervisor may
    be the child of another one.

    A child keeps its name, so references to it stay valid.  Asks that it had not answered when it failed raise
    ``ActorDown``; so do asks while it is down, and messages told then are dead letters.
    """

    def __init__(
        self,
        children: Sequence[Child],
        *,
        strategy: Strategy | str = Strategy.ONE_FOR_ONE,
        intensity: Intensity | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self._given = check_children(children)
        self._strategy = parse_strategy(strategy)
        self._intensity = _check("intensity", Intensity() if intensity is None else intensity, Intensity)
        self._backoff = _check("backoff", Backoff() if backoff is None else backoff, Backoff)
        self._records: dict[str, ChildRecord] = {}
        self._doing: events.StartCommand | events.StopCommand | None = None
        self._timer: asyncio.TimerHandle | None = None

    # -- public ----------------------------------------------------------------------------------------------------

    @endpoint(concurrency=_CALLERS)
    async def children(self) -> list[ChildStatus]:
        """Return the status of each child, in start order, without temporary ones that have ended."""
        return [self._records[name].status(self._machine) for name in self._machine.children]

    @endpoint(concurrency=_CALLERS)
    async def terminate_child(self, name: str) -> None:
        """Stop a child.  It stays down until it is restarted on request, or together with a sibling that failed."""
        await self._request(events.StopRequest(name))

    @endpoint(concurrency=_CALLERS)
    async def restart_child(self, name: str) -> None:
        """Start a child that is down, without delay; stop one that runs, and start it.

        ``intensity`` does not count this, and no sibling is restarted with it.  Raises the error of the child's start.
        """
        await self._request(events.RestartRequest(name))

    # -- hooks -----------------------------------------------------------------------------------------------------

    async def on_start(self) -> None:
        """Start the children."""
        for name, child in zip(name_children(self._given, self.name), self._given, strict=True):
            self._records[name] = ChildRecord(name, child, is_supervisor=issubclass(child.actor_class, Supervisor))
        self._machine = SupervisorMachine(
            {name: record.child.restart for name, record in self._records.items()},
            strategy=self._strategy,
            intensity=self._intensity,
            backoff=self._backoff,
            draw=random.random,
        )
        await self._handle(events.StartAll())

    async def on_child_down(self, down: Down) -> None:
        """Restart the children that the strategy names, or give up."""
        record = self._records.get(down.ref.name)
        if record is None:
            await super().on_child_down(down)  # a subclass spawned it
            return
        failure: BaseException | None = down.error
        if down.reason is DownReason.KILLED:
            failure = ActorDown(f"actor {record.name!r} was killed", rank=self.rank)
        if failure is not None:
            record.failure = failure
            _LOG.warning("%r: child %r failed", self.ref, record.name, exc_info=failure)
        if record.ref is not down.ref or down.reason is DownReason.CLOSED or self._require_context().is_ending:
            return  # an earlier record, which was to be stopped anyway; or everything is ending
        await self._handle(events.ChildEnded(record.name, failure))

    async def _end_children(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        commands = self._machine.handle(events.StopAll(), now=self._now())
        match self._doing:  # the work of this actor that was interrupted has no answer yet
            case events.StartCommand(child):
                failure = ActorDown("its supervisor was ended meanwhile", rank=self.rank)
                commands = self._machine.handle(events.ChildStartFailed(child, failure), now=self._now())
            case events.StopCommand():
                commands = [self._doing]
        await self._obey(commands)

    # -- the machine -----------------------------------------------------------------------------------------------

    async def _request(self, event: events.StopRequest | events.RestartRequest) -> None:
        """Have ``event`` handled in this actor's own task, where no caller can cancel it half-way; wait for that."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._require_context().run_soon(partial(self._serve, event, done))
        await done

    async def _serve(self, event: events.StopRequest | events.RestartRequest, done: asyncio.Future[None]) -> None:
        if done.done():
            return  # the caller was cancelled
        try:
            commands = self._machine.handle(event, now=self._now())
        except UsageError as error:
            done.set_exception(error)
            return
        record = self._records[event.child]
        before = record.failure
        await self._obey(commands)
        if done.done():
            return
        if isinstance(event, events.RestartRequest) and record.failure is not None and record.failure is not before:
            done.set_exception(record.failure)
        else:
            done.set_result(None)

    async def _tick(self) -> None:
        await self._handle(events.BackoffElapsed())

    async def _handle(self, event: events.Event) -> None:
        await self._obey(self._machine.handle(event, now=self._now()))

    async def _obey(self, commands: list[events.Command]) -> None:
        """Carry out the machine's commands and report the results to it, until there are no more commands."""
        while commands:
            (command,) = commands
            commands = []
            match command:
                case events.StartCommand() | events.StopCommand():
                    self._doing = command
                    answer = await (
                        self._start(command) if isinstance(command, events.StartCommand) else self._stop(command)
                    )
                    self._doing = None
                    commands = self._machine.handle(answer, now=self._now())
                case events.WaitCommand(until):
                    self._wake_at(until)
                case events.FailStart(_, failure):
                    raise failure
                case events.GiveUp():
                    raise self._defeat(command) from command.failure
                case events.FinishCommand():
                    pass

    async def _start(self, command: events.StartCommand) -> events.ChildStarted | events.ChildStartFailed:
        record = self._records[command.child]
        child = record.child
        record.starts += 1
        try:
            record.ref = await self._require_context().spawn_child(
                child.actor_class, child.args, dict(child.kwargs), name=record.name
            )
        except (asyncio.CancelledError, *ENDS_PROGRAM):
            raise
        except BaseException as error:  # noqa: BLE001  # user code; the machine decides what follows
            record.failure = error
            if record.starts > 1:  # at first, spawning the supervisor raises it
                _LOG.warning("%r: child %r did not start again", self.ref, record.name, exc_info=error)
            return events.ChildStartFailed(record.name, error)
        return events.ChildStarted(record.name)

    async def _stop(self, command: events.StopCommand) -> events.ChildStopped:
        record = self._records[command.child]
        assert record.ref is not None, "only what was started is stopped"
        error = await self._require_context().end_child(record.ref, within=record.shutdown)
        if error is not None:
            _LOG.error("%r: on_stop of child %r raised", self.ref, record.name, exc_info=error)
        return events.ChildStopped(record.name)

    def _defeat(self, command: events.GiveUp) -> RestartsExceeded:
        how = "stopped" if command.failure is None else f"failed with {describe_briefly(command.failure)}"
        return RestartsExceeded(
            f"supervisor {self.name!r} gives up: its intensity allows {command.restarts} restarts in "
            f"{self._intensity.period:g} s, and child {command.child!r} {how} after that"
        )

    def _wake_at(self, until: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(until, self._require_context().run_soon, self._tick)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _check(argument: str, given: object, kind: type[T]) -> T:
    if not isinstance(given, kind):
        raise UsageError(f"{argument}: expected {kind.__name__}(...), got {given!r}")
    return given
