"""The part of one host in a job with a fixed number of hosts: the first one serves the others, and the rendezvous."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from asyncpar import __version__
from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.errors import UsageError
from asyncpar.hosts.first_host import FirstHost, Introduction
from asyncpar.hosts.further_host import FurtherHost
from asyncpar.hosts.messages import JobOpened, WorldGroup
from asyncpar.launch.agents.ending import EndRequests
from asyncpar.launch.agents.group_watch import AskHost, GroupNow, GroupWatch, group_of_status
from asyncpar.launch.agents.host_agent import HostAgent
from asyncpar.launch.agents.job_record import JobEnd, SubmittedJob, decode_record, encode_record, record_of
from asyncpar.launch.agents.requests import HostObserved, ObserveRequest
from asyncpar.launch.agents.slot_processes import HostPlace
from asyncpar.launch.display import Display
from asyncpar.launch.job import JobSecret, LaunchJob
from asyncpar.launch.job_service import serve_job
from asyncpar.launch.job_view import JobOutcome, describe_job
from asyncpar.launch.observers import observe_job
from asyncpar.launch.reaper_client import ReaperClient
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.transport.rpc import Credentials, RpcServer

_NUMBER = 1
"""The number of the only job."""
_OF_THE_JOB = ("max_restarts", "restart_window", "silent_after", "stopped_after", "busy_after")
"""The settings in which the first host's count for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPart:
    """The part of this host: ``group`` decides, ``agent`` runs ranks, ``ask`` asks other hosts what theirs do.

    ``name`` is that of this host in the group.
    """

    group: FirstHost | FurtherHost
    agent: HostAgent
    ask: AskHost
    name: str
    is_first: bool


async def take_fixed_part(
    stack: AsyncExitStack,
    job: LaunchJob,
    record: SubmittedJob,
    secret: JobSecret,
    *,
    display: Display,
    reaper: ReaperClient,
    is_embedded: bool = False,
) -> FixedPart:
    """Serve, or attend, the first host of ``job`` until ``stack`` closes; ``record`` is the job as it runs here.

    Raises ``UsageError`` when this is the first host and its port cannot be bound.
    """
    placement, options = job.placement, job.options
    own = Introduction(
        job=placement.job,
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        host=placement.host,
        version=__version__,
    )
    rendezvous = RendezvousService(job=placement.job)
    served = await _serve(stack, job, own, secret, rendezvous)
    place = HostPlace(
        host=placement.host,
        host_id=placement.host_id,
        bind=placement.bind,
        secret_file=str(secret.path),
        certificates=job.certificates,
        environment=job.environment,
        slots=placement.nproc,
        log_directory=None if job.log_directory is None else str(job.log_directory),
        node_rank=0 if served else options.node_rank,
        is_launcher=True,
        is_embedded=is_embedded,
        rendezvous=placement.coordinator,
        master=placement.master_addr,
        post_mortem=options.post_mortem,
    )
    make_agent = partial(HostAgent, place=place, rendezvous=rendezvous, display=display, reaper=reaper, only_job=True)
    if served:
        group, address = served
        agent = make_agent(group)
        agent.address = placement.coordinator or address
        group.report(JobOpened(number=_NUMBER, terms=record.terms, record=encode_record(record)))
        return FixedPart(group=group, agent=agent, ask=partial(_ask, group), name=group.name, is_first=True)
    further = _attend(job, own, record, secret, lambda: agent)
    agent = make_agent(further)
    stack.push_async_callback(further.stop)
    return FixedPart(group=further, agent=agent, ask=_ask_nobody, name=further.name, is_first=False)


async def run_part(job: LaunchJob, part: FixedPart, reaper: ReaperClient, ending: EndRequests) -> JobOutcome:
    """Run this host's part of the job to its end, for all observers; return the exit code here, and the message."""
    agent, is_first, shown = part.agent, part.is_first, job.options.observers
    view = GroupWatch(describe_job(job), partial(_know, part.group), part.ask, part.name, agent.watch)
    agent.on_world = view.began
    ending.attach(part.group, agent)
    async with (
        serve_job(job, view, reaper, report=agent.report, is_whole=is_first, on_signals=ending.handles_signals),
        observe_job(
            shown if is_first else shown.of_host,
            view,
            own=lambda: agent.watch.summary().ranks,
            directory=job.log_directory if is_first else None,
            report=agent.report,
            reports_alarms=is_first,
        ) as observers,
    ):
        agent.on_output = observers.add_output
        end = await agent.run()
        code = ending.exit_code or agent.failure[0]
        outcome = JobOutcome(code) if end is None else JobOutcome(end.exit_code or code, agent.words(end))
        await observers.finish(outcome)
        return outcome


def record_fixed(job: LaunchJob) -> SubmittedJob:
    """Return the record of a job with a fixed number of hosts, as it runs on this one."""
    options = job.options
    return record_of(
        options,
        name=job.placement.job,
        program=options.program,
        directory="",
        environment={},
        slots=job.placement.nproc,
        restart_window=options.restart_window or math.inf,
        log_directory=None if job.log_directory is None else str(job.log_directory),
        is_fixed=True,
    )


async def _know(group: WorldGroup) -> GroupNow:
    return group_of_status(await group.status())


async def _serve(
    stack: AsyncExitStack, job: LaunchJob, own: Introduction, secret: JobSecret, rendezvous: RendezvousService
) -> tuple[FirstHost, str] | None:
    """Serve the other hosts, if this one is the first; return the group, and where it is served."""
    placement, certificates = job.placement, job.certificates
    if placement.serve_at is None:
        return None
    bind, port = placement.serve_at
    credentials = Credentials(secret.secret, None if certificates is None else certificates.coordinator)
    server = RpcServer(credentials, bind=bind, port=port)
    first = FirstHost(
        replace(own, node_rank=0), reconnect=job.options.reconnect, on_complete=secret.clear_rendezvous_path
    )
    membership_pb2_grpc.add_RendezvousServicer_to_server(  # type: ignore[no-untyped-call]  # generated
        rendezvous, server.server
    )
    membership_pb2_grpc.add_FirstHostServicer_to_server(  # type: ignore[no-untyped-call]  # generated
        first, server.server
    )
    server.on_refused = first.refused
    try:
        await server.start()
    except UsageError:
        await first.stop()
        if placement.may_connect:  # another host of the job was faster
            return None
        raise
    stack.push_async_callback(server.stop, grace=0.2)
    stack.callback(rendezvous.close, "the job has ended")
    stack.callback(secret.clear_rendezvous_path)
    stack.push_async_callback(first.stop)
    return first, server.address


def _attend(
    job: LaunchJob, own: Introduction, record: SubmittedJob, secret: JobSecret, agent: Callable[[], HostAgent]
) -> FurtherHost:
    """Attend the first host."""

    def adopt(opened: JobOpened) -> JobOpened:
        theirs = decode_record(opened.record)
        mine = msgspec.structs.replace(record, **{name: getattr(theirs, name) for name in _OF_THE_JOB})
        return msgspec.structs.replace(opened, record=encode_record(mine))

    async def answer(content: bytes) -> bytes:
        request = msgspec.msgpack.decode(content, type=ObserveRequest)
        return msgspec.msgpack.encode((await request.answer(agent().watch)).bounded)

    return FurtherHost(
        own,
        job.placement.coordinator,
        Credentials(secret.secret, None if job.certificates is None else job.certificates.agent),
        timeout=job.options.timeout,
        reconnect=job.options.reconnect,
        adopt=adopt,
        lost=lambda cause: encode_record(JobEnd(exit_code=1, message=cause)),
        answer=answer,
        report=lambda text: agent().report(text),
    )


async def _ask(group: FirstHost, host: str, _address: str, request: ObserveRequest) -> HostObserved | None:
    content = await group.view(host, msgspec.msgpack.encode(request))
    return None if content is None else msgspec.msgpack.decode(content, type=HostObserved)


async def _ask_nobody(_host: str, _address: str, _request: ObserveRequest) -> HostObserved | None:
    return None
