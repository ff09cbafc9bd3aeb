"""A backend of Ray Train: its workers are the ranks of one world, which ``asyncpar.init`` joins.

    DataParallelTrainer(loop, backend_config=ap.ray.AsyncparConfig(), scaling_config=ScalingConfig(num_workers=4))

The first worker serves the rendezvous.  The secret goes to workers as an argument of a call, and then lies in a file
that only their user can read.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ray
from ray.train.backend import Backend, BackendConfig

from asyncpar.blocking.thread import LoopThread
from asyncpar.core.addresses import split_address
from asyncpar.core.config.environment import LaunchEnvironment
from asyncpar.core.config.secret import SECRET_BYTES, Secret
from asyncpar.engines.rendezvous import serve_rendezvous
from asyncpar.errors import UsageError
from asyncpar.net.membership.credentials import write_secret
from asyncpar.net.membership.host import host_id, host_name

_VARIABLES: Final = ("ASYNCPAR_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_")


class AsyncparConfig(BackendConfig):
    """Settings of the backend: ``transport`` pins the lane, ``timeout`` bounds the wait of ranks for each other."""

    def __init__(self, *, transport: str | None = None, timeout: float = 60.0) -> None:
        if not timeout > 0.0:
            raise UsageError(f"timeout: expected a positive number of seconds, got {timeout}")
        self.transport = transport
        self.timeout = timeout

    @property
    def backend_cls(self) -> type[AsyncparBackend]:
        """The backend, for Ray Train."""
        return AsyncparBackend


class AsyncparBackend(Backend):
    """Gives each worker of Ray Train its place in a world."""

    def on_start(self, worker_group: Any, backend_config: AsyncparConfig) -> None:
        """Serve a rendezvous on the first worker, and give all workers their places."""
        size, job, secret = len(worker_group), f"ray-train-{secrets.token_hex(4)}", secrets.token_bytes(SECRET_BYTES)
        places: list[tuple[str, str]] = worker_group.execute(find_place)
        rendezvous = worker_group.execute_single(0, serve_job, job, size, Secret(secret), places[0][0])
        here, seen = Counter(host for _, host in places), Counter[str]()
        hosts = list(here)
        calls = []
        for rank, (address, host) in enumerate(places):
            environment = LaunchEnvironment(
                rank=rank,
                local_rank=seen[host],
                world_size=size,
                local_world_size=here[host],
                group_rank=hosts.index(host),
                group_world_size=len(hosts),
                master_addr=places[0][0],
                master_port=split_address(rendezvous)[1],
                rendezvous=rendezvous,
                secret_file="",
                job=job,
                generation=0,
                restart_count=0,
                host=host.partition(" ")[0],
                host_id=host.partition(" ")[2],
                bind=address,
                timeout=backend_config.timeout,
                transport=backend_config.transport,
            )
            seen[host] += 1
            calls.append(worker_group.execute_single_async(rank, enter_job, environment.to_mapping(), Secret(secret)))
        ray.get(calls)

    def on_shutdown(self, worker_group: Any, backend_config: AsyncparConfig) -> None:  # noqa: ARG002  # Ray's signature
        """Remove the job's files from workers; dead ones have none."""
        with suppress(ray.exceptions.RayError):
            worker_group.execute(leave_job)


@dataclass(slots=True)
class _Process:
    """This process's part in a job."""

    directory: Path | None = None
    serving: LoopThread | None = None


_process = _Process()


def find_place() -> tuple[str, str]:
    """Return the address of a worker, and the name and the id of its host."""
    name = host_name()
    return str(ray.util.get_node_ip_address()), f"{name} {host_id(name)}"


def serve_job(job: str, size: int, secret: bytes, address: str) -> str:
    """Serve the rendezvous of ``job`` in this process, and return its address."""
    from contextlib import AsyncExitStack

    _process.serving = serving = LoopThread("asyncpar rendezvous")
    stack = AsyncExitStack()
    serving.at_close(stack, stack.aclose)
    return serving.call(lambda: serve_rendezvous(stack, job=job, size=size, secret=secret, address=address))


def enter_job(variables: dict[str, str], secret: bytes) -> None:
    """Enable ``asyncpar.init`` in this process to join the job."""
    _process.directory = directory = Path(tempfile.mkdtemp(prefix="asyncpar-place-"))  # mode 0700
    write_secret(directory / "secret", secret)
    os.environ.update({**variables, "ASYNCPAR_SECRET_FILE": str(directory / "secret")})


def leave_job() -> None:
    """Remove everything that ``enter_job`` and ``serve_job`` have left here."""
    for name in [name for name in os.environ if name.startswith(_VARIABLES)]:
        del os.environ[name]
    directory, _process.directory = _process.directory, None
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)
    serving, _process.serving = _process.serving, None
    if serving is not None:
        serving.close()
