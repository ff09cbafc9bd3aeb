"""Serve the coordinator and the rendezvous of a job, on the host whose place that is."""

from __future__ import annotations

import asyncio

from asyncpar._proto.asyncpar.v1 import membership_pb2_grpc
from asyncpar.errors import UsageError
from asyncpar.launch.coordinator_machine import JobSettings
from asyncpar.launch.coordinator_service import CoordinatorService
from asyncpar.launch.job import Job
from asyncpar.launch.job_secret import JobSecret
from asyncpar.launch.site import free_port
from asyncpar.net.membership.service import RendezvousService
from asyncpar.net.transport.rpc import Credentials, RpcServer

_FAREWELL_PATIENCE = 3.0


class CoordinatorServer:
    """Serves inside ``async with`` if this is the first host.

    ``address`` is where to attend, ``is_here`` tells if that is us.  Entering raises ``UsageError`` when the port
    cannot be bound, except where another agent of the job may have been faster.
    """

    def __init__(self, job: Job, secret: JobSecret) -> None:
        self._job = job
        self._secret = secret
        self._server: RpcServer | None = None
        self._rendezvous = RendezvousService(job=job.site.job)
        self._coordinator = CoordinatorService(self._settings(), self._rendezvous, self._begin_generation)
        self.address = job.site.coordinator

    @property
    def is_here(self) -> bool:
        return self._server is not None

    async def __aenter__(self) -> CoordinatorServer:
        site = self._job.site
        if site.serve_at is None:
            return self
        certificates = None if self._job.certificates is None else self._job.certificates.coordinator
        credentials = Credentials(self._secret.secret, certificates)
        server = RpcServer(credentials, bind=site.serve_at[0], port=site.serve_at[1])
        membership_pb2_grpc.add_RendezvousServicer_to_server(  # type: ignore[no-untyped-call]  # generated
            self._rendezvous, server.server
        )
        membership_pb2_grpc.add_CoordinatorServicer_to_server(  # type: ignore[no-untyped-call]  # generated
            self._coordinator, server.server
        )
        try:
            await server.start()
        except UsageError:
            if site.may_attend:  # another agent of the job was first
                return self
            raise
        self._coordinator.open()
        self._server = server
        self.address = site.coordinator or server.address
        return self

    async def __aexit__(self, *_: object) -> None:
        """Let the other agents hear the outcome before the server goes."""
        if self._server is None:
            return
        try:
            async with asyncio.timeout(_FAREWELL_PATIENCE):
                await self._coordinator.wait_empty()
        except TimeoutError:  # an agent that does not go away hears nothing more
            self._rendezvous.close("the job has ended")
        self._coordinator.close()
        self._secret.clear_meeting_place()
        await self._server.stop(grace=0.2)

    def _settings(self) -> JobSettings:
        options = self._job.options
        return JobSettings(
            job=self._job.site.job,
            nnodes=options.nnodes,
            max_restarts=options.max_restarts,
            timeout=options.timeout,
            grace=options.grace,
            silent_after=options.silent_after,
            reconnect=options.reconnect,
        )

    def _begin_generation(self) -> tuple[str, int]:
        """All agents are here; return MASTER_ADDR and MASTER_PORT."""
        self._secret.clear_meeting_place()
        address = self._job.site.master_addr
        return address, free_port(address)
