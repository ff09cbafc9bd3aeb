"""Groups of some ranks: made, used next to each other, destroyed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from asyncpar.errors import PeerCancelled, PeerTimeout, UsageError
from tests.torch.ranks import TIMEOUT, initialize, place
from tests.torch.values import assert_same, draw
from tests.torch.worlds import on_ranks


def total(group: dist.ProcessGroup | None) -> float:
    """Return the sum of the ranks of a group, by the group."""
    x = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(x, group=group)
    return x.item()


@on_ranks(4)
def test_a_group_of_some_ranks_works_for_these_alone() -> None:
    group = dist.new_group([0, 2, 3])
    if dist.get_rank() == 1:
        assert group is dist.GroupMember.NON_GROUP_MEMBER
        return
    assert total(group) == 5
    assert dist.get_process_group_ranks(group) == [0, 2, 3]
    assert dist.get_world_size(group) == 3
    assert dist.get_rank(group) == {0: 0, 2: 1, 3: 2}[dist.get_rank()]
    x = torch.full((3,), float(dist.get_rank()))
    dist.broadcast(x, src=2, group=group)
    assert_same(x, torch.full((3,), 2.0))
    dist.broadcast(x.fill_(dist.get_rank()), group_src=2, group=group)
    assert_same(x, torch.full((3,), 3.0))


@on_ranks(4)
def test_a_group_orders_its_ranks_as_torch_does() -> None:
    group = dist.new_group([3, 1, 0, 2])
    xs = [torch.zeros(()) for _ in range(4)]
    dist.all_gather(xs, torch.tensor(float(dist.get_rank())), group=group)
    assert [int(x) for x in xs] == dist.get_process_group_ranks(group)


@on_ranks(4)
def test_several_groups_work_at_once_and_in_any_order() -> None:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank()
    row, column = rows[mine // 2], columns[mine % 2]
    x, y, z = draw(mine), draw(mine), draw(mine)
    works = [
        dist.all_reduce(x, group=row, async_op=True),
        dist.all_reduce(y, group=column, async_op=True),
        dist.all_reduce(z, async_op=True),
    ]
    for work in works if mine % 2 else reversed(works):
        assert work is not None
        work.wait()
    assert_same(x, draw(mine) + draw(mine ^ 1))
    assert_same(y, draw(mine) + draw(mine ^ 2))
    assert_same(z, sum((draw(rank) for rank in range(1, 4)), draw(0)))


@on_ranks(4)
def test_ranks_may_use_their_groups_in_different_orders() -> None:
    group = dist.new_group()
    mine = dist.get_rank()
    x, y = draw(mine), draw(mine)
    if mine % 2:
        first, second = dist.all_reduce(x, group=group, async_op=True), dist.all_reduce(y, async_op=True)
    else:
        second, first = dist.all_reduce(y, async_op=True), dist.all_reduce(x, group=group, async_op=True)
    first.wait()
    second.wait()
    assert_same(x, y)


@on_ranks(4)
def test_only_its_ranks_need_to_make_a_group_with_local_synchronization() -> None:
    mine = dist.get_rank()
    if mine in (1, 2):
        assert total(dist.new_group([1, 2], use_local_synchronization=True)) == 3


@on_ranks(4)
def test_subgroups_of_one_size_cover_the_world() -> None:
    mine, groups = dist.new_subgroups(2)
    assert len(groups) == 2
    assert total(mine) == {0: 1, 1: 1, 2: 5, 3: 5}[dist.get_rank()]


@on_ranks(4)
def test_subgroups_are_enumerated() -> None:
    mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    assert total(mine) == 3


@on_ranks(4)
def test_a_group_of_one_works() -> None:
    groups = [dist.new_group([rank]) for rank in range(4)]
    assert total(groups[dist.get_rank()]) == dist.get_rank()
    dist.barrier(groups[dist.get_rank()])


@on_ranks(4)
def test_a_destroyed_group_leaves_the_others_alone() -> None:
    for _ in range(3):
        group, other = dist.new_group([0, 1, 2, 3]), dist.new_group([0, 1])
        assert total(group) == 6
        dist.destroy_process_group(group)
        if dist.get_rank() < 2:
            assert total(other) == 1
            dist.destroy_process_group(other)
        assert total(None) == 6


@on_ranks(4)
def test_groups_are_used_from_threads() -> None:
    groups = [dist.new_group() for _ in range(4)]
    results: dict[int, list[float]] = {}

    def work(number: int) -> None:
        results[number] = [total(groups[number]) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [6.0] * 20 for number in range(4)}


@on_ranks(4)
def test_barriers_hold_back_ranks_that_are_early() -> None:
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch: the store under the default group, through which ranks of a test tell each other; torch has no public name for it
    mine = dist.get_rank()
    if mine == 3:
        store.set("arrived", "yes")
    dist.barrier()
    assert store.check(["arrived"])
    work = dist.barrier(async_op=True)
    work.wait()


@on_ranks(4)
def test_groups_take_a_timeout_of_their_own_that_can_be_changed() -> None:
    group = dist.new_group([0, 1], timeout=timedelta(milliseconds=150))
    if dist.get_rank() == 0:
        for milliseconds in (150, 600):
            begun = time.monotonic()
            message = r"^rank 0: all_reduce #\d waited \d+\.\d s for rank 1 .*timeout is over"
            with pytest.raises(PeerTimeout, match=message):
                dist.all_reduce(torch.ones(2), group=group)
            assert time.monotonic() - begun >= milliseconds / 1000
            group.set_timeout(timedelta(milliseconds=600))
    dist.barrier()
    assert total(None) == 6  # the others have theirs
    assert dist.group.WORLD.seconds == TIMEOUT.total_seconds()


@on_ranks(2)
def test_names_and_backends_are_told() -> None:
    group = dist.new_group(group_desc="ours")
    assert dist.get_backend(group) == dist.get_backend()
    assert group.group_desc == "ours"
    assert group.group_name != dist.group.WORLD.group_name
    assert dist.get_group_rank(group, 1) == 1


@on_ranks(2)
def test_groups_of_another_backend_work_next_to_ours() -> None:
    group = dist.new_group(backend="gloo")
    assert total(group) == 1
    assert total(None) == 1
    assert dist.get_backend(group) == "gloo"


@on_ranks(2)
def test_groups_refuse_to_be_split_as_those_of_accelerators_are() -> None:
    with pytest.raises(RuntimeError, match="No device associated with the default pg"):
        dist.split_group(split_ranks=[[0], [1]])
    with pytest.raises(RuntimeError, match="split_group"):
        dist.group.WORLD.split_group([0, 1], group_name="part")


@on_ranks(2, joins=False)
def test_a_backend_is_given_by_device_and_joined_again_and_again() -> None:
    limit = timedelta(seconds=30)
    for number in range(3):
        initialize(backend=f"cpu:{place().backend}", init_method=f"{place().meeting}-{number}", timeout=limit)
        assert dist.group.WORLD.seconds == limit.total_seconds()
        assert total(None) == 1
        assert total(dist.new_group()) == 1
        dist.destroy_process_group()
        assert not dist.is_initialized()


@on_ranks(2)
def test_who_waits_for_a_group_that_was_destroyed_elsewhere_is_told() -> None:
    group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    if dist.get_rank() == 0:
        dist.destroy_process_group(group)
    else:
        calls: list[Callable[[], Any]] = [
            lambda: dist.all_reduce(torch.ones(3), group=group),
            lambda: dist.recv(torch.ones(3), 0, group=group),
        ]
        for call in calls:
            with pytest.raises(PeerCancelled, match="because rank 0 has destroyed its process group"):
                call()
    dist.barrier()


@on_ranks(2)
def test_operations_are_numbered() -> None:
    group: Any = dist.new_group()
    group._set_sequence_number_for_group()  # noqa: SLF001  # torch: the numbers of operations, which its debug checks compare between ranks
    assert group._get_sequence_number_for_group() == 0  # noqa: SLF001  # torch: the numbers of operations, which its debug checks compare between ranks
    for _ in range(3):
        dist.all_reduce(torch.ones(2), group=group)
    dist.send(torch.ones(1), 1, group) if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0, group)
    assert group._get_sequence_number_for_group() == 4  # noqa: SLF001  # torch: the numbers of operations, which its debug checks compare between ranks


@on_ranks(2)
def test_groups_are_for_devices_that_torch_has() -> None:
    has_cuda = torch.backends.cuda.is_built()
    assert dist.Backend.backend_capability["asyncpar"] == (["cpu", "cuda"] if has_cuda else ["cpu"])
    if not has_cuda:
        assert dist.distributed_c10d._get_pg_default_device() == torch.device("cpu")  # noqa: SLF001  # torch: the device that its object collectives choose for a group


CPU = torch.device("cpu")


@on_ranks(2)
def test_options_of_a_group_are_those_of_gloo() -> None:
    limit, later = timedelta(seconds=21), timedelta(seconds=22)
    for ranks in (None, [0, 1]):
        own, gloo = (dist.new_group(ranks, backend=name, timeout=limit) for name in (place().backend, "gloo"))
        found, expected = (group._get_backend(CPU).options for group in (own, gloo))  # noqa: SLF001  # torch: the only way to them
        assert type(expected).__mro__[1] in type(found).__mro__
        assert (found._timeout, expected._timeout) == (limit, limit)  # noqa: SLF001  # torch: the name of the option
        assert (found.backend, expected.backend) == ("asyncpar", "gloo")
        assert (found.group_name, expected.group_name) == (own.group_name, gloo.group_name)
        assert found.global_ranks_in_group == expected.global_ranks_in_group == [0, 1]
        for group in (own, gloo):
            group.set_timeout(later)
        assert (found._timeout, expected._timeout) == (later, later)  # noqa: SLF001  # torch: the name of the option
        found._timeout = timedelta(seconds=1.5)  # noqa: SLF001  # torch: the name of the option
        assert own.options._timeout == timedelta(seconds=1.5)  # noqa: SLF001  # torch: the name of the option
        assert own.communicator.timeout == 1.5
    assert dist.group.WORLD.options._timeout == TIMEOUT  # noqa: SLF001  # torch: the name of the option


@on_ranks(2)
def test_a_timeout_that_cannot_be_is_refused() -> None:
    group: Any = dist.new_group([0, 1], timeout=TIMEOUT)
    for wrong in (5, timedelta(0), timedelta(seconds=-1)):
        with pytest.raises(UsageError, match="timeout: expected a"):
            group.set_timeout(wrong)
        with pytest.raises(UsageError, match="timeout: expected a"):
            group.options._timeout = wrong  # noqa: SLF001  # torch: the name of the option
    assert group.options._timeout == TIMEOUT  # noqa: SLF001  # torch: the name of the option


@on_ranks(2)
def test_options_of_a_group_can_make_another_one() -> None:
    options = dist.group.WORLD.options
    group = dist.new_group([0, 1], timeout=TIMEOUT, pg_options=options)
    assert total(group) == 1
    with pytest.warns(UserWarning, match=r"pg_options: their _timeout, 0:00:40, has no effect.*timeout is 0:00:09"):
        dist.new_group([0, 1], timeout=timedelta(seconds=9), pg_options=options)
    foreign = dist.new_group(backend="gloo")._get_backend(CPU).options  # noqa: SLF001  # torch: the only way to them
    with pytest.raises(UsageError, match="pg_options: expected None or the options of a group of the backend asyncpar"):
        dist.new_group([0, 1], pg_options=foreign)
