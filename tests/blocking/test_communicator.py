"""Blocking communicators: the same operations, and what only blocking code needs."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from asyncpar.blocking import Cancelled, Communicator, Node, Pending
from asyncpar.blocking.communicator import Starting
from asyncpar.collectives import communicator
from asyncpar.errors import OperationMismatch, PeerCancelled, PeerTimeout, UsageError, WorldRevoked
from asyncpar.testing.blocking_world import blocking_world, run_ranks

NOT_STARTED = {"split", "shrink"}
"""They return a communicator, which a ``Pending`` of it would have to turn into a blocking one."""


@pytest.fixture(scope="module", params=["inproc", None])
def nodes(request: pytest.FixtureRequest) -> Iterator[tuple[Node, ...]]:
    """Three ranks: with messages, and in shared memory."""
    with blocking_world(3, transport=request.param) as nodes:
        yield nodes


def operations() -> list[str]:
    """Return the names of what a communicator of coroutines awaits."""
    return [
        name
        for name, method in inspect.getmembers(communicator.Communicator, inspect.isfunction)
        if not name.startswith("_") and "Coroutine" in str(inspect.signature(method).return_annotation)
    ]


def test_all_that_the_communicator_of_coroutines_offers_is_here() -> None:
    public = {name for name in dir(communicator.Communicator) if not name.startswith("_")} - {"world"}
    assert public <= set(dir(Communicator))
    assert len(operations()) == 25


@pytest.mark.parametrize("name", operations())
def test_operations_take_the_same_arguments_and_a_timeout(name: str) -> None:
    theirs = inspect.signature(getattr(communicator.Communicator, name)).parameters
    ours = dict(inspect.signature(getattr(Communicator, name)).parameters)
    assert ours.pop("timeout").default is None
    assert list(ours.values()) == list(theirs.values())
    if name not in NOT_STARTED:
        assert list(inspect.signature(getattr(Starting, name)).parameters.values()) == list(theirs.values())


def on_all(nodes: tuple[Node, ...], work: Callable[[Communicator], Any]) -> list[Any]:
    return run_ranks(nodes, lambda node: work(node.world))


def test_it_works_with_grpc_in_the_same_loop() -> None:
    def work(comm: Communicator) -> float:
        return sum(float(comm.all_reduce(np.full(1000, float(step)), timeout=20)[0]) for step in range(10))

    with blocking_world(2, transport="grpc") as nodes:
        assert on_all(nodes, work) == [90.0, 90.0]


def row(comm: Communicator) -> np.ndarray[Any, Any]:
    return np.arange(6.0).reshape(3, 2) + 10 * comm.rank


def test_operations_on_arrays_return_their_results(nodes: tuple[Node, ...]) -> None:
    def work(comm: Communicator) -> None:
        every = np.stack([np.arange(6.0).reshape(3, 2) + 10 * rank for rank in range(3)])
        total = every.sum(0)
        np.testing.assert_array_equal(comm.all_reduce(row(comm)), total)
        np.testing.assert_array_equal(comm.all_reduce_many([row(comm), row(comm)])[1], total)
        np.testing.assert_array_equal(comm.reduce_scatter(row(comm)), total[comm.rank : comm.rank + 1])
        np.testing.assert_array_equal(comm.all_gather(row(comm)), every)
        np.testing.assert_array_equal(comm.all_gather_v(row(comm)), every.reshape(9, 2))
        np.testing.assert_array_equal(comm.all_to_all(row(comm)), every[:, comm.rank])
        rows, counts = comm.all_to_all_v(row(comm), [1, 1, 1])
        np.testing.assert_array_equal(rows, every[:, comm.rank])
        assert counts == [1, 1, 1]
        np.testing.assert_array_equal(comm.broadcast(row(comm), root=1), every[1])
        reduced, gathered = comm.reduce(row(comm), "max", root=2), comm.gather(row(comm), root=2)
        assert (reduced is None) == (gathered is None) == (comm.rank != 2)
        if reduced is not None and gathered is not None:
            np.testing.assert_array_equal(reduced, every[2])
            np.testing.assert_array_equal(gathered, every)
        source = every if comm.rank == 0 else None
        np.testing.assert_array_equal(comm.scatter(source, out=np.empty((3, 2))), every[comm.rank])
        comm.barrier()

    on_all(nodes, work)


def test_messages_and_objects_arrive(nodes: tuple[Node, ...]) -> None:
    def work(comm: Communicator) -> tuple[Any, ...]:
        right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        comm.send(np.array([comm.rank]), right)
        comm.send_object({"from": comm.rank}, right, tag=1)
        comm.send(np.array([comm.rank]), right, tag=2)
        got = int(comm.recv(left)[0]), comm.recv_object(left, tag=1), int(comm.recv_any(tag=2)[1][0])
        assert got == (left, {"from": left}, left)
        values = [f"for {rank}" for rank in range(3)] if comm.rank == 0 else None
        return (
            comm.all_gather_object(comm.rank),
            comm.broadcast_object("hello" if comm.rank == 1 else None, root=1),
            comm.gather_object(comm.rank, root=0),
            comm.scatter_object(values),
        )

    shared = ([0, 1, 2], "hello")
    assert on_all(nodes, work) == [(*shared, [0, 1, 2] if rank == 0 else None, f"for {rank}") for rank in range(3)]


def test_groups_made_of_a_group_block_too(nodes: tuple[Node, ...]) -> None:
    def work(comm: Communicator) -> tuple[Any, ...]:
        halves = comm.split(0 if comm.rank < 2 else None)
        pair = comm.subgroup([2, 1], name="pair")
        found = []
        for group in (halves, pair):
            assert group is None or isinstance(group, Communicator)
            found.append(None if group is None else group.all_gather_object(comm.rank))
        return tuple(found)

    assert on_all(nodes, work) == [([0, 1], None), ([0, 1], [2, 1]), (None, [2, 1])]


def test_operations_may_be_begun_and_waited_for_later(nodes: tuple[Node, ...]) -> None:
    def work(comm: Communicator) -> list[float]:
        xs = [np.full(4, float(number + comm.rank)) for number in range(20)]
        pending = [comm.start.all_reduce(x, "sum") for x in xs]
        assert all(isinstance(one, Pending) for one in pending)
        comm.start.barrier().wait(20)
        return [float(one.wait(20)[0]) for one in reversed(pending)]

    assert on_all(nodes, work) == [[3.0 * number + 3 for number in reversed(range(20))]] * 3


def test_several_threads_of_a_rank_use_keys(nodes: tuple[Node, ...]) -> None:
    def work(comm: Communicator) -> list[int]:
        sums = [0] * 4

        def sum_up(number: int) -> None:
            for step in range(20):
                sums[number] += int(comm.all_reduce(np.array([number + step]), key=f"{number}")[0])

        threads = [threading.Thread(target=sum_up, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return sums

    assert on_all(nodes, work) == [[3 * (20 * number + 190) for number in range(4)]] * 3


def test_after_its_time_an_operation_names_who_is_missing_and_the_group_stays_usable(nodes: tuple[Node, ...]) -> None:
    def work(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(PeerTimeout, match=r"barrier: not over within its timeout of 0.05 s.* waited .*rank 2"):
                comm.subgroup([0, 2], key="a").barrier(timeout=0.05)  # type: ignore[union-attr]
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(PeerTimeout, match="waited") as caught:
                comm.recv(2, timeout=0.05)
            assert caught.value.rank == 2
        comm.barrier()
        if comm.rank == 2:
            with pytest.raises(PeerCancelled, match="rank 0 cancelled"):
                comm.subgroup([0, 2], key="a").barrier(timeout=20)  # type: ignore[union-attr]
        assert comm.all_reduce(np.ones(1), timeout=20)[0] == 3

    on_all(nodes, work)


def test_what_is_cancelled_ends_on_the_others(nodes: tuple[Node, ...]) -> None:
    def work(comm: Communicator) -> str:
        if comm.rank == 0:
            pending = comm.start.all_reduce(np.ones(1 << 16))
            pending.cancel()
            with pytest.raises(
                Cancelled, match=r"all_reduce was cancelled: rank 0: all_reduce #\d+ (waited|was not waiting)"
            ):
                pending.wait(20)
            for other in (1, 2):
                comm.send_object("now", other)
        else:
            comm.recv_object(0)
            with pytest.raises(PeerCancelled, match="rank 0 cancelled it"):
                comm.all_reduce(np.ones(1 << 16), timeout=20)
        return str(comm.all_reduce(np.ones(1))[0])

    assert on_all(nodes, work) == ["3.0"] * 3


def test_wrong_calls_are_refused(nodes: tuple[Node, ...]) -> None:
    def work(comm: Communicator) -> float:
        with pytest.raises(UsageError, match="op: expected"):
            comm.all_reduce(np.ones(1), "median")  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="op: expected"):
            comm.start.all_reduce(np.ones(1), "median").wait(20)  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="timeout: expected a positive number"):
            comm.barrier(timeout=0)
        return float(comm.all_reduce(np.ones(1), timeout=20)[0])

    assert on_all(nodes, work) == [3.0] * 3


def test_different_operations_are_a_mismatch_that_names_both(nodes: tuple[Node, ...]) -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(OperationMismatch, match="all_reduce"):
            comm.all_reduce(np.ones(3 + comm.rank // 2), timeout=20)

    on_all(nodes, work)


def test_no_two_objects_have_one_name(nodes: tuple[Node, ...]) -> None:
    comm, first, second = nodes[0].world, Pending, Cancelled
    comm.claim("trainer", first, kind="trainer")
    with pytest.raises(UsageError, match="trainer"):
        comm.claim("trainer", second)
    comm.release("trainer", first)
    comm.claim("trainer", second)
    comm.release("trainer", second)


def test_a_communicator_describes_its_group(nodes: tuple[Node, ...]) -> None:
    comm = nodes[1].world
    assert (comm.rank, comm.size, comm.ranks, comm.local_rank) == (1, 3, (0, 1, 2), 1)
    assert comm.name == "world"
    assert comm.hosts == ((0, 1, 2),)
    assert "all_reduce" in comm.algorithm_table()
    assert "ring" in comm.algorithms("all_reduce")
    assert not comm.is_pinned("all_reduce")
    assert comm.predict("all_reduce", 100) > 0
    assert comm.bandwidth > 0
    assert comm.traffic.operations is not None
    assert comm.empty((2, 3), np.int8).shape == (2, 3)
    before = comm.timeout
    comm.timeout = 7.0
    assert comm.on_loop.timeout == 7.0
    comm.timeout = before
    assert repr(comm) == "<blocking communicator 'world': rank 1 of 3>"
    html = comm._repr_html_()  # the name that notebooks call
    assert "<th>blocking communicator</th><th>world</th>" in html
    assert "<td>rank</td><td>1 of 3</td>" in html


def test_threads_that_wait_in_a_group_that_is_revoked_wake_and_survivors_go_on(nodes: tuple[Node, ...]) -> None:
    def work(comm: Communicator) -> tuple[int, float, int]:
        group = comm.subgroup(range(3), name="to be revoked")
        assert group is not None
        group.barrier()
        if comm.rank == 2:
            group.revoke("enough")
        with pytest.raises(WorldRevoked, match="enough") as caught:
            group.all_reduce(np.ones(3))
        assert group.agree(6 | comm.rank).flag == 6
        smaller = group.shrink()
        total = smaller.all_reduce(np.ones(3))
        smaller.close()
        return caught.value.rank or 0, float(total[0]), smaller.size

    assert on_all(nodes, work) == [(2, 3.0, 3)] * 3
