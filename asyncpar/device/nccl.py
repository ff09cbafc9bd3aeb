"""The fabric over NVIDIA's nccl4py: NCCL by its bindings on addresses, CUDA by the runtime's on handles.

Communicators are created and ended through ``nccl.core``, which knows when a child of a nonblocking one is complete.
Collectives use the bindings below it: ``nccl.core`` would inspect every array again, which takes about as long as NCCL
needs to enqueue.  The bindings are those of one version, which ``nccl_library`` checks.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from asyncpar.device.fabric import (
    LEGACY_DEFAULT_STREAM,
    NO_ROUTE,
    PER_THREAD_DEFAULT_STREAM,
    UNIQUE_ID_BYTES,
    DeviceDescription,
    DeviceError,
    FabricVersions,
    NcclDtype,
    NcclOp,
    NcclResult,
)
from asyncpar.device.nccl_library import NcclLibrary, allows_shared_devices, load_library

_DEFAULT_STREAMS = (0, LEGACY_DEFAULT_STREAM, PER_THREAD_DEFAULT_STREAM)


def open_nccl_fabric() -> NcclFabric:
    """Return the fabric of this process.  Raises ``FabricUnavailable`` naming what is missing."""
    return NcclFabric(load_library())


class _Calls:
    """The libraries, their numbers for our names, and their errors as ours."""

    def __init__(self, library: NcclLibrary) -> None:
        self.library = library
        core, bindings = library.core, library.bindings
        self.dtypes = MappingProxyType({one: int(core.NcclDataType[one.name]) for one in NcclDtype})
        self.ops = MappingProxyType({one: int(core.NcclRedOp[one.name]) for one in NcclOp})
        known = {result.value: result for result in NcclResult}
        self._results = {int(one): known[f"nccl{one.name}"] for one in bindings.Result if f"nccl{one.name}" in known}
        self.nccl_errors = (bindings.NCCLError, core.NcclInvalid)

    def result(self, status: int) -> NcclResult:
        """Return NCCL's ``status`` by name."""
        return self._results.get(int(status), NcclResult.INTERNAL_ERROR)

    @contextmanager
    def nccl(self, call: str) -> Iterator[None]:
        """Raise ``DeviceError`` naming ``call`` if NCCL refuses something in the block."""
        try:
            yield
        except self.nccl_errors as error:
            raise self.refused(call, error) from error

    def refused(self, call: str, error: Exception) -> DeviceError:
        """Return our error for NCCL's refusal of ``call``."""
        status = getattr(error, "status", None)
        result = NcclResult.INVALID_ARGUMENT if status is None else self.result(status)
        return DeviceError(f"nccl: {call}: {error}", result=result)

    def cuda(self, call: str, *arguments: Any) -> Any:
        """Call the CUDA runtime and return its result without the status; ``DeviceError`` unless that is 0."""
        status, *values = getattr(self.library.runtime, call)(*arguments)
        if status.value:
            raise DeviceError(f"cuda: {call}: {status.name}: {self.described(status)}")
        return values[0] if values else None

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make ``device`` the thread's current one in the block, and restore the previous one."""
        before = self.cuda("cudaGetDevice")
        if before == device:
            yield
            return
        self.cuda("cudaSetDevice", device)
        try:
            yield
        finally:
            self.cuda("cudaSetDevice", before)

    def described(self, status: Any) -> str:
        """Return CUDA's description of ``status``."""
        _, text = self.library.runtime.cudaGetErrorString(status)
        return text.decode() if isinstance(text, bytes) else str(text)


class NcclCommunicator:
    """A ``DeviceCommunicator`` of NCCL.  A child exists once the call on its parent that creates it is complete."""

    def __init__(
        self, calls: _Calls, comm: Any, *, rank: int, size: int, device: int, parent: NcclCommunicator | None = None
    ) -> None:
        self._calls = calls
        self._comm = comm
        self._parent = parent
        self._bindings = calls.library.bindings
        self._rank, self._size = rank, size
        self.device = device
        self._is_over = False
        self._handle: Any = None

    @property
    def rank(self) -> int:
        """This process's rank; for a child, once it is complete."""
        if self._rank < 0:
            self._rank = int(self._ready().rank)
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks; for a child, once it is complete."""
        if self._size < 0:
            self._size = int(self._ready().nranks)
        return self._size

    # -- operations --------------------------------------------------------------------------------------------------

    def all_reduce(self, send: int, recv: int, count: int, dtype: NcclDtype, op: NcclOp, stream: int) -> NcclResult:
        """``ncclAllReduce``."""
        calls = self._calls
        return self._enqueue("all_reduce", send, recv, count, calls.dtypes[dtype], calls.ops[op], stream=stream)

    def broadcast(self, send: int, recv: int, count: int, dtype: NcclDtype, root: int, stream: int) -> NcclResult:
        """``ncclBroadcast``."""
        return self._enqueue("broadcast", send, recv, count, self._calls.dtypes[dtype], root, stream=stream)

    def reduce(
        self, send: int, recv: int, count: int, dtype: NcclDtype, op: NcclOp, root: int, stream: int
    ) -> NcclResult:
        """``ncclReduce``."""
        calls = self._calls
        return self._enqueue("reduce", send, recv, count, calls.dtypes[dtype], calls.ops[op], root, stream=stream)

    def all_gather(self, send: int, recv: int, count: int, dtype: NcclDtype, stream: int) -> NcclResult:
        """``ncclAllGather``."""
        return self._enqueue("all_gather", send, recv, count, self._calls.dtypes[dtype], stream=stream)

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: NcclDtype, op: NcclOp, stream: int) -> NcclResult:
        """``ncclReduceScatter``."""
        calls = self._calls
        return self._enqueue("reduce_scatter", send, recv, count, calls.dtypes[dtype], calls.ops[op], stream=stream)

    def send(self, send: int, count: int, dtype: NcclDtype, peer: int, stream: int) -> NcclResult:
        """``ncclSend``."""
        return self._enqueue("send", send, count, self._calls.dtypes[dtype], peer, stream=stream)

    def recv(self, recv: int, count: int, dtype: NcclDtype, peer: int, stream: int) -> NcclResult:
        """``ncclRecv``."""
        return self._enqueue("recv", recv, count, self._calls.dtypes[dtype], peer, stream=stream)

    def _enqueue(self, call: str, *arguments: int, stream: int) -> NcclResult:
        handle = self._handle or self._open_handle()
        try:  # a context manager would take as long as the call
            getattr(self._bindings, call)(*arguments, handle, stream)
            return self._calls.result(self._bindings.comm_get_async_error(handle))
        except self._calls.nccl_errors as error:
            raise self._calls.refused(call, error) from error

    def _open_handle(self) -> Any:
        self._handle = self._bindings.Comm(self._ready().ptr)
        return self._handle

    # -- children, and the end ---------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int) -> NcclCommunicator | None:
        """``ncclCommSplit``."""
        with self._calls.nccl("split"), self._calls.on(self.device):
            child = self._ready().split(color, key)
        return None if color is None else self._child(child)

    def shrink(self, exclude: Sequence[int], *, abort: bool) -> NcclCommunicator:
        """``ncclCommShrink``."""
        flags = self._calls.library.core.CommShrinkFlag
        flag = flags.ABORT if abort else flags.DEFAULT
        with self._calls.nccl("shrink"), self._calls.on(self.device):
            return self._child(self._ready().shrink(list(exclude), flag=flag))

    def revoke(self) -> NcclResult:
        """``ncclCommRevoke``."""
        with self._calls.nccl("revoke"):
            self._ready().revoke()
        return self.get_async_error()

    def abort(self) -> None:
        """``ncclCommAbort``; a child that is not complete yet ends with its parent's call."""
        self._is_over, self._handle = True, None
        with self._calls.nccl("abort"), self._calls.on(self.device):
            self._comm.abort()

    def destroy(self) -> None:
        """``ncclCommDestroy``."""
        self._is_over, self._handle = True, None
        with self._calls.nccl("destroy"), self._calls.on(self.device):
            self._comm.destroy()

    def get_async_error(self) -> NcclResult:
        """``ncclCommGetAsyncError``; for a child that is not complete yet, that of its parent."""
        if self._is_over:
            return NcclResult.INVALID_USAGE
        if not self._comm.is_valid and self._parent is not None:
            result = self._parent.get_async_error()
            if result is NcclResult.SUCCESS and not self._comm.is_valid:
                return NcclResult.INTERNAL_ERROR
            if result is not NcclResult.SUCCESS:
                return result
        self._parent = None
        with self._calls.nccl("get_async_error"):
            return self._calls.result(self._comm.get_async_error())

    def get_last_error(self) -> str:
        """``ncclGetLastError``."""
        if self._is_over or not self._comm.is_valid:
            return ""
        with self._calls.nccl("get_last_error"):
            return str(self._comm.get_last_error())

    def _child(self, comm: Any) -> NcclCommunicator:
        return NcclCommunicator(self._calls, comm, rank=-1, size=-1, device=self.device, parent=self)

    def _ready(self) -> Any:
        """Return the communicator of nccl4py; ``DeviceError`` unless it exists."""
        if self._is_over or not self._comm.is_valid:
            state = "was aborted or destroyed" if self._is_over else "is not complete"
            raise DeviceError(f"nccl: this communicator {state}", result=NcclResult.INVALID_USAGE)
        return self._comm


class NcclFabric:
    """A ``Fabric`` of this process's CUDA devices."""

    name = "nccl"

    def __init__(self, library: NcclLibrary) -> None:
        self._calls = _Calls(library)
        self._core, self._bindings = library.core, library.bindings

    @property
    def versions(self) -> FabricVersions:
        """Versions of libnccl and the driver."""
        return self._calls.library.versions

    @property
    def allows_shared_devices(self) -> bool:
        """Whether several ranks of a communicator may use one device."""
        return allows_shared_devices(self.versions)

    @property
    def reaches_other_hosts(self) -> bool:
        """Whether ``NO_ROUTE`` is absent from this process's environment."""
        name, _, value = NO_ROUTE.partition("=")
        return os.environ.get(name) != value

    def devices(self) -> tuple[DeviceDescription, ...]:
        """The devices that this process sees, in CUDA's order."""
        return tuple(self._describe(index) for index in range(self._calls.cuda("cudaGetDeviceCount")))

    def _describe(self, index: int) -> DeviceDescription:
        found = self._calls.cuda("cudaGetDeviceProperties", index)
        name = found.name.decode() if isinstance(found.name, bytes) else str(found.name)
        return DeviceDescription(
            index=index,
            uuid=bytes(found.uuid.bytes).hex(),
            name=name.rstrip("\0"),
            total_bytes=int(found.totalGlobalMem),
        )

    # -- communicators -----------------------------------------------------------------------------------------------

    def get_unique_id(self) -> bytes:
        """``ncclGetUniqueId``."""
        with self._calls.nccl("get_unique_id"):
            made = bytes(self._core.get_unique_id().as_bytes)
        assert len(made) == UNIQUE_ID_BYTES
        return made

    def init_rank(self, size: int, unique_id: bytes, rank: int, device: int) -> NcclCommunicator:
        """``ncclCommInitRankConfig``, nonblocking."""
        core = self._core
        with self._calls.nccl("init_rank"), self._calls.on(device):
            config = core.NCCLConfig(blocking=False)
            comm = core.Communicator.init(size, rank, core.UniqueId.from_bytes(unique_id), config)
        return NcclCommunicator(self._calls, comm, rank=rank, size=size, device=device)

    def group_start(self) -> None:
        """``ncclGroupStart``."""
        with self._calls.nccl("group_start"):
            self._bindings.group_start()

    def group_end(self) -> NcclResult:
        """``ncclGroupEnd``; the started operations may be in progress, according to the communicators."""
        with self._calls.nccl("group_end"):
            self._bindings.group_end()
        return NcclResult.SUCCESS

    # -- streams and events ------------------------------------------------------------------------------------------

    def create_stream(self, device: int) -> int:
        """``cudaStreamCreateWithFlags``, nonblocking."""
        with self._calls.on(device):
            flag = self._calls.library.runtime.cudaStreamNonBlocking
            return int(self._calls.cuda("cudaStreamCreateWithFlags", flag))

    def destroy_stream(self, stream: int) -> None:
        """``cudaStreamDestroy``."""
        self._calls.cuda("cudaStreamDestroy", stream)

    def stream_device(self, stream: int) -> int | None:
        """``cudaStreamGetDevice``; None for the default streams."""
        return None if stream in _DEFAULT_STREAMS else int(self._calls.cuda("cudaStreamGetDevice", stream))

    def create_event(self, device: int) -> int:
        """``cudaEventCreateWithFlags``, without timing."""
        with self._calls.on(device):
            flag = self._calls.library.runtime.cudaEventDisableTiming
            return int(self._calls.cuda("cudaEventCreateWithFlags", flag))

    def record_event(self, event: int, stream: int) -> None:
        """``cudaEventRecord``."""
        self._calls.cuda("cudaEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        """``cudaStreamWaitEvent``."""
        self._calls.cuda("cudaStreamWaitEvent", stream, event, 0)

    def query_event(self, event: int) -> bool:
        """``cudaEventQuery``."""
        runtime = self._calls.library.runtime
        (status,) = runtime.cudaEventQuery(event)
        if status.name == "cudaErrorNotReady":
            return False
        if status.value:
            raise DeviceError(f"cuda: cudaEventQuery: {status.name}: {self._calls.described(status)}")
        return True

    def destroy_event(self, event: int) -> None:
        """``cudaEventDestroy``."""
        self._calls.cuda("cudaEventDestroy", event)

    # -- memory ------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, device: int) -> int:
        """``cudaMalloc``."""
        with self._calls.on(device):
            return int(self._calls.cuda("cudaMalloc", nbytes))

    def free(self, address: int, device: int) -> None:
        """``cudaFree``."""
        with self._calls.on(device):
            self._calls.cuda("cudaFree", address)

    def allocate_pinned(self, nbytes: int) -> int:
        """``cudaHostAlloc``, for all devices."""
        return int(self._calls.cuda("cudaHostAlloc", nbytes, self._calls.library.runtime.cudaHostAllocPortable))

    def free_pinned(self, address: int) -> None:
        """``cudaFreeHost``."""
        self._calls.cuda("cudaFreeHost", address)

    def pinned_view(self, address: int, nbytes: int) -> memoryview:
        """The bytes at ``address``."""
        return memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """``cudaMemcpyAsync``."""
        kind = self._calls.library.runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._calls.cuda("cudaMemcpyAsync", target, source, nbytes, kind, stream)
