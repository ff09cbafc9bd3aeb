"""Operations that are waited for by their tensors, eagerly and in compiled functions.

Ranks serve one test after the other: works that others have left registered on them do not count here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _get_work_registry_size as entered
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

from asyncpar.errors import PeerTimeout
from tests.torch.worlds import on_ranks

LARGE = 1 << 20
wait_tensor = torch.ops._c10d_functional.wait_tensor  # noqa: SLF001  # torch: the operator by which compiled code waits for a functional collective


def begun() -> dict[str, tuple[torch.Tensor, dist.Work | None, float]]:
    """Begin one of each kind of operation; return what holds its result, its work, and the value it must have."""
    mine, size = dist.get_rank(), dist.get_world_size()
    shape = (LARGE,)
    x, y, z = (torch.full(shape, mine + 1.0) for _ in range(3))
    wide, narrow, swapped = torch.zeros(2 * LARGE), torch.zeros(shape), torch.zeros(2 * LARGE)
    rows, scattered = [torch.zeros(shape) for _ in range(size)], torch.zeros(shape)
    operations: dict[str, tuple[torch.Tensor, Callable[[], dist.Work | None], float]] = {
        "all_reduce": (x, lambda: dist.all_reduce(x, async_op=True), 3.0),
        "broadcast": (y, lambda: dist.broadcast(y, 1, async_op=True), 2.0),
        "all_gather": (rows[1], lambda: dist.all_gather(rows, z, async_op=True), 2.0),
        "all_gather_single": (wide[LARGE:], lambda: dist.all_gather_single(wide, z, async_op=True), 2.0),
        "reduce_scatter": (narrow, lambda: dist.reduce_scatter(narrow, [z, z], async_op=True), 3.0),
        "all_to_all_single": (
            swapped[LARGE:],
            lambda: dist.all_to_all_single(swapped, torch.cat([z, z]), async_op=True),
            2.0,
        ),
        "scatter": (
            scattered,
            lambda: dist.scatter(scattered, [z, z + 1] if mine == 0 else None, async_op=True),
            mine + 1.0,
        ),
    }
    return {name: (result, start(), value) for name, (result, start, value) in operations.items()}


@on_ranks(2)
def test_wait_tensor_waits_for_operations_of_all_kinds() -> None:
    before = entered()
    for _ in range(5):
        with allow_inflight_collective_as_graph_input_ctx():
            for name, (result, _, value) in begun().items():
                wait_tensor(result)
                assert torch.equal(result, torch.full_like(result, value)), name
    assert entered() == before


@on_ranks(2)
def test_wait_tensor_waits_for_messages() -> None:
    before = entered()
    mine = dist.get_rank()
    with allow_inflight_collective_as_graph_input_ctx():
        for n in range(20):
            x = torch.full((LARGE,), float(n)) if mine == 0 else torch.zeros(LARGE)
            dist.isend(x, 1) if mine == 0 else dist.irecv(x, 0)
            wait_tensor(x)
            assert x[-1].item() == n
    assert entered() == before


@on_ranks(2)
def test_a_compiled_function_waits_for_what_was_begun_before_it() -> None:
    def finish(x: torch.Tensor) -> torch.Tensor:
        return wait_tensor(x) * 1.0

    compiled = torch.compile(finish, fullgraph=True, backend="aot_eager")
    for _ in range(20):
        x = torch.ones(LARGE)
        with allow_inflight_collective_as_graph_input_ctx():
            dist.all_reduce(x, async_op=True)
            y = compiled(x)
        assert torch.equal(y, torch.full((LARGE,), 2.0))


@on_ranks(2)
def test_a_work_that_was_waited_for_is_out_and_the_others_stay_in() -> None:
    before = entered()
    whole = torch.ones(2 * LARGE)
    with allow_inflight_collective_as_graph_input_ctx():
        first = dist.all_reduce(whole[:LARGE], async_op=True)
        second = dist.all_reduce(whole[LARGE:], async_op=True)
        assert entered() == before + 2
        assert first is not None
        first.wait()
        assert entered() == before + 1
        wait_tensor(whole[LARGE:])
        assert torch.equal(whole, torch.full((2 * LARGE,), 2.0))
        assert entered() == before
        assert second is not None
        second.wait()
        for _, work, _ in begun().values():
            assert work is not None
            work.wait()
        dist.all_reduce(whole)
        dist.barrier()
    assert entered() == before


@on_ranks(2)
def test_wait_tensor_raises_what_the_operation_raised() -> None:
    before = entered()
    group = dist.new_group()
    if dist.get_rank() == 0:
        group.set_timeout(timedelta(seconds=0.2))
        with allow_inflight_collective_as_graph_input_ctx():
            x = torch.ones(2)
            dist.irecv(x, 1, group=group)
            with pytest.raises(PeerTimeout):
                wait_tensor(x)
        assert entered() == before
    dist.barrier()  # the other is not to end its group before
