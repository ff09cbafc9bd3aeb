"""Places on nodes of Slurm: an ``srun`` for each node runs the agent, and its streams carry orders and events.

The nodes are those of the job that the caller runs in, or of one that ``salloc`` asks for and that ends with the
caller: ``salloc`` runs a ``cat`` whose input the caller holds.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from asyncpar.core.config.hostlist import expand_hosts
from asyncpar.engines.interface import (
    Handle,
    JobSpec,
    Place,
    PlaceCommand,
    PlaceEvent,
    PlaceLost,
    PlacementEngine,
    PlaceOrder,
    PlaceReport,
    decode_event,
    encode,
)
from asyncpar.engines.polled_place import ANSWER_SECONDS, LEASE_SECONDS, check_process
from asyncpar.engines.slurm_place import LINE_BYTES, from_line, to_line
from asyncpar.errors import LaunchError, UsageError

_END_SECONDS: Final = 10.0
_ASK_SECONDS: Final = 60.0
_HOLD: Final = 'echo "$SLURM_JOB_ID $SLURM_JOB_NODELIST"; exec cat'
_KEPT: Final = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER", "SLURM_JWT")


@dataclass(slots=True)
class _Program:
    """A program of Slurm, and the last that it has said."""

    process: Process
    said: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    listening: asyncio.Task[None] | None = None

    async def forget(self) -> None:
        """Listen no more."""
        assert self.listening is not None
        self.listening.cancel()
        await asyncio.wait({self.listening})

    async def cause(self) -> str:
        """Return its last words, once it has ended."""
        await self.process.wait()
        assert self.listening is not None
        await asyncio.wait({self.listening})
        return "; ".join(self.said) or f"exit code {self.process.returncode}"


@dataclass(slots=True)
class _Node:
    """The ``srun`` of a place, and its step, once that is known."""

    program: _Program
    step: str = ""


class SlurmEngine(PlacementEngine):
    """Nodes of Slurm, with ``per_place`` ranks of a job on each; ``allocation`` are options of ``salloc``."""

    def __init__(self, *, allocation: Sequence[str] = (), python: str = sys.executable) -> None:
        self._allocation = allocation
        self._python = python
        self._held: _Program | None = None
        self._places: list[_Node] = []
        self._reading: set[asyncio.Task[None]] = set()
        self._lost: asyncio.Queue[PlaceLost] = asyncio.Queue()

    async def allocate(self, spec: JobSpec) -> Sequence[Place]:
        if shutil.which("srun") is None:
            raise UsageError("srun: it is not in PATH; call this where jobs are submitted, or in a job")
        per_place = spec.per_place or 1
        size = -(-spec.ranks // per_place)
        job, nodes = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_JOB_NODELIST", "")
        if not job:
            job, nodes = await self._ask_for_nodes(spec, size, per_place)
        names = expand_hosts(nodes)
        if len(names) < size:
            raise UsageError(
                f"ranks: expected at most {len(names) * per_place}, {per_place} on each of the {len(names)} nodes of "
                f"Slurm's job {job}, got {spec.ranks}; per_node= puts more on each"
            )
        for name in names[:size]:
            self._places.append(_Node(await self._begin(self._step(job, name), is_step=True)))
        return [await self._describe(names[number], spec, per_place, node) for number, node in enumerate(self._places)]

    def _step(self, job: str, node: str) -> list[str]:
        """Return the command that runs the agent on ``node``, beside other steps of the job."""
        step = ["srun", f"--jobid={job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--overlap", "--mpi=none"]
        return [*step, "--quiet", "--unbuffered", self._python, "-m", "asyncpar.engines.slurm_place"]

    async def start(self, place: Place, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> Handle:
        program = self._places[order.number].program
        handle = SlurmHandle(program.process)
        paths = json.dumps([path or os.getcwd() for path in sys.path]).encode() + b"\n"
        try:
            await handle.write(paths + to_line(encode(order)))
        except OSError as error:
            cause = f"{place.name} is not reached: {error}"
            raise LaunchError(cause) from error
        reading = asyncio.create_task(self._read(order.number, program, take), name=f"asyncpar events of {place.name}")
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return handle

    async def failures(self) -> AsyncIterator[PlaceLost]:
        """Yield nodes whose ``srun`` ends, or that give no sign of life."""
        while True:
            yield await self._lost.get()

    async def release(self) -> None:
        for reading in self._reading:
            reading.cancel()
        places, self._places = self._places, []
        await asyncio.gather(*(self._end(node.program, node.step) for node in places))
        held, self._held = self._held, None
        if held is not None:
            await self._end(held, "")

    async def _ask_for_nodes(self, spec: JobSpec, size: int, per_place: int) -> tuple[str, str]:
        """Return the number of a new job, and its nodes, once Slurm gives them."""
        wanted = [f"--nodes={size}", f"--ntasks={size}", "--ntasks-per-node=1", f"--cpus-per-task={per_place}"]
        wanted += [f"--job-name={spec.name}", *self._allocation]
        trial = await self._begin(["srun", "--test-only", *wanted, "true"])
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                cause = await trial.cause()
        except TimeoutError as error:
            raise LaunchError(f"srun does not answer within {_ASK_SECONDS:g} s; try `scontrol ping`") from error
        finally:
            await self._end(trial, "")
        if trial.process.returncode != 0:
            raise UsageError(f"ranks: Slurm has no nodes for {spec.ranks}, {per_place} on each of {size}: {cause}")
        self._held = await self._begin(["salloc", "--quiet", *wanted, "sh", "-c", _HOLD])
        output = self._held.process.stdout
        assert output is not None
        seconds = spec.timeout + spec.wait
        try:
            async with asyncio.timeout(seconds):
                given = (await output.readline()).decode().split()
                if not given:
                    raise UsageError(f"ranks: Slurm gives no nodes for {spec.ranks}: {await self._held.cause()}")
        except TimeoutError as error:
            raise UsageError(
                f"ranks: Slurm has not given {size} nodes within {seconds:g} s (timeout= and wait=): others hold them"
            ) from error
        return given[0], given[1]

    async def _describe(self, name: str, spec: JobSpec, slots: int, node: _Node) -> Place:
        """Return the place that a node is, when its Python has started."""
        output = node.program.process.stdout
        assert output is not None
        try:
            async with asyncio.timeout(spec.timeout):
                line = await output.readline()
                if not line:
                    raise LaunchError(f"Slurm's node {name} cannot run asyncpar: {await node.program.cause()}")
        except TimeoutError as error:
            raise LaunchError(f"Slurm's node {name} gives no answer within {spec.timeout:g} s (timeout=)") from error
        seen: dict[str, str] = json.loads(line)
        check_process(f"Slurm's node {name}", seen)
        node.step = seen["step"]
        return Place(name=f"Slurm's node {name}", host=seen["host"], address=seen["address"], slots=slots)

    async def _read(self, number: int, program: _Program, take: Callable[[PlaceEvent], None]) -> None:
        """Pass the events of a place on until its report; say if it is lost before."""
        output = program.process.stdout
        assert output is not None
        try:
            while True:
                async with asyncio.timeout(LEASE_SECONDS):
                    line = await output.readline()
                if not line:
                    self._lost.put_nowait(PlaceLost(number, f"died ({await program.cause()})"))
                    return
                if line == b"\n":
                    continue
                event = decode_event(from_line(line))
                take(event)
                if isinstance(event, PlaceReport | PlaceLost):
                    return
        except TimeoutError:
            self._lost.put_nowait(PlaceLost(number, f"gives no answer within {LEASE_SECONDS:g} s"))
        except Exception as error:  # noqa: BLE001  # whatever it is, nobody would hear of this place again
            self._lost.put_nowait(PlaceLost(number, f"is not understood ({type(error).__name__}: {error})"))

    async def _begin(self, command: Sequence[str], *, is_step: bool = False) -> _Program:
        """Start a program of Slurm, out of reach of the terminal's signals."""
        environment = {k: v for k, v in os.environ.items() if not (is_step and k.startswith("SLURM_")) or k in _KEPT}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment, start_new_session=True, limit=LINE_BYTES
        )
        program = _Program(process)
        program.listening = asyncio.create_task(_listen(program), name=f"asyncpar words of {command[0]}")
        return program

    async def _end(self, program: _Program, step: str) -> None:
        """End a program by the end of its input; a step that does not end then is killed."""
        process = program.process
        assert process.stdin is not None
        process.stdin.close()
        if not await _has_ended(process):
            if step:
                killing = await self._begin(["scancel", "--signal=KILL", step])
                await _has_ended(killing.process)
                await killing.forget()
            with suppress(ProcessLookupError):  # it has ended meanwhile
                process.terminate()
        if not await _has_ended(process):
            process.kill()
            await process.wait()
        await program.forget()


class SlurmHandle(Handle):
    """An agent on a node."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def tell(self, command: PlaceCommand) -> None:
        await self.write(to_line(encode(command)))

    async def write(self, lines: bytes) -> None:
        """Send ``lines``.  Raises ``OSError``."""
        assert self._process.stdin is not None
        async with asyncio.timeout(ANSWER_SECONDS):
            self._process.stdin.write(lines)
            await self._process.stdin.drain()


async def _listen(program: _Program) -> None:
    """Keep what a program says on its standard error."""
    errors: Any = program.process.stderr
    while line := await errors.readline():
        program.said.append(line.decode(errors="replace").strip())


async def _has_ended(process: Process) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_SECONDS):
            await process.wait()
    return process.returncode is not None
