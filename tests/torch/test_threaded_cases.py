"""Torch's own harness for ranks that are threads, with our backend in place of its "threaded" one."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.common_distributed import MultiThreadedTestCase
from torch.testing._internal.common_fsdp import FSDPTestMultiThread
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter, DTensorOpTestBase

from asyncpar.torch.registration import NAME


@pytest.fixture(autouse=True)
def hook_of_errors() -> Iterator[None]:
    """Each default group puts one before it."""
    before = sys.excepthook
    yield
    sys.excepthook = before


class OnAsyncpar(MultiThreadedTestCase):
    """The harness names its backend in one place: this."""

    def run_test_with_threaded_pg(self, test_name: str, rank: int, world_size: int) -> None:
        dist.init_process_group(NAME, rank=rank, world_size=world_size, store=self.__class__.global_store)
        self.perThreadSetUp()
        try:
            getattr(self, test_name)()
        except BaseException:  # noqa: BLE001  # the harness raises it in the main thread
            self.exception_queue.put((rank, sys.exc_info()))
        finally:
            dist.destroy_process_group()
            self.perThreadTearDown()


class TestCollectives(OnAsyncpar):
    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_collectives(self) -> None:
        assert dist.get_backend() == NAME
        x = torch.full((3,), float(self.rank))
        dist.all_reduce(x)
        torch.testing.assert_close(x, torch.full((3,), 6.0))
        found = [torch.zeros(2) for _ in range(4)]
        dist.all_gather(found, torch.full((2,), float(self.rank)))
        torch.testing.assert_close(torch.stack(found)[:, 0], torch.arange(4.0))

    def test_autograd_runs_where_the_groups_are(self) -> None:
        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                gradient = gradient.clone()
                dist.all_reduce(gradient)
                return gradient

        x = torch.ones(2, requires_grad=True)
        (Sum.apply(x) * (self.rank + 1)).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((2,), 10.0))


class TestDistributedTensors(OnAsyncpar, DTensorOpTestBase):
    @property
    def world_size(self) -> int:
        return 4

    @property
    def device_type(self) -> str:
        return "cpu"

    def test_operations_on_all_ways_to_shard(self) -> None:
        mesh = self.build_device_mesh()
        x, y = torch.arange(32.0).reshape(8, 4), torch.arange(16.0).reshape(4, 4)
        for operation in (torch.mm, lambda a, b: torch.softmax(a @ b, -1)):
            converter = DTensorConverter(mesh, (x, y), {})
            for arguments, keywords in converter:
                assert converter.successful()
                found = operation(*arguments, **keywords)
                torch.testing.assert_close(found.full_tensor(), operation(x, y))

    def test_sharding_is_changed(self) -> None:
        mesh = self.build_device_mesh()
        whole = torch.arange(64.0).reshape(8, 8)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        torch.testing.assert_close(sharded.redistribute(mesh, [Shard(1)]).to_local(), whole.chunk(4, 1)[self.rank])
        torch.testing.assert_close(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)


class TestFullyShard(OnAsyncpar, FSDPTestMultiThread):
    @property
    def world_size(self) -> int:
        return 2

    def perThreadSetUp(self) -> None:
        pass  # nothing is compiled here

    def perThreadTearDown(self) -> None:
        pass

    def test_parameters_are_sharded_and_gradients_reduced(self) -> None:
        model = nn.Linear(4, 4, bias=False)
        nn.init.ones_(model.weight)
        fully_shard(model)
        y = model(torch.full((1, 4), float(self.rank + 1)))
        torch.testing.assert_close(y, torch.full((1, 4), 4.0 * (self.rank + 1)))
        y.sum().backward()
        assert tuple(model.weight.grad.to_local().shape) == (2, 4)
        torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((4, 4), 1.5))


def test_a_rank_that_fails_ends_the_others() -> None:
    class FailingOnOneRank(OnAsyncpar):
        @property
        def world_size(self) -> int:
            return 3

        def setUp(self) -> None:
            super().setUp()
            self._spawn_threads()

        def runTest(self) -> None:
            if self.rank == 1:
                raise ValueError("on purpose")
            dist.all_reduce(torch.ones(1))

    result = unittest.TestResult()
    FailingOnOneRank("runTest").run(result)
    ((_, text),) = result.errors
    assert "Thread 1 exited with exception" in text
    assert "ValueError: on purpose" in text
    assert text.count("PeerLost") >= 2
    assert text.count("rank 1 on") >= 2
