"""The interface between the collectives and NCCL, in NCCL's names: an implementation moves device arrays.

All calls return without waiting for other ranks or for the device.  Communicators are nonblocking, as those of
``ncclConfig_t.blocking = 0``: after ``init_rank``, ``split``, ``shrink``, ``revoke`` and any call that returns
``IN_PROGRESS``, nothing else may be called on the communicator but ``get_async_error`` and ``abort``, until the former
returns something else.  Only ``abort`` and ``destroy`` may take long, and are called in another thread.

Memory is identified by addresses (``int``), streams and events by handles (``int``, those of the CUDA runtime; 1 is the
legacy default stream, 2 that of the thread).  Lengths are in elements of ``dtype``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from asyncpar.errors import AsyncparError

UNIQUE_ID_BYTES = 128

LEGACY_DEFAULT_STREAM = 1
PER_THREAD_DEFAULT_STREAM = 2


NO_ROUTE = "ASYNCPAR_NCCL_BETWEEN_HOSTS=0"
"""Setting in the environment of a rank that its NCCL has no route to other hosts."""


class NcclDtype(StrEnum):
    """Dtypes that NCCL moves and combines, by numpy's names (``bfloat16``: that of ``ml_dtypes``)."""

    INT8 = "int8"
    UINT8 = "uint8"
    INT32 = "int32"
    UINT32 = "uint32"
    INT64 = "int64"
    UINT64 = "uint64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


class NcclOp(StrEnum):
    """The reduction operators of NCCL; ``avg`` is the sum divided by the number of ranks."""

    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    AVG = "avg"


class NcclResult(StrEnum):
    """``ncclResult_t``, as reported by ``get_async_error``."""

    SUCCESS = "ncclSuccess"
    IN_PROGRESS = "ncclInProgress"
    UNHANDLED_CUDA_ERROR = "ncclUnhandledCudaError"
    SYSTEM_ERROR = "ncclSystemError"
    INTERNAL_ERROR = "ncclInternalError"
    INVALID_ARGUMENT = "ncclInvalidArgument"
    INVALID_USAGE = "ncclInvalidUsage"
    REMOTE_ERROR = "ncclRemoteError"
    TIMEOUT = "ncclTimeout"


class DeviceError(AsyncparError):
    """CUDA or NCCL refused a call or failed in it; ``result`` is NCCL's result, None for CUDA."""

    def __init__(self, message: str, *, result: NcclResult | None = None) -> None:
        super().__init__(message)
        self.result = result


class FabricUnavailable(AsyncparError):  # noqa: N818
    """This process cannot use NCCL: no driver, no device, no library, or one that is too old; the message names it."""


class FabricVersions(msgspec.Struct, frozen=True, kw_only=True):
    """Versions as their libraries count: 23004 is NCCL 2.30.4, 13000 is CUDA 13.0."""

    nccl: int
    cuda_driver: int


class DeviceDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A device of this process: ``index`` is CUDA's in this process, ``uuid`` is common to all processes of a host."""

    index: int
    uuid: str
    name: str
    total_bytes: int


class DeviceCommunicator(Protocol):
    """``ncclComm_t``: this process's rank among those of one communicator.  Calls come from one thread."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> int:
        """The index of the device on which it was created."""
        ...

    def all_reduce(self, send: int, recv: int, count: int, dtype: NcclDtype, op: NcclOp, stream: int) -> NcclResult: ...

    def broadcast(self, send: int, recv: int, count: int, dtype: NcclDtype, root: int, stream: int) -> NcclResult: ...

    def reduce(
        self, send: int, recv: int, count: int, dtype: NcclDtype, op: NcclOp, root: int, stream: int
    ) -> NcclResult: ...

    def all_gather(self, send: int, recv: int, count: int, dtype: NcclDtype, stream: int) -> NcclResult:
        """``count`` is that of this rank's part."""
        ...

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: NcclDtype, op: NcclOp, stream: int) -> NcclResult:
        """``count`` is that of this rank's part."""
        ...

    def send(self, send: int, count: int, dtype: NcclDtype, peer: int, stream: int) -> NcclResult: ...

    def recv(self, recv: int, count: int, dtype: NcclDtype, peer: int, stream: int) -> NcclResult: ...

    def split(self, color: int | None, key: int) -> DeviceCommunicator | None:
        """``ncclCommSplit``, which all ranks call; None for those that pass no ``color``."""
        ...

    def shrink(self, exclude: Sequence[int], *, abort: bool) -> DeviceCommunicator:
        """``ncclCommShrink``, which all ranks but those in ``exclude`` call, in any order of time.

        ``abort`` ends operations in progress (``NCCL_SHRINK_ABORT``); without it there must be none.
        """
        ...

    def revoke(self) -> NcclResult:
        """``ncclCommRevoke``: end operations in progress; the communicator can be shrunk or destroyed then."""
        ...

    def abort(self) -> None:
        """``ncclCommAbort``: end operations in progress and free the communicator; idempotent.

        When it returns, these operations do not access memory any more; their streams continue.
        """
        ...

    def destroy(self) -> None:
        """``ncclCommDestroy``: free the communicator when its operations are over; idempotent."""
        ...

    def get_async_error(self) -> NcclResult:
        """``ncclCommGetAsyncError``: the state of the communicator; an error stays."""
        ...

    def get_last_error(self) -> str:
        """NCCL's text about the last error; empty for none."""
        ...


class Fabric(Protocol):
    """CUDA and NCCL as seen by one process.  Raises ``DeviceError`` if they refuse a call."""

    @property
    def name(self) -> str:
        """Its name in messages: ``nccl``."""
        ...

    @property
    def versions(self) -> FabricVersions: ...

    @property
    def allows_shared_devices(self) -> bool:
        """Whether ranks of a communicator may share a device: with ``NCCL_MULTI_RANK_GPU_ENABLE=1`` from 2.30 on."""
        ...

    @property
    def reaches_other_hosts(self) -> bool:
        """Whether NCCL has a route to the other hosts of the world; false if ``NO_ROUTE`` is in the environment."""
        ...

    def devices(self) -> tuple[DeviceDescription, ...]: ...

    # -- communicators ---------------------------------------------------------------------------------------------

    def get_unique_id(self) -> bytes:
        """``ncclGetUniqueId``: ``UNIQUE_ID_BYTES`` bytes that all ranks of a new communicator need."""
        ...

    def init_rank(self, size: int, unique_id: bytes, rank: int, device: int) -> DeviceCommunicator:
        """``ncclCommInitRankConfig``; it is complete when ``get_async_error`` reports so."""
        ...

    def group_start(self) -> None:
        """``ncclGroupStart``: calls of this thread up to ``group_end`` start together."""
        ...

    def group_end(self) -> NcclResult: ...

    # -- streams and events ----------------------------------------------------------------------------------------

    def create_stream(self, device: int) -> int:
        """A stream that does not wait for the legacy default stream."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def stream_device(self, stream: int) -> int | None:
        """The index of the stream's device; None if it is one of the default streams, which all devices have."""
        ...

    def create_event(self, device: int) -> int:
        """An event without timing."""
        ...

    def record_event(self, event: int, stream: int) -> None: ...

    def wait_event(self, stream: int, event: int) -> None:
        """Make later work of ``stream`` wait for ``event``."""
        ...

    def query_event(self, event: int) -> bool:
        """Return whether everything before it in its stream is over.  Raises ``DeviceError`` if that failed."""
        ...

    def destroy_event(self, event: int) -> None: ...

    # -- memory ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, device: int) -> int:
        """Memory of the device that lasts until ``free``."""
        ...

    def free(self, address: int, device: int) -> None: ...

    def allocate_pinned(self, nbytes: int) -> int:
        """Host memory that devices copy to and from on their own, until ``free_pinned``."""
        ...

    def free_pinned(self, address: int) -> None: ...

    def pinned_view(self, address: int, nbytes: int) -> memoryview:
        """Pinned memory as writable bytes."""
        ...

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """``cudaMemcpyAsync`` of any direction, between device and pinned memory."""
        ...
