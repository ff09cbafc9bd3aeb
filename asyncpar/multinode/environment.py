"""Where the communicator of a trainer comes from."""

from __future__ import annotations

from dataclasses import replace

from asyncpar.backends import BackendConfig, CommunicationBackend, CommunicationRuntime
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError
from asyncpar.multinode.config import MultiNodeConfig


class Environment:
    """The world of ``communicator``, or one that is opened by ``config.comm_backend``."""

    def __init__(
        self,
        config: MultiNodeConfig,
        communicator: Communicator | None,
        *,
        runtime: CommunicationRuntime | None,
        backend: BackendConfig | None,
    ) -> None:
        if communicator is not None and (runtime is not None or backend is not None):
            raise UsageError("communicator: expected None beside runtime or backend, whose world would not be used")
        if communicator is not None and str(config.comm_backend) != CommunicationBackend.NATIVE:
            raise UsageError(
                f"comm_backend: expected {CommunicationBackend.NATIVE}, the default, beside a communicator, as no "
                f"backend is opened, got {config.comm_backend!r}"
            )
        self._config = config
        self._communicator = communicator
        self._runtime = runtime
        self._settings = backend or BackendConfig()
        self._opened: CommunicationRuntime | None = None

    async def open(self) -> Communicator:
        """Return the communicator over all ranks.  Raises what opening the backend raises."""
        if self._communicator is not None:
            return self._communicator
        config = self._config
        settings = replace(self._settings, rank=config.global_rank, world_size=config.world_size)
        runtime = self._runtime or CommunicationRuntime()
        try:
            group = await runtime.initialize(config.comm_backend, settings)
        except BaseException:
            if self._runtime is None:
                await runtime.finalize()
            raise
        self._opened = runtime if self._runtime is None else None
        return group.communicator

    async def close(self) -> None:
        """Leave a world that was opened here.  Idempotent."""
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.finalize()
