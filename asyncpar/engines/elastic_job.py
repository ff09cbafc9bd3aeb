"""Run an elastic job on an engine: places that come and go, and the group of agents that decides about their ranks.

The caller's agent founds the group, as a witness: it votes and runs no ranks, so the places that are left have a
quorum with it, and newcomers an address.  The agents decide about ranks (``launch/agents``); this module starts an
agent at each place, takes more places when the engine has them, and makes the one result.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from asyncpar.core.addresses import join_address
from asyncpar.core.config.secret import Secret
from asyncpar.engines.elastic_place import host_of
from asyncpar.engines.elastic_view import serve_elastic
from asyncpar.engines.function_call import decode_error, decode_value
from asyncpar.engines.interface import (
    GrowingEngine,
    Handle,
    Interrupt,
    JobSpec,
    Kill,
    Place,
    PlaceCommand,
    PlaceEvent,
    PlaceLost,
    PlaceOrder,
    PlaceOutput,
    PlaceProgress,
    PlaceReport,
)
from asyncpar.engines.output import Console, PlaceMessages
from asyncpar.engines.place_agent import SECRET_FILE, EventDisplay
from asyncpar.engines.result import PlaceEnd, settle_elastic
from asyncpar.errors import LaunchError
from asyncpar.launch.agents.group_part import GroupPart, take_part
from asyncpar.launch.agents.job_record import ElasticMode, JobEnd, SubmittedJob, decode_end
from asyncpar.launch.agents.requests import CancelRequest, SubmitRequest, program_version
from asyncpar.launch.agents.slot_processes import HostPlace
from asyncpar.launch.options import ProgramKind
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.net.membership.credentials import write_secret
from asyncpar.net.membership.host import host_id
from asyncpar.net.transport.rpc import Credentials

_CALLER: Final = "caller"
_LOOK_SECONDS: Final = 0.2
"""Seconds between two inspections of the group: whether the world has changed, or the job is over."""
_GROW_SECONDS: Final = 1.0
"""Seconds between two requests for more places."""
_LAST_CALL: Final = 1.0
"""Seconds that the first world waits for places that are starting."""
_MARGIN_SECONDS: Final = 10.0
"""Seconds beyond the ranks' grace that places may take to end when the job is over, and that killed places may take."""
_WINDOW_SECONDS: Final = 3600.0
_INTERRUPTED: Final = 130


class ElasticEngineJob:
    """One job.  ``run`` it once; ``interrupt`` ends it, the second time at once."""

    def __init__(self, engine: GrowingEngine, spec: JobSpec, console: Console) -> None:
        assert spec.least is not None, "an elastic job has bounds"
        self._engine = engine
        self._spec = spec
        self._least = spec.least
        self._console = console
        self._messages = PlaceMessages()
        self._per_place = spec.per_place or 1
        self._places: list[Place] = []
        self._handles: dict[int, Handle] = {}
        self._ends: dict[int, PlaceEnd] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._change = asyncio.Event()
        self._interrupts = 0
        self._shown = ""
        self._is_over = False

    @property
    def _open(self) -> list[int]:
        """The places that have not ended."""
        return [number for number in range(len(self._places)) if number not in self._ends]

    def interrupt(self, running: asyncio.Task[Any]) -> None:
        """End the job; the second time at once."""
        if not self._places:
            running.cancel()
        self._interrupts += 1
        self._change.set()

    async def run(self) -> list[Any]:
        """Return the results of the ranks of the last world.  Raises the errors of ``settle_elastic``."""
        try:
            places = [*await self._engine.allocate(replace(self._spec, ranks=self._least))]
            async with AsyncExitStack() as stack:
                end = await self._run(stack, places)
        finally:
            await self._engine.release()
            self._console.close()
        return settle_elastic(self._ends, end, decode=decode_value, decode_error=decode_error)

    async def _run(self, stack: AsyncExitStack, places: Sequence[Place]) -> JobEnd:
        part = await self._found(stack)
        number = (await part.control.submit(SubmitRequest(record=self._record()))).number
        tasks = {
            asyncio.create_task(part.agent.run(), name="asyncpar caller's agent"),
            asyncio.create_task(self._watch(), name="asyncpar watch places"),
        }
        try:
            self._start_all(places, part)
            growing = asyncio.create_task(self._grow(part), name="asyncpar more places")
            tasks.add(growing)
            return await self._follow(part, number, tasks)
        finally:
            part.group.leave_at_once()
            for task in tasks | self._starting:
                task.cancel()
            await asyncio.wait(tasks | self._starting)

    # -- the group -----------------------------------------------------------------------------------------------------

    async def _found(self, stack: AsyncExitStack) -> GroupPart:
        """Found the group, and serve the caller's part of it until ``stack`` closes."""
        directory = Path(tempfile.mkdtemp(prefix="asyncpar-caller-"))  # mode 0700
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        reaper = ReaperClient()
        stack.callback(reaper.close)
        reaper.add_path(directory)
        secret = Secret(self._spec.secret)
        write_secret(directory / SECRET_FILE, secret)
        address, credentials = self._engine.caller_address, Credentials(secret)
        place = HostPlace(
            host=_CALLER,
            host_id=host_id(_CALLER),
            bind=address,
            secret_file=str(directory / SECRET_FILE),
            environment=os.environ,
            is_witness=True,
        )
        part = await take_part(
            stack,
            place,
            listen=join_address(address, 0),
            join=(),
            credentials=credentials,
            votes=directory,
            display=EventDisplay(lambda _: None),
            reaper=reaper,
            is_for_one_job=True,
            on_line=lambda _: None,
        )
        await stack.enter_async_context(serve_elastic(self._spec.name, part, credentials, reaper, report=self._print))
        return part

    def _print(self, text: str) -> None:
        self._console.output(PlaceOutput(f"asyncpar: {text}\n".encode(), is_error=True))

    def _record(self) -> SubmittedJob:
        spec = self._spec
        return SubmittedJob(
            version=program_version(),
            name=spec.name,
            mode=ElasticMode.RANKS,
            program="asyncpar.engines.rank_program",
            arguments=(),
            kind=ProgramKind.MODULE,
            directory="",
            environment={},
            slots=self._per_place,
            least_hosts=self._least // self._per_place,
            most_hosts=spec.ranks // self._per_place,
            last_call=_LAST_CALL,
            max_restarts=spec.max_restarts,
            restart_window=_WINDOW_SECONDS,
            grace=spec.grace,
            timeout=spec.timeout,
            silent_after=math.inf,
            transport=spec.transport,
        )

    async def _follow(self, part: GroupPart, number: int, tasks: set[asyncio.Task[Any]]) -> JobEnd:
        """Return the end of the job, when its places have ended."""
        obeyed, end, deadline = 0, None, float("inf")
        loop = asyncio.get_running_loop()
        while True:
            for task in tasks:
                if task.done():
                    task.result()  # none ends by itself
            if end is None and (end := await self._check(part)) is not None:
                self._is_over = True
                deadline = loop.time() + self._spec.grace + _MARGIN_SECONDS
            if end is None and not self._open:
                end = JobEnd(exit_code=1, message="all places are lost")
            while self._interrupts > obeyed:
                obeyed += 1
                deadline = await self._obey_interrupt(part, number, obeyed)
            if end is not None and not self._open:
                return end
            if loop.time() >= deadline:
                return end or JobEnd(exit_code=_INTERRUPTED, message="places did not end when they were told to")
            self._change.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._change.wait()

    async def _obey_interrupt(self, part: GroupPart, number: int, times: int) -> float:
        """End the job, or, the second time, kill the rest; return the deadline for that."""
        if times == 1:
            request = CancelRequest(number=number, exit_code=_INTERRUPTED, why="the caller was interrupted")
            with suppress(LaunchError):  # without a quorum nothing is decided; then places are interrupted directly
                await part.control.cancel(request)
                return asyncio.get_running_loop().time() + self._spec.grace + _MARGIN_SECONDS
        await self._send_all(Interrupt() if times == 1 else Kill())
        return asyncio.get_running_loop().time() + _MARGIN_SECONDS

    async def _check(self, part: GroupPart) -> JobEnd | None:
        """Report a new world to the console; return the end of the job, None if it goes on."""
        status = await part.group.status()
        if status.closed is not None:
            return decode_end(status.closed.record)
        if status.world is not None:
            size, text = len(status.world.members), str(status.world.change)
            line = f"asyncpar: {size} rank{'s' if size != 1 else ''}: {text}\n"
            if line != self._shown:
                self._shown = line
                self._console.output(PlaceOutput(line.encode(), is_error=True))
        return None

    # -- places --------------------------------------------------------------------------------------------------------

    async def _grow(self, part: GroupPart) -> None:
        """Take more places, also to replace lost ones, as long as the job may have them."""
        while True:
            lost = sum(bool(end.cause) for end in self._ends.values())
            missing = self._spec.ranks // self._per_place - len(self._places) + lost
            if missing > 0 and not self._is_over:
                self._start_all(await self._engine.grow(self._spec, missing), part)
            await asyncio.sleep(_GROW_SECONDS)

    def _start_all(self, places: Sequence[Place], part: GroupPart) -> None:
        for place in places:
            self._places.append(place)
            task = asyncio.create_task(self._start(len(self._places) - 1, part), name=f"asyncpar start {place.name}")
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self, number: int, part: GroupPart) -> None:
        place, places = self._places[number], len(self._places)
        group = part.agent.address
        order = PlaceOrder.of(self._spec, place, number=number, places=places, slots=self._per_place, group=group)
        try:
            self._handles[number] = await self._engine.start(place, order, self._taker(number))
        except (LaunchError, OSError) as error:
            self._lose(PlaceLost(number, f"could not start: {error}"))

    def _taker(self, number: int) -> Callable[[PlaceEvent], None]:
        def take(event: PlaceEvent) -> None:
            match event:
                case PlaceOutput() if self._messages.is_new(number, event):
                    self._console.output(event)
                case PlaceProgress():
                    self._console.progress(event)
                case PlaceReport():
                    self._end(number, PlaceEnd(place=self._places[number], host=host_of(number), report=event))

        return take

    def _lose(self, lost: PlaceLost) -> None:
        self._end(lost.place, PlaceEnd(place=self._places[lost.place], host=host_of(lost.place), cause=lost.cause))

    def _end(self, number: int, end: PlaceEnd) -> None:
        self._ends.setdefault(number, end)
        self._change.set()

    async def _watch(self) -> None:
        async for lost in self._engine.failures():
            self._lose(lost)
        await asyncio.Event().wait()  # this engine loses no places

    async def _send_all(self, command: PlaceCommand) -> None:
        for number in self._open:
            handle = self._handles.get(number)
            if handle is not None:
                with suppress(OSError):
                    await handle.send(command)
