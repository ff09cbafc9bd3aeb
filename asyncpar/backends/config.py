"""The configuration of a backend, and the errors of opening it.  Pure."""

from __future__ import annotations

from dataclasses import dataclass

from asyncpar.backends.compression import CompressionAlgorithm
from asyncpar.core.config.names import LaneName
from asyncpar.errors import UsageError
from asyncpar.net.transport.lane_kinds import parse_transport


class BackendNotRegistered(UsageError):  # noqa: N818
    """The runtime has no backend of this name; the message lists those it has."""


class BackendUnavailable(UsageError):  # noqa: N818
    """The backend cannot work here; the message states what it needs, and how to install it where that helps."""


class NoGroup(UsageError):  # noqa: N818
    """The runtime has no group at all: no backend is open."""


class GroupNotFound(UsageError):  # noqa: N818
    """The runtime has no group of this name on this rank; the message lists those it has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """Settings of a backend.

    ``timeout`` is the number of seconds that an operation may go without progress before it raises ``PeerTimeout``
    (None: forever), and for which a backend waits for its ranks.  ``compression`` is applied to all-reduced sums and
    averages of floating-point arrays in ``CommunicationRuntime.collective_op``.  ``rank`` and ``world_size`` are this
    process's place; a backend that receives its place from its launcher checks them.  ``transport`` pins the lanes of
    the native backend (``shm``, ``tcp``, ``grpc``).  ``rendezvous`` is the meeting point of the Gloo backend's ranks:
    ``tcp://host:port``, where rank 0 listens, or ``file:///path`` of a file that does not exist yet.
    """

    timeout: float | None = 30.0
    compression: CompressionAlgorithm = CompressionAlgorithm()  # noqa: RUF009  # immutable
    rank: int | None = None
    world_size: int | None = None
    transport: LaneName | None = None
    rendezvous: str | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not self.timeout > 0:
            raise UsageError(f"timeout: expected a positive number of seconds or None, got {self.timeout!r}")
        if self.world_size is not None and self.world_size < 1:
            raise UsageError(f"world_size: expected at least 1, got {self.world_size}")
        if self.rank is not None and (self.rank < 0 or (self.world_size is not None and self.rank >= self.world_size)):
            limit = "0 or more" if self.world_size is None else f"0..{self.world_size - 1}"
            raise UsageError(f"rank: expected {limit}, got {self.rank}")
        if not isinstance(self.compression, CompressionAlgorithm):
            raise UsageError(f"compression: expected a CompressionAlgorithm, got {self.compression!r}")
        parse_transport(self.transport)

    def check_place(self, backend: str, *, rank: int, world_size: int) -> None:
        """Raise ``UsageError`` if ``backend`` has put this process in another place than the configured one."""
        for name, wanted, found in (("rank", self.rank, rank), ("world_size", self.world_size, world_size)):
            if wanted is not None and wanted != found:
                raise UsageError(
                    f"{name}: expected {found}, which is what the {backend} backend was started with here, got {wanted}"
                )

    def refuse(self, backend: str, *fields: str) -> None:
        """Raise ``UsageError`` if one of ``fields`` is set, which ``backend`` does not use."""
        for field in fields:
            value = getattr(self, field)
            if value is not None:
                raise UsageError(f"{field}: the {backend} backend has no use for it, got {value!r}")


def missing_library(backend: str, library: str, error: ImportError) -> BackendUnavailable:
    """Return the error for a backend whose ``library`` could not be imported."""
    return BackendUnavailable(
        f"backend: {backend} needs {library}, which cannot be imported ({error}); "
        f'install it with: pip install "asyncpar[{backend}]"'
    )
