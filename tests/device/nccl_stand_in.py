"""Stand-ins for nccl4py 0.6 and CUDA's runtime at their border: the same names and signatures; calls are recorded.

``test_nccl_library`` holds the signatures against those of the libraries where these are installed.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from asyncpar.device.fabric import FabricVersions
from asyncpar.device.nccl_library import NcclLibrary

Record = list[tuple[Any, ...]]

MODULES = ("nccl.core", "nccl.bindings.nccl", "cuda.bindings.runtime")


class Result(enum.IntEnum):
    Success = 0
    UnhandledCudaError = 1
    SystemError = 2
    InternalError = 3
    InvalidArgument = 4
    InvalidUsage = 5
    RemoteError = 6
    InProgress = 7
    Timeout = 8
    NumResults = 9


class NcclDataType(enum.IntEnum):
    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9


class NcclRedOp(enum.IntEnum):
    SUM = 0
    PROD = 1
    MAX = 2
    MIN = 3
    AVG = 4


class CommShrinkFlag(enum.IntEnum):
    DEFAULT = 0
    ABORT = 1


class NcclInvalid(Exception):  # the library's name
    """The refusal of ``nccl.core``."""


class NCCLError(Exception):
    """The refusal of NCCL."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{Result(status).name} ({status})")
        self.status = status


class Comm:
    def __init__(self, handle: int = 0) -> None:
        self.handle = handle


@dataclass
class NCCLConfig:
    blocking: bool | None = None


class UniqueId:
    def __init__(self, content: bytes = bytes(range(128))) -> None:
        self.as_bytes = content

    @staticmethod
    def from_bytes(b: bytes | bytearray | memoryview) -> UniqueId:
        return UniqueId(bytes(b))


@dataclass
class Libraries:
    """The state behind the stand-ins: what was called, and what the next calls answer."""

    calls: Record = field(default_factory=list)
    states: list[Result] = field(default_factory=list)
    """What ``get_async_error`` answers next; then success."""
    refuses: dict[str, int] = field(default_factory=dict)
    """The status with which a call is refused, by its name."""
    device: int = 0
    handles: int = 1000
    children: list[Communicator] = field(default_factory=list)

    def record(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name in self.refuses:
            raise NCCLError(self.refuses[name])

    def new_handle(self) -> int:
        self.handles += 1
        return self.handles

    def library(self) -> NcclLibrary:
        """Return what ``load_library`` would return for the stand-ins."""
        return NcclLibrary(
            core=make_core(self),
            bindings=Bindings(self),
            runtime=Runtime(self),
            versions=FabricVersions(nccl=23203, cuda_driver=13000),
        )


class Communicator:
    """Of ``nccl.core``."""

    def __init__(self, libraries: Libraries, ptr: int, rank: int, nranks: int) -> None:
        self._libraries, self.ptr, self.rank, self.nranks = libraries, ptr, rank, nranks

    @property
    def is_valid(self) -> bool:
        return bool(self.ptr)

    def split(self, color: int | None = None, key: int = 0, config: NCCLConfig | None = None) -> Communicator:
        self._libraries.record("split", self.ptr, color, key)
        return self._new_child()

    def shrink(
        self,
        exclude_ranks: Any = None,
        config: NCCLConfig | None = None,
        flag: CommShrinkFlag = CommShrinkFlag.DEFAULT,
    ) -> Communicator:
        self._libraries.record("shrink", self.ptr, exclude_ranks, flag)
        return self._new_child()

    def revoke(self, flags: int = 0) -> None:
        self._libraries.record("revoke", self.ptr)

    def abort(self) -> None:
        self._libraries.record("abort", self.ptr)
        self.ptr = 0

    def destroy(self) -> None:
        self._libraries.record("destroy", self.ptr)
        self.ptr = 0

    def get_async_error(self) -> Result:
        return self._libraries.states.pop(0) if self._libraries.states else Result.Success

    def get_last_error(self) -> str:
        return "what NCCL says"

    def _new_child(self) -> Communicator:
        """A child whose handle comes later, as that of a nonblocking communicator."""
        child = Communicator(self._libraries, 0, 1, 2)
        self._libraries.children.append(child)
        return child


def make_core(libraries: Libraries) -> Any:
    """Return the module ``nccl.core``."""

    class InitCommunicator(Communicator):
        @classmethod
        def init(cls, nranks: int, rank: int, unique_id: Any, config: NCCLConfig | None = None) -> Communicator:
            libraries.record("init", nranks, rank, unique_id.as_bytes, config, libraries.device)
            return Communicator(libraries, libraries.new_handle(), rank, nranks)

    return SimpleNamespace(
        __version__="0.6.0",
        Communicator=InitCommunicator,
        NCCLConfig=NCCLConfig,
        NcclDataType=NcclDataType,
        NcclRedOp=NcclRedOp,
        NcclInvalid=NcclInvalid,
        CommShrinkFlag=CommShrinkFlag,
        UniqueId=UniqueId,
        get_unique_id=get_unique_id,
    )


def get_unique_id(empty: bool = False) -> UniqueId:
    return UniqueId()


class Bindings:
    """The module ``nccl.bindings.nccl``."""

    Result = Result
    NCCLError = NCCLError
    Comm = Comm

    def __init__(self, libraries: Libraries) -> None:
        self._libraries = libraries

    def all_reduce(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, comm: Any, stream: int
    ) -> None:
        self._libraries.record("all_reduce", sendbuff, recvbuff, count, datatype, op, comm.handle, stream)

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, comm: Any, stream: int
    ) -> None:
        self._libraries.record("broadcast", sendbuff, recvbuff, count, datatype, root, comm.handle, stream)

    def reduce(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, op: int, root: int, comm: Any, stream: int
    ) -> None:
        self._libraries.record("reduce", sendbuff, recvbuff, count, datatype, op, root, comm.handle, stream)

    def all_gather(self, sendbuff: int, recvbuff: int, sendcount: int, datatype: int, comm: Any, stream: int) -> None:
        self._libraries.record("all_gather", sendbuff, recvbuff, sendcount, datatype, comm.handle, stream)

    def reduce_scatter(
        self, sendbuff: int, recvbuff: int, recvcount: int, datatype: int, op: int, comm: Any, stream: int
    ) -> None:
        self._libraries.record("reduce_scatter", sendbuff, recvbuff, recvcount, datatype, op, comm.handle, stream)

    def send(self, sendbuff: int, count: int, datatype: int, peer: int, comm: Any, stream: int) -> None:
        self._libraries.record("send", sendbuff, count, datatype, peer, comm.handle, stream)

    def recv(self, recvbuff: int, count: int, datatype: int, peer: int, comm: Any, stream: int) -> None:
        self._libraries.record("recv", recvbuff, count, datatype, peer, comm.handle, stream)

    def comm_get_async_error(self, comm: Any) -> int:
        return int(self._libraries.states.pop(0)) if self._libraries.states else 0

    def group_start(self) -> None:
        self._libraries.record("group_start")

    def group_end(self) -> None:
        self._libraries.record("group_end")


class CudaStatus(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorNotReady = 600


class Runtime:
    """The module ``cuda.bindings.runtime``: each call returns its status, and values."""

    cudaStreamNonBlocking, cudaEventDisableTiming, cudaHostAllocPortable = 1, 2, 1
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4)

    def __init__(self, libraries: Libraries, *, devices: int = 2, driver: int = 13000) -> None:
        self._libraries, self._devices, self._driver = libraries, devices, driver
        self.statuses: dict[str, CudaStatus] = {}

    def _answer(self, name: str, *arguments: Any, value: Any = None) -> tuple[Any, ...]:
        self._libraries.calls.append((name, *arguments))
        status = self.statuses.get(name, CudaStatus.cudaSuccess)
        return (status,) if value is None else (status, value)

    def cudaDriverGetVersion(self) -> tuple[Any, ...]:
        return CudaStatus.cudaSuccess, self._driver

    def cudaGetDeviceCount(self) -> tuple[Any, ...]:
        return self.statuses.get("cudaGetDeviceCount", CudaStatus.cudaSuccess), self._devices

    def cudaGetDeviceProperties(self, device: int) -> tuple[Any, ...]:
        uuid = SimpleNamespace(bytes=bytes([device] * 16))
        return CudaStatus.cudaSuccess, SimpleNamespace(uuid=uuid, name=b"Stand-in\0\0", totalGlobalMem=1 << 30)

    def cudaGetDevice(self) -> tuple[Any, ...]:
        return CudaStatus.cudaSuccess, self._libraries.device

    def cudaSetDevice(self, device: int) -> tuple[Any, ...]:
        self._libraries.device = device
        return (CudaStatus.cudaSuccess,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        return self._answer(
            "cudaStreamCreateWithFlags", flags, self._libraries.device, value=self._libraries.new_handle()
        )

    def cudaStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        return self._answer("cudaStreamDestroy", stream)

    def cudaStreamGetDevice(self, hStream: int) -> tuple[Any, ...]:
        return self._answer("cudaStreamGetDevice", hStream, value=1)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[Any, ...]:
        return self._answer(
            "cudaEventCreateWithFlags", flags, self._libraries.device, value=self._libraries.new_handle()
        )

    def cudaEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        return self._answer("cudaEventRecord", event, stream)

    def cudaEventQuery(self, event: int) -> tuple[Any, ...]:
        return self._answer("cudaEventQuery", event)

    def cudaEventDestroy(self, event: int) -> tuple[Any, ...]:
        return self._answer("cudaEventDestroy", event)

    def cudaStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[Any, ...]:
        return self._answer("cudaStreamWaitEvent", stream, event, flags)

    def cudaMalloc(self, size: int) -> tuple[Any, ...]:
        return self._answer("cudaMalloc", size, self._libraries.device, value=self._libraries.new_handle())

    def cudaFree(self, devPtr: int) -> tuple[Any, ...]:
        return self._answer("cudaFree", devPtr, self._libraries.device)

    def cudaHostAlloc(self, size: int, flags: int) -> tuple[Any, ...]:
        return self._answer("cudaHostAlloc", size, flags, value=self._libraries.new_handle())

    def cudaFreeHost(self, ptr: int) -> tuple[Any, ...]:
        return self._answer("cudaFreeHost", ptr)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: Any, stream: int) -> tuple[Any, ...]:
        return self._answer("cudaMemcpyAsync", dst, src, count, kind, stream)

    def cudaGetErrorString(self, error: CudaStatus) -> tuple[Any, ...]:
        return CudaStatus.cudaSuccess, b"what CUDA says"


def given(monkeypatch: pytest.MonkeyPatch, *, core: dict[str, Any] | None = None, **runtime: Any) -> Any:
    """Let ``load_library`` find the stand-ins; ``core`` are other attributes of ``nccl.core``."""
    libraries = Libraries()
    library = libraries.library()
    parts = SimpleNamespace(major=2, minor=32, micro=3)
    for name, value in ({"get_version": lambda: versions(parts)} | (core or {})).items():
        setattr(library.core, name, value)
    cuda = Runtime(libraries, **runtime)
    for name, module in zip(MODULES, (library.core, library.bindings, cuda), strict=True):
        monkeypatch.setitem(sys.modules, name, module)
        for parent in (name.rpartition(".")[0], name.partition(".")[0]):
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent, SimpleNamespace(__path__=[])))
    return cuda


def versions(release: Any) -> Any:
    return SimpleNamespace(libnccl=None if release is None else SimpleNamespace(version=release, path="/x/libnccl.so"))
