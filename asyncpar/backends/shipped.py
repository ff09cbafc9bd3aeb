"""The backends that come with asyncpar."""

from __future__ import annotations

from asyncpar.backends.backend import CommunicationBackend, OpenBackend
from asyncpar.backends.gloo.backend import open_gloo
from asyncpar.backends.mpi.backend import open_mpi
from asyncpar.backends.native import open_native
from asyncpar.backends.nccl import open_nccl
from asyncpar.backends.thread import PROCESS_THREADS


def shipped_backends() -> dict[str, OpenBackend]:
    """Return them by name."""
    return {
        str(CommunicationBackend.NATIVE): open_native,
        str(CommunicationBackend.THREAD): PROCESS_THREADS,
        str(CommunicationBackend.NCCL): open_nccl,
        str(CommunicationBackend.MPI): open_mpi,
        str(CommunicationBackend.GLOO): open_gloo,
    }
