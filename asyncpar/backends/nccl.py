"""The NCCL backend, which this version does not have."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from asyncpar.backends.config import BackendConfig
from asyncpar.backends.errors import BackendUnavailable
from asyncpar.collectives.communicator import Communicator


def open_nccl(config: BackendConfig) -> AbstractAsyncContextManager[Communicator]:  # noqa: ARG001
    """Raise ``BackendUnavailable``: NCCL moves arrays of CUDA devices, and asyncpar has arrays of numpy so far."""
    raise BackendUnavailable(
        "backend: nccl is not part of this version; it needs CUDA devices and arrays on them, and there is no extra "
        "to install for it: use native, mpi or gloo, or register a backend of your own"
    )
