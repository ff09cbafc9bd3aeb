"""Creation of groups and replicas in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from asyncpar.backends import BackendConfig, CommunicationBackend, CommunicationGroup, CommunicationRuntime
from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientCompressionConfig
from asyncpar.net.arena.limits import count_cores
from asyncpar.parallel.config import BUCKET_BYTES, DDP_GROUP, DDPConfig, SynchronizationMode
from asyncpar.parallel.data_parallel import DataParallel
from asyncpar.parallel.distributed import DistributedDataParallel
from asyncpar.parallel.module import Model


async def init_process_group(
    backend: CommunicationBackend | str = CommunicationBackend.NATIVE,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    runtime: CommunicationRuntime | None = None,
    config: BackendConfig | None = None,
) -> tuple[CommunicationRuntime, CommunicationGroup]:
    """Open ``backend`` and return the runtime, a new one unless given, and the group ``ddp_main`` of all ranks.

    ``rank`` and ``world_size`` default to those of the environment; a value that differs from it raises ``UsageError``,
    as do different values here and in ``config``, which has the other settings.  Finalize the runtime at the end.
    """
    runtime = runtime or CommunicationRuntime()
    settings = config or BackendConfig()
    for name, given, configured in (("rank", rank, settings.rank), ("world_size", world_size, settings.world_size)):
        if given is not None and configured is not None and given != configured:
            raise UsageError(f"{name}: expected {configured}, as in config, got {given}")
    rank = settings.rank if rank is None else rank
    world_size = settings.world_size if world_size is None else world_size
    group = await runtime.initialize(backend, replace(settings, rank=rank, world_size=world_size), group=DDP_GROUP)
    return runtime, group


def create_data_parallel(
    model: Model, devices: Sequence[str] | None = None, *, runtime: CommunicationRuntime | None = None
) -> DataParallel:
    """Return a replica of ``model`` on each of ``devices`` of this process.

    Without ``devices`` there is one for each processor that this process may use, called ``cpu:0`` and so on.
    ``runtime`` is that of the replicas' communication (None: a new one).
    """
    if devices is None:
        devices = [f"cpu:{number}" for number in range(count_cores())]
    return DataParallel(model, devices, runtime)


async def create_distributed_data_parallel(
    model: Model,
    device: str = "cpu:0",
    *,
    backend: CommunicationBackend | str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    runtime: CommunicationRuntime | None = None,
    config: DDPConfig | None = None,
    mode: SynchronizationMode = SynchronizationMode.SYNCHRONOUS,
    bucket_size: int = BUCKET_BYTES,
    compression: GradientCompressionConfig | None = None,
) -> DistributedDataParallel:
    """Return this rank's replica of ``model``, started; use it as ``async with``, or close it at the end.

    Without ``runtime`` it opens ``backend`` (None: native) as ``init_process_group`` does, and closing finalizes that;
    with one, it is a replica of the group ``ddp_main`` of that runtime, and ``backend``, ``rank`` and ``world_size``,
    if given, must match it.

    ``device`` is that of the model; ``config``, ``mode``, ``bucket_size`` (bytes) and ``compression`` are those of
    ``DistributedDataParallel``.
    """
    owns_runtime = runtime is None
    if runtime is None:
        runtime, _ = await init_process_group(backend or CommunicationBackend.NATIVE, rank, world_size)
    else:
        _check_group(runtime.get_group(DDP_GROUP), backend, rank, world_size)
    try:
        ddp = DistributedDataParallel(
            model,
            device,
            DDP_GROUP,
            runtime,
            config,
            mode=mode,
            bucket_size=bucket_size,
            compression=compression,
            owns_runtime=owns_runtime,
        )
        return await ddp.start()
    except BaseException:
        if owns_runtime:
            await runtime.finalize()
        raise


def _check_group(
    group: CommunicationGroup, backend: CommunicationBackend | str | None, rank: int | None, world_size: int | None
) -> None:
    """Raise ``UsageError`` if ``group`` is not the requested one."""
    for name, wanted, found in (
        ("backend", None if backend is None else str(backend), group.backend),
        ("rank", rank, group.rank),
        ("world_size", world_size, group.size),
    ):
        if wanted is not None and wanted != found:
            raise UsageError(f"{name}: expected {found!r}, which the runtime has, or None, got {wanted!r}")
