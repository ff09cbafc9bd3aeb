"""A fabric whose devices have nothing to do: what an operation takes on it is asyncpar's own share."""

from __future__ import annotations

from typing import Any

from asyncpar.device.fabric import NcclResult
from asyncpar.testing.fake_devices import FakeCluster
from asyncpar.testing.fake_fabric import FakeFabric


class IdleCommunicator:
    """Takes every operation, does none of them, and is ready for the next."""

    def __init__(self, *, rank: int, size: int, device: int) -> None:
        self.rank, self.size, self.device = rank, size, device

    def all_reduce(self, *_: Any) -> NcclResult:
        return NcclResult.SUCCESS

    def get_async_error(self) -> NcclResult:
        return NcclResult.SUCCESS

    def get_last_error(self) -> str:
        return ""

    def abort(self) -> None:
        pass

    def destroy(self) -> None:
        pass


class IdleFabric(FakeFabric):
    """One device of one rank; events have come as soon as they are recorded."""

    def __init__(self, rank: int) -> None:
        super().__init__(FakeCluster(), visible=[rank])

    def init_rank(self, size: int, unique_id: bytes, rank: int, device: int) -> Any:  # noqa: ARG002
        return IdleCommunicator(rank=rank, size=size, device=device)

    def record_event(self, event: int, stream: int) -> None:
        pass

    def wait_event(self, stream: int, event: int) -> None:
        pass

    def query_event(self, event: int) -> bool:  # noqa: ARG002
        return True
