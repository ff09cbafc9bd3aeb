"""The fabric over nccl4py calls it as it wants to be called, and its refusals become our errors."""

from __future__ import annotations

import ctypes

import pytest

from asyncpar.device.fabric import DeviceError, NcclDtype, NcclOp, NcclResult
from asyncpar.device.nccl import NcclCommunicator, NcclFabric
from tests.device.nccl_stand_in import (
    CommShrinkFlag,
    CudaStatus,
    Libraries,
    NCCLConfig,
    NcclDataType,
    NcclRedOp,
    Result,
)

SIZE, RANK, DEVICE, STREAM = 4, 2, 1, 77
SEND, RECV, COUNT = 0x1000, 0x2000, 10


def opened() -> tuple[Libraries, NcclFabric, NcclCommunicator]:
    libraries = Libraries()
    fabric = NcclFabric(libraries.library())
    communicator = fabric.init_rank(SIZE, fabric.get_unique_id(), RANK, DEVICE)
    return libraries, fabric, communicator


def test_communicators_are_made_nonblocking_on_their_device_and_the_threads_device_is_put_back() -> None:
    libraries, fabric, communicator = opened()
    assert libraries.calls == [("init", SIZE, RANK, fabric.get_unique_id(), NCCLConfig(blocking=False), DEVICE)]
    assert libraries.device == 0
    assert (communicator.rank, communicator.size, communicator.device) == (RANK, SIZE, DEVICE)


@pytest.mark.parametrize("dtype", NcclDtype)
@pytest.mark.parametrize("op", NcclOp)
def test_every_dtype_and_reduction_has_its_number(dtype: NcclDtype, op: NcclOp) -> None:
    libraries, _, communicator = opened()
    assert communicator.all_reduce(SEND, RECV, COUNT, dtype, op, STREAM) is NcclResult.SUCCESS
    number, reduction = NcclDataType[dtype.name], NcclRedOp[op.name]
    assert libraries.calls[-1] == ("all_reduce", SEND, RECV, COUNT, number, reduction, 1001, STREAM)


def test_every_operation_goes_to_the_binding_of_its_name() -> None:
    libraries, _, communicator = opened()
    f32, total = NcclDtype.FLOAT32, NcclOp.SUM
    communicator.broadcast(SEND, RECV, COUNT, f32, 3, STREAM)
    communicator.reduce(SEND, RECV, COUNT, f32, total, 3, STREAM)
    communicator.all_gather(SEND, RECV, COUNT, f32, STREAM)
    communicator.reduce_scatter(SEND, RECV, COUNT, f32, total, STREAM)
    communicator.send(SEND, COUNT, f32, 3, STREAM)
    communicator.recv(RECV, COUNT, f32, 3, STREAM)
    assert libraries.calls[1:] == [
        ("broadcast", SEND, RECV, COUNT, 7, 3, 1001, STREAM),
        ("reduce", SEND, RECV, COUNT, 7, 0, 3, 1001, STREAM),
        ("all_gather", SEND, RECV, COUNT, 7, 1001, STREAM),
        ("reduce_scatter", SEND, RECV, COUNT, 7, 0, 1001, STREAM),
        ("send", SEND, COUNT, 7, 3, 1001, STREAM),
        ("recv", RECV, COUNT, 7, 3, 1001, STREAM),
    ]


@pytest.mark.parametrize("state", [one for one in Result if one is not Result.NumResults])
def test_the_state_of_a_communicator_is_reported_after_a_call_and_when_asked(state: Result) -> None:
    libraries, _, communicator = opened()
    libraries.states = [state, state]
    result = communicator.all_reduce(SEND, RECV, COUNT, NcclDtype.INT8, NcclOp.MAX, STREAM)
    assert result.value == f"nccl{state.name}"
    assert communicator.get_async_error() is result


@pytest.mark.parametrize("call", ["all_reduce", "split", "shrink", "revoke", "group_end"])
def test_a_refusal_names_the_call_and_keeps_the_result(call: str) -> None:
    libraries, fabric, communicator = opened()
    libraries.refuses = {call: Result.InvalidUsage}
    calls = {
        "all_reduce": lambda: communicator.all_reduce(SEND, RECV, COUNT, NcclDtype.INT8, NcclOp.MAX, STREAM),
        "split": lambda: communicator.split(0, 0),
        "shrink": lambda: communicator.shrink([1], abort=True),
        "revoke": communicator.revoke,
        "group_end": fabric.group_end,
    }
    with pytest.raises(DeviceError, match=f"nccl: {call}: InvalidUsage") as caught:
        calls[call]()
    assert caught.value.result is NcclResult.INVALID_USAGE


@pytest.mark.parametrize("way", ["split", "shrink"])
def test_a_child_is_in_progress_until_its_parents_call_is_complete(way: str) -> None:
    libraries, _, parent = opened()
    child = parent.split(0, 5) if way == "split" else parent.shrink([3], abort=True)
    assert child is not None
    libraries.states = [Result.InProgress]
    assert child.get_async_error() is NcclResult.IN_PROGRESS
    with pytest.raises(DeviceError, match="this communicator is not complete"):
        child.send(SEND, 1, NcclDtype.INT8, 0, STREAM)
    libraries.children[0].ptr = 55
    assert child.get_async_error() is NcclResult.SUCCESS
    child.send(SEND, 1, NcclDtype.INT8, 0, STREAM)
    assert libraries.calls[-1] == ("send", SEND, 1, 0, 0, 55, STREAM)
    assert (child.rank, child.size, child.device) == (1, 2, DEVICE)


def test_an_error_of_the_parent_is_that_of_a_child_that_does_not_come() -> None:
    libraries, _, parent = opened()
    child = parent.shrink([3], abort=False)
    assert libraries.calls[-1] == ("shrink", 1001, [3], CommShrinkFlag.DEFAULT)
    libraries.states = [Result.RemoteError]
    assert child.get_async_error() is NcclResult.REMOTE_ERROR
    assert child.get_async_error() is NcclResult.INTERNAL_ERROR  # complete, without a child


def test_ranks_without_a_color_get_no_child() -> None:
    libraries, _, parent = opened()
    assert parent.split(None, 0) is None
    assert libraries.calls[-1] == ("split", 1001, None, 0)


@pytest.mark.parametrize("end", ["abort", "destroy"])
def test_what_has_ended_refuses_every_call_and_may_end_again(end: str) -> None:
    libraries, _, communicator = opened()
    communicator.all_reduce(SEND, RECV, COUNT, NcclDtype.INT8, NcclOp.MAX, STREAM)
    getattr(communicator, end)()
    getattr(communicator, end)()
    assert next(call for call in libraries.calls if call[0] == end) == (end, 1001)
    with pytest.raises(DeviceError, match="was aborted or destroyed"):
        communicator.all_reduce(SEND, RECV, COUNT, NcclDtype.INT8, NcclOp.MAX, STREAM)
    with pytest.raises(DeviceError, match="was aborted or destroyed"):
        communicator.split(0, 0)
    assert communicator.get_async_error() is NcclResult.INVALID_USAGE
    assert communicator.get_last_error() == ""


def test_streams_and_events_are_made_on_their_device() -> None:
    libraries, fabric, _ = opened()
    del libraries.calls[:]
    stream, event = fabric.create_stream(1), fabric.create_event(1)
    fabric.record_event(event, stream)
    fabric.wait_event(STREAM, event)
    assert fabric.query_event(event)
    fabric.destroy_event(event)
    fabric.destroy_stream(stream)
    assert libraries.calls == [
        ("cudaStreamCreateWithFlags", 1, 1),
        ("cudaEventCreateWithFlags", 2, 1),
        ("cudaEventRecord", event, stream),
        ("cudaStreamWaitEvent", STREAM, event, 0),
        ("cudaEventQuery", event),
        ("cudaEventDestroy", event),
        ("cudaStreamDestroy", stream),
    ]
    assert libraries.device == 0


@pytest.mark.parametrize(("stream", "device"), [(0, None), (1, None), (2, None), (99, 1)])
def test_default_streams_belong_to_no_device(stream: int, device: int | None) -> None:
    assert opened()[1].stream_device(stream) == device


def test_an_event_that_has_not_come_is_no_error_and_a_failed_one_is() -> None:
    library = Libraries().library()
    fabric = NcclFabric(library)
    library.runtime.statuses = {"cudaEventQuery": CudaStatus.cudaErrorNotReady}
    assert not fabric.query_event(5)
    library.runtime.statuses = {"cudaEventQuery": CudaStatus.cudaErrorMemoryAllocation}
    with pytest.raises(DeviceError, match="cudaEventQuery: cudaErrorMemoryAllocation: what CUDA says"):
        fabric.query_event(5)


def test_memory_is_made_copied_and_freed() -> None:
    libraries, fabric, _ = opened()
    del libraries.calls[:]
    address, pinned = fabric.allocate(100, 1), fabric.allocate_pinned(50)
    fabric.copy(pinned, address, 50, STREAM)
    fabric.free(address, 1)
    fabric.free_pinned(pinned)
    assert libraries.calls == [
        ("cudaMalloc", 100, 1),
        ("cudaHostAlloc", 50, 1),
        ("cudaMemcpyAsync", pinned, address, 50, 4, STREAM),
        ("cudaFree", address, 1),
        ("cudaFreeHost", pinned),
    ]


def test_what_cuda_refuses_is_reported_in_its_words() -> None:
    library = Libraries().library()
    library.runtime.statuses = {"cudaMalloc": CudaStatus.cudaErrorMemoryAllocation}
    with pytest.raises(DeviceError, match="cuda: cudaMalloc: cudaErrorMemoryAllocation: what CUDA says"):
        NcclFabric(library).allocate(1 << 50, 0)


def test_pinned_memory_is_seen_as_bytes_that_can_be_written() -> None:
    memory = ctypes.create_string_buffer(b"abcdef", 6)
    view = opened()[1].pinned_view(ctypes.addressof(memory), 6)
    view[1:3] = b"XY"
    assert memory.raw == b"aXYdef"


def test_devices_are_described() -> None:
    first, second = opened()[1].devices()
    assert (first.index, first.name, first.total_bytes) == (0, "Stand-in", 1 << 30)
    assert second.uuid == "01" * 16


@pytest.mark.parametrize(
    ("value", "version", "allowed"), [("1", 23203, True), ("0", 23203, False), ("1", 22907, False)]
)
def test_ranks_share_a_device_where_the_version_and_the_variable_allow_it(
    monkeypatch: pytest.MonkeyPatch, value: str, version: int, allowed: bool
) -> None:
    from asyncpar.device.fabric import FabricVersions
    from asyncpar.device.nccl_library import allows_shared_devices

    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", value)
    assert allows_shared_devices(FabricVersions(nccl=version, cuda_driver=13000)) is allowed
