"""Tests of ``scripts/test-gpu`` above the fabric, run here without a GPU: CPU tensors pass for tensors on devices.

So its programs are known to be right before they meet hardware; see ``pretended.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from asyncpar.collectives.device import calibration
from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.device.arrays import DeviceArray
from asyncpar.node import Node
from tests.backends.extras import need
from tests.device.device_worlds import device_world
from tests.device.fake_fabric import FakeFabric
from tests.device.pretended import EagerCluster, let_tensors_pass


@pytest.fixture(name="gpu")
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let CPU tensors pass for tensors on CUDA device 0, and the suite find them there."""
    need("torch", 'pip install "asyncpar[torch]"')
    import torch

    from asyncpar.device.codecs import libraries, torch_kernels
    from tests.device import over_nccl_groups, over_nccl_training, torch_worlds

    cluster = EagerCluster()

    class Library(torch_kernels.TorchLibrary):
        def view(self, array: DeviceArray) -> Any:
            if isinstance(array.owner, torch.Tensor):
                return super().view(array)
            return torch.from_numpy(cluster.memory(array.pointer, array.nbytes)).view(getattr(torch, array.dtype.name))

        def launch(self, work: Callable[[], None], *, device: int, stream: int) -> None:
            cluster.run(work, stream)

    @asynccontextmanager
    async def nccl_world(
        size: int, *, devices: int, hosts: Sequence[str] | None = None, pin: str | None = None
    ) -> AsyncIterator[tuple[Node, ...]]:
        assert devices <= size
        places = hosts or ["localhost"] * size
        fabrics = [FakeFabric(cluster, visible=[0], host=host, allows_shared_devices=True) for host in places]
        async with device_world(size, cluster=cluster, fabrics=fabrics, hosts=hosts, pin=pin) as nodes:
            yield nodes

    let_tensors_pass(monkeypatch)
    library = Library()
    monkeypatch.setattr(libraries, "_library", lambda name: library if name in ("torch", "asyncpar") else None)
    monkeypatch.setattr(torch_worlds, "nccl_world", nccl_world)
    for suite in (over_nccl_training, over_nccl_groups):
        monkeypatch.setattr(suite, "nccl_world", nccl_world)
        monkeypatch.setattr(suite, "device_of", lambda _: torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return SimpleNamespace(**vars(over_nccl_training), groups=over_nccl_groups)


@pytest.mark.parametrize("codec", ["bf16", "int8", "topk:0.05+int8", "powersgd:2"])
async def test_encoded_gradients(gpu: Any, codec: str) -> None:
    await gpu.test_encoded_gradients_are_those_of_the_host(codec)


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("delay", [True, False])
async def test_replicas_of_modules(gpu: Any, codec: str | None, delay: bool) -> None:
    await gpu.test_replicas_of_modules_stay_equal_and_learn(codec, delay)


@pytest.mark.parametrize("kind", list(PipelineScheduleType))
async def test_pipelines_of_modules(gpu: Any, kind: PipelineScheduleType) -> None:
    await gpu.test_pipelines_of_modules_compute_what_one_module_does(kind)


async def test_the_backend(gpu: Any) -> None:
    await gpu.test_the_backend_opens_and_reduces()


async def test_parts_of_a_split(gpu: Any) -> None:
    await gpu.groups.test_parts_of_a_split_reduce_on_their_own()


@pytest.mark.parametrize("pin", [None, "all_reduce@hierarchical;broadcast@hierarchical"])
async def test_two_hosts(gpu: Any, pin: str | None) -> None:
    await gpu.groups.test_ranks_of_two_hosts_reduce_by_a_route_that_they_tried_or_by_host(pin)


@pytest.mark.parametrize("elements", [10, 100_000])
async def test_messages(gpu: Any, elements: int) -> None:
    await gpu.groups.test_messages_go_around_in_both_directions(elements)


async def test_lanes_and_cancelled_copies(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_LARGE_BYTES", 1 << 16)
    await gpu.groups.test_lanes_are_measured_and_choose_and_cancelled_copies_leave_arrays_alone()
