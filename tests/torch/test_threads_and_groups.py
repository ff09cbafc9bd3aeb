"""Many groups at once, many threads, many operations: they do not get in each other's way, and leave no memory."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.torch.values import assert_gone
from tests.torch.worlds import on_ranks


def in_threads(works: Sequence[Callable[[], None]]) -> None:
    """Run ``works`` in a thread each; the first error of one is raised."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


@on_ranks(4)
def test_all_subsets_of_ranks_work_at_once_in_any_order() -> None:
    mine = dist.get_rank()
    subsets = [ranks for size in range(1, 5) for ranks in itertools.combinations(range(4), size)]
    groups = {ranks: dist.new_group(list(ranks)) for ranks in subsets}
    theirs = [ranks for ranks in subsets if mine in ranks]
    random.Random(mine).shuffle(theirs)

    def use(ranks: tuple[int, ...]) -> None:
        for count in (1, 300, 20_000) * 3:
            x = torch.full((count,), float(mine + 1))
            dist.all_reduce(x, group=groups[ranks])
            assert (x == sum(ranks) + len(ranks)).all()

    in_threads([lambda ranks=ranks: use(ranks) for ranks in theirs])  # type: ignore[misc]


@on_ranks(2)
def test_operations_take_their_places_at_the_call_whatever_their_sizes() -> None:
    mine = dist.get_rank()
    order = random.Random(5)  # the same on both ranks
    calls = [order.choice([1, 3, 100_000, 500_000]) for _ in range(60)]
    works, xs = [], [torch.full((count,), float(mine + number)) for number, count in enumerate(calls)]
    for number, x in enumerate(xs):
        if (number + mine) % 3:
            works.append(dist.all_reduce(x, async_op=True))
        else:  # in this place only one of the ranks waits at once
            dist.all_reduce(x)
    for work in works:
        work.wait()
    for number, x in enumerate(xs):
        assert (x == 2 * number + 1).all(), number


@on_ranks(2)
def test_a_hundred_groups_have_operations_under_way_at_once() -> None:
    groups = [dist.new_group() for _ in range(100)]
    xs = [torch.full((100 + number,), float(number)) for number in range(100)]
    order = list(range(100))
    random.Random(dist.get_rank()).shuffle(order)
    works = {number: dist.all_reduce(xs[number], group=groups[number], async_op=True) for number in order}
    for number in reversed(range(100)):
        works[number].wait()
        assert (xs[number] == 2 * number).all()


@on_ranks(2)
def test_backward_passes_in_threads_reduce_their_gradients() -> None:
    groups = [dist.new_group() for _ in range(4)]

    def train(number: int) -> None:
        weight = torch.nn.Parameter(torch.ones(1000))

        def reduce(parameter: Any) -> None:
            dist.all_reduce(parameter.grad, group=groups[number])

        weight.register_post_accumulate_grad_hook(reduce)
        for _ in range(5):
            weight.grad = None
            (weight * (number + 1)).sum().backward()
            assert weight.grad is not None
            assert (weight.grad == 2 * (number + 1)).all()

    in_threads([lambda number=number: train(number) for number in range(4)])  # type: ignore[misc]


@on_ranks(2)
def test_threads_of_one_group_each_get_their_own_messages() -> None:
    other = 1 - dist.get_rank()

    def exchange(tag: int) -> None:
        for number in range(20):
            got = torch.empty(tag + 1)
            work = dist.isend(torch.full((tag + 1,), float(number)), other, tag=tag)
            dist.recv(got, other, tag=tag)
            work.wait()
            assert (got == number).all()

    in_threads([lambda tag=tag: exchange(tag) for tag in range(6)])  # type: ignore[misc]


@on_ranks(2)
def test_callbacks_of_many_futures_start_operations_of_their_own() -> None:
    groups = [dist.new_group() for _ in range(8)]

    def again(future: Any, group: Any) -> float:
        [x] = future.value()
        dist.all_reduce(x, group=group)
        return float(x[0])

    works = [dist.all_reduce(torch.ones(10_000), group=group, async_op=True) for group in groups]
    futures = [
        work.get_future().then(lambda future, group=group: again(future, group))
        for work, group in zip(works, groups, strict=True)
    ]
    assert [future.wait() for future in futures] == [4.0] * 8


def _reduce_often(count: int, elements: int) -> None:
    x = torch.zeros(elements)
    for number in range(count):
        if number % 3:
            dist.all_reduce(x)
        elif number % 2:
            dist.all_reduce(x, async_op=True).wait()
        else:
            dist.all_reduce(x, async_op=True).get_future().then(lambda future: future.value()).wait()


@on_ranks(2, limit=60)
@pytest.mark.parametrize("elements", [4, 20_000])
def test_operations_leave_no_memory_and_need_no_collector(elements: int) -> None:
    me = psutil.Process()
    _reduce_often(1000, elements)
    gc.collect()
    gc.disable()
    try:
        before, objects = me.memory_info().rss, len(gc.get_objects())
        _reduce_often(3000, elements)
        grown, more = me.memory_info().rss - before, len(gc.get_objects()) - objects
    finally:
        gc.enable()
    assert grown < 4 << 20, f"{grown} bytes for 3000 operations"
    assert more < 1000, f"{more} objects for 3000 operations"


@on_ranks(2)
def test_works_futures_and_tensors_die_when_nobody_holds_them() -> None:
    gc.collect()
    gc.disable()
    try:
        x = torch.ones(20_000)
        work = dist.all_reduce(x, async_op=True)
        future = work.get_future().then(lambda future: future.value()[0].sum())
        assert future.wait() == 40_000
        dist.barrier()
        gone = weakref.ref(x)
        del x, future, work
        dist.barrier()
        assert_gone(gone)
    finally:
        gc.enable()


@on_ranks(2)
def test_errors_hold_neither_works_nor_tensors() -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(30):  # the error may come in the thread that waits, or in the loop's
            x = torch.ones(3 + dist.get_rank())
            gone = weakref.ref(x)
            with pytest.raises(ValueError, match="rank 1 calls"):
                dist.all_reduce(x)
            del x
            dist.barrier()
            assert_gone(gone)
    finally:
        gc.enable()
