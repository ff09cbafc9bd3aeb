"""The hosts of a job whose number is fixed, as all but the first see them: a stream to the first one, which decides."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from asyncpar._proto.asyncpar.v1 import membership_pb2 as pb
from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.errors import AuthenticationError, LaunchError, ProtocolError, UsageError
from asyncpar.hosts import pauses
from asyncpar.hosts.codec import decode_message, encode_message
from asyncpar.hosts.first_host import Introduction, NumberedStream
from asyncpar.hosts.messages import (
    GroupHost,
    HostCommand,
    HostEvent,
    HostLeaving,
    JobClosed,
    JobOpened,
    ViewGiven,
    ViewWanted,
    WorldAnnounced,
    WorldStatus,
)
from asyncpar.net.security.identity import COORDINATOR
from asyncpar.net.transport.rpc import Credentials, open_channel
from asyncpar.net.transport.tls_probe import check_tls

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.1
_SESSION_BYTES = 16
_QUIET_SECONDS = 3.0
"""Seconds without the first host before that is reported."""
_AGAIN_SECONDS = 30.0
_FAREWELL_SECONDS = 1.0
_WAIT_SECONDS = 1.0
"""Seconds between two attempts to reach a stopped process: each takes a place in its queue of connections."""
_USAGE = 2
"""The exit code for options that do not fit."""
_FINAL = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED})


class FurtherHost:
    """The group of a job's hosts as one of them knows it that is not the first; see ``WorldGroup``.

    The first one serves at ``address`` and may take ``timeout`` seconds to appear.  A broken connection is made again
    for up to ``reconnect`` seconds; then the job ends here, with the record that ``lost`` makes of the reason.  A first
    host whose process is stopped is waited for: a pause is not a death.
    ``adopt`` returns the job as it runs here, ``answer`` what is asked for a view; ``report`` prints a line.
    """

    def __init__(
        self,
        own: Introduction,
        address: str,
        credentials: Credentials,
        *,
        timeout: float,
        reconnect: float,
        adopt: Callable[[JobOpened], JobOpened],
        lost: Callable[[str], bytes],
        answer: Callable[[bytes], Awaitable[bytes]],
        report: Callable[[str], None],
    ) -> None:
        self.name = own.host
        self._own = own
        self._address = address
        self._credentials = credentials
        self._timeout = timeout
        self._reconnect = reconnect
        self._adopt = adopt
        self._lost = lost
        self._answer = answer
        self._report = report
        self._session = os.urandom(_SESSION_BYTES)
        self._stream = NumberedStream()
        self._frames: asyncio.Queue[pb.HostFrame | None] = asyncio.Queue()
        self._outbox: asyncio.Queue[HostCommand | None] = asyncio.Queue()
        self._job: JobOpened | None = None
        self._closed: JobClosed | None = None
        self._world: WorldAnnounced | None = None
        self._is_connected = False
        self._is_leaving = False
        self._is_waiting = False
        """Whether it was reported that the first host is stopped."""
        self._trouble: Exception | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._probe = pauses.PauseProbe(address)
        self._listener = pauses.PauseListener(address)
        self._port = 0
        """Where the first one sees whether this process is stopped."""
        self._running = asyncio.create_task(self._run(), name="asyncpar attend the first host")

    # -- the group, as the agent of this host uses it ------------------------------------------------------------------

    @property
    def commands(self) -> AsyncIterator[HostCommand]:
        """See ``WorldGroup``.

        Raises ``UsageError``, ``LaunchError`` or ``AuthenticationError`` if there is no place for this host.
        """
        return self._commands()

    async def _commands(self) -> AsyncIterator[HostCommand]:
        while (command := await self._outbox.get()) is not None:
            yield command
        if self._trouble is not None:
            raise self._trouble

    @property
    def lease(self) -> float:
        """See ``WorldGroup``: a host that is silent is waited for."""
        return math.inf

    @property
    def is_dismissed(self) -> bool:
        """See ``WorldGroup``."""
        return False

    def report(self, event: HostEvent) -> None:
        """See ``WorldGroup``."""
        self._frames.put_nowait(self._stream.number(event))

    async def status(self) -> WorldStatus:
        """See ``WorldGroup``: this host alone, since only the first one knows the others."""
        own = GroupHost(name=self.name, address="")
        return WorldStatus(leader=None, hosts=(own,), world=self._world, job=self._job, closed=self._closed)

    async def stop(self) -> None:
        """Leave, and return when the first host knows that, or takes too long."""
        self._is_leaving = True
        self.report(HostLeaving(self.name))
        self._frames.put_nowait(None)
        await asyncio.wait({self._running}, timeout=_FAREWELL_SECONDS if self._is_connected else 0.0)
        for task in (self._running, *self._answering):
            task.cancel()
        await asyncio.wait({self._running, *self._answering})
        await self._probe.aclose()
        await self._listener.stop()
        self._outbox.put_nowait(None)

    def leave_at_once(self) -> None:
        """See ``WorldGroup``: it takes a moment only."""

    # -- the connection ------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Stay connected until this host leaves; end the job here if that is not possible, for whatever reason."""
        try:
            self._port = await self._listener.start()
            await self._stay_connected()
        except Exception as error:  # noqa: BLE001  # whatever it is, the job must not wait for it for ever
            _log.exception("the connection to the first host failed")
            self._give_up(LaunchError(f"the connection to the coordinator failed: {type(error).__name__}: {error}"))

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        broken_at, cause, is_stopped = loop.time(), "", False
        while True:
            left = self._timeout if not cause else broken_at + self._reconnect - loop.time()
            was_there, self._is_connected = bool(cause), False
            seconds = self._reconnect if is_stopped else max(left, 0.0)
            trouble, may_help = await self._try(seconds, may_come_back=was_there)
            if trouble is None or self._closed is not None:
                return
            if self._is_connected or not cause:
                broken_at, cause = loop.time(), str(trouble)
            if may_help and self._job is not None and self._reconnect > 0.0:
                is_stopped, was_stopped = await self._is_stopped(), is_stopped
                if is_stopped or was_stopped:  # once it runs again, it has its time to answer
                    broken_at = loop.time()
                if is_stopped:
                    await asyncio.sleep(_WAIT_SECONDS)
                    continue
            if not may_help or loop.time() >= broken_at + self._reconnect:
                again = f"; it did not come back within {self._reconnect:g} s (--reconnect-within)" if was_there else ""
                kind = type(trouble)
                self._give_up(kind((cause if may_help else str(trouble)) + again))
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _is_stopped(self) -> bool:
        """Return whether the process of the first host is stopped, and report the first time that it is."""
        is_stopped = await self._probe.is_stopped()
        if is_stopped and not self._is_waiting:
            self._is_waiting = True
            self._report(f"the coordinator at {self._address} does not answer, as if it were stopped; waiting for it")
        return is_stopped

    def _give_up(self, trouble: Exception) -> None:
        """End the job here, if it has begun."""
        if self._job is None:
            self._trouble = trouble
            self._outbox.put_nowait(None)
        else:
            self._pass_on(JobClosed(number=self._job.number, record=self._lost(str(trouble))))

    async def _try(self, seconds: float, *, may_come_back: bool) -> tuple[Exception | None, bool]:
        """Serve one connection; return why it ended, None if this host has left, and whether to try another one.

        ``may_come_back`` is the second value if nobody answers within ``seconds``.
        """
        try:
            if await self._attend(seconds):
                return None, False
        except grpc.aio.AioRpcError as error:
            return self._explain(error), error.code() not in _FINAL
        except (AuthenticationError, UsageError, LaunchError, ProtocolError) as error:
            return error, False
        except TimeoutError:
            return (
                LaunchError(
                    f"no coordinator answered at {self._address} for {self._timeout:g} s; is the agent of the first "
                    "host (--node-rank 0) running there, with the same --rdzv-endpoint?"
                ),
                may_come_back,
            )
        return self._silent_end(), True

    def _silent_end(self) -> LaunchError:
        return LaunchError(f"the coordinator at {self._address} ended without a word")

    async def _attend(self, seconds: float) -> bool:
        """Serve one connection until it ends; return whether that is because this host has left."""
        async with open_channel(self._address, self._credentials, peer=COORDINATOR) as channel:
            stub = membership_pb2_grpc.FirstHostStub(channel)  # type: ignore[no-untyped-call]  # generated
            welcomed = asyncio.Event()
            async with asyncio.timeout(seconds):
                await self._check_access(channel)
                frames = aiter(stub.Attend(self._write(welcomed), wait_for_ready=True))
                first = await anext(frames, None)
            if first is None:  # it ended before it could answer
                return self._is_leaving
            if first.welcome.refusal:
                kind = UsageError if first.welcome.exit_code == _USAGE else LaunchError
                raise kind(first.welcome.refusal)
            if self._stream.received and not first.welcome.resumed:
                raise AuthenticationError(f"the coordinator at {self._address} is another one than before")
            if self._is_waiting:
                self._is_waiting = False
                await self._probe.aclose()
                self._report(f"the coordinator at {self._address} answers again")
            self._is_connected = True
            self._stream.take(first)
            welcomed.set()
            async for frame in frames:
                if frame.number and not self._stream.take(frame):
                    continue
                if frame.content:
                    self._take(decode_message(frame.content))
        return self._is_leaving

    def _take(self, message: object) -> None:
        match message:
            case ViewWanted():
                task = asyncio.create_task(self._give_view(message))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)
            case JobOpened():
                self._job = self._adopt(message)
                self._pass_on(self._job)
            case _:
                self._pass_on(message)  # type: ignore[arg-type]  # what remains
        if isinstance(message, JobClosed):
            self._frames.put_nowait(pb.HostFrame())  # acknowledges it

    def _pass_on(self, command: HostCommand) -> None:
        match command:
            case JobClosed():
                self._closed = command
            case WorldAnnounced():
                self._world = command
        self._outbox.put_nowait(command)

    async def _give_view(self, wanted: ViewWanted) -> None:
        given = ViewGiven(wanted.request, await self._answer(wanted.content))
        self._frames.put_nowait(pb.HostFrame(content=encode_message(given)))

    async def _check_access(self, channel: grpc.aio.Channel) -> None:
        """Make one unary call, repeated until the server answers; it raises errors that a refused stream may hide.

        When a server refuses a stream while the client is still opening it, grpc.aio may report INTERNAL instead of the
        status that was sent.  Waiting inside gRPC for the server would hide a TLS handshake that can only fail.
        """
        stub = health_pb2_grpc.HealthStub(channel)
        now = asyncio.get_running_loop().time
        announced_at = now() + _QUIET_SECONDS - _AGAIN_SECONDS
        while True:
            try:
                await stub.Check(health_pb2.HealthCheckRequest())
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await check_tls(self._address, self._credentials, COORDINATOR)
                if now() >= announced_at + _AGAIN_SECONDS and not self._stream.received:
                    announced_at = now()
                    self._report(
                        f"no coordinator answers at {self._address} yet; waiting up to {self._timeout:g} s for the "
                        "agent of the first host (--node-rank 0)"
                    )
            else:
                return
            await asyncio.sleep(_RETRY_SECONDS)

    async def _write(self, welcomed: asyncio.Event) -> AsyncIterator[pb.HostFrame]:
        """Yield the greeting and, once it is answered, unacknowledged messages and new ones until this host leaves."""
        frames: asyncio.Queue[pb.HostFrame | None] = asyncio.Queue()
        for waiting in self._stream.unacknowledged:
            frames.put_nowait(waiting)
        self._frames = frames
        own = self._own
        hello = pb.HostHello(
            job=own.job,
            nnodes=own.nnodes,
            node_rank=own.node_rank,
            host=own.host,
            version=own.version,
            session=self._session,
            port=self._port,
        )
        yield pb.HostFrame(hello=hello, received=self._stream.received)
        await welcomed.wait()  # only now may large frames follow: see connection_watch
        while (frame := await frames.get()) is not None:
            frame.received = self._stream.received
            yield frame

    def _explain(self, error: grpc.aio.AioRpcError) -> Exception:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return AuthenticationError(
                f"the coordinator at {self._address} did not accept our secret; "
                "all agents of a job need the same --secret-file"
            )
        if error.code() == grpc.StatusCode.INTERNAL:  # of grpc.aio here: the stream ended while it was being opened
            return self._silent_end()
        return LaunchError(f"lost the coordinator at {self._address} ({error.details() or error.code().name})")
