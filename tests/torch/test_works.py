"""Works and futures of started operations, with callbacks."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from tests.torch.values import assert_same, draw, everyone, reduced
from tests.torch.worlds import on_ranks


@on_ranks(2)
def test_a_work_tells_when_it_is_done() -> None:
    x = draw(dist.get_rank())
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    assert work.wait()
    assert work.is_completed()
    assert work.exception() is None
    assert_same(x, reduced("SUM", everyone()))


@on_ranks(2)
def test_every_collective_can_be_waited_for_later() -> None:
    mine = dist.get_rank()
    x, y, xs, parts = draw(mine), draw(mine), [torch.empty(5, 3)] * 2, [draw(mine), draw(mine)]
    wide, narrow, swapped = torch.empty(10, 3), torch.empty(5, 3), torch.empty(4)
    gathered = [torch.empty(5, 3), torch.empty(5, 3)]
    works = [
        dist.all_reduce(x, async_op=True),
        dist.broadcast(y, 0, async_op=True),
        dist.all_gather(gathered, draw(mine), async_op=True),
        dist.all_gather_single(wide, draw(mine), async_op=True),
        dist.reduce_scatter(narrow, parts, async_op=True),
        dist.all_to_all_single(swapped, draw(mine, shape=(4,)), async_op=True),
        dist.gather(draw(mine), [torch.empty(5, 3) for _ in xs] if mine == 0 else None, async_op=True),
        dist.scatter(torch.empty(5, 3), parts if mine == 1 else None, src=1, async_op=True),
        dist.reduce(draw(mine), 0, async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in works:
        assert work is not None
        work.wait()
        assert work.is_success()
    assert_same(x, reduced("SUM", everyone()))
    assert_same(y, draw(0))
    assert_same(wide, torch.cat(gathered))
    assert_same(narrow, reduced("SUM", everyone()))


@on_ranks(2)
def test_many_operations_are_under_way_at_once() -> None:
    xs = [torch.full((n,), float(n)) for n in range(200)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    for work in reversed(works):
        work.wait()
    for n, x in enumerate(xs):
        assert_same(x, torch.full((n,), 2.0 * n))


@on_ranks(2)
def test_a_future_has_the_tensors() -> None:
    x = draw(dist.get_rank())
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    [value] = work.get_future().wait()
    assert_same(value, reduced("SUM", everyone()))
    assert value.data_ptr() == x.data_ptr()


@on_ranks(2)
def test_callbacks_may_start_operations() -> None:
    x = torch.ones(4)
    done = threading.Event()

    def again(future: torch.futures.Future) -> torch.Tensor:
        [value] = future.value()
        inner = dist.all_reduce(value, async_op=True)
        inner.wait()
        return value

    def last(future: torch.futures.Future) -> float:
        done.set()
        return future.value().sum().item()

    work = dist.all_reduce(x, async_op=True)
    chained = work.get_future().then(again).then(last)
    assert chained.wait() == 16
    assert done.is_set()


@on_ranks(2)
def test_callbacks_that_raise_end_their_own_future() -> None:
    def fail(future: torch.futures.Future) -> None:
        raise ValueError("a callback had enough")

    work = dist.all_reduce(torch.ones(2), async_op=True)
    future = work.get_future().then(fail)
    with pytest.raises((RuntimeError, ValueError), match="a callback had enough"):
        future.wait()
    dist.all_reduce(torch.ones(2))


@on_ranks(2)
def test_works_are_waited_for_in_other_threads() -> None:
    xs = [torch.full((1000,), float(n)) for n in range(8)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    threads = [threading.Thread(target=work.wait) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, x in enumerate(xs):
        assert_same(x, torch.full((1000,), 2.0 * n))


@on_ranks(2)
def test_works_need_not_be_kept() -> None:
    xs = [torch.ones(1000) for _ in range(50)]
    for x in xs:
        dist.all_reduce(x, async_op=True)
    dist.barrier()
    for _ in range(3):
        dist.all_reduce(xs[0], async_op=True).wait()
    assert_same(xs[0], torch.full((1000,), 16.0))


@on_ranks(2)
def test_coalesced_operations_end_together() -> None:
    mine = dist.get_rank()
    xs = [draw(mine, shape=(n,)) for n in (1, 1000, 3)]
    with dist._coalescing_manager(async_ops=True) as manager:  # noqa: SLF001  # torch: how its own batch_isend_irecv coalesces; there is no public name
        for x in xs:
            dist.all_reduce(x)
    manager.wait()
    for x in xs:
        assert_same(x, reduced("SUM", everyone(shape=x.shape)))
    with dist._coalescing_manager():  # noqa: SLF001  # torch: how its own batch_isend_irecv coalesces; there is no public name
        for x in xs:
            dist.all_reduce(x)
    assert_same(xs[0], 2 * reduced("SUM", everyone(shape=(1,))))


@on_ranks(2)
def test_coalesced_gathers_and_scatters_end_together() -> None:
    mine = dist.get_rank()
    outputs = [torch.empty(2 * n) for n in (1, 4)]
    with dist._coalescing_manager():  # noqa: SLF001  # torch: how its own batch_isend_irecv coalesces; there is no public name
        for n, output in zip((1, 4), outputs, strict=True):
            dist.all_gather_single(output, draw(mine, shape=(n,)))
    for n, output in zip((1, 4), outputs, strict=True):
        assert_same(output, torch.cat(everyone(shape=(n,))))
    parts = [torch.empty(n) for n in (1, 4)]
    with dist._coalescing_manager():  # noqa: SLF001  # torch: how its own batch_isend_irecv coalesces; there is no public name
        for part, output in zip(parts, outputs, strict=True):
            dist.reduce_scatter_single(part, output)
    for n, part in zip((1, 4), parts, strict=True):
        assert_same(part, 2 * draw(mine, shape=(n,)))
