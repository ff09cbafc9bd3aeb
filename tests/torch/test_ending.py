"""Groups end at any moment, from any thread, in any order, and nothing of them is left."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from asyncpar.blocking import Cancelled
from asyncpar.errors import PeerError, UsageError
from asyncpar.torch import group_base
from asyncpar.torch.group_base import GroupBase
from tests.collective_engines import engine_of
from tests.ports import free_port
from tests.shared_files import left_behind, shared_files
from tests.torch.fork_servers import fork_servers
from tests.torch.pendings import Pendings
from tests.torch.ranks import initialize, place
from tests.torch.worlds import World, Worlds, on_ranks, open_world

pytestmark = pytest.mark.process


@pytest.fixture
def fresh() -> Iterator[World]:
    """Two new ranks that have no group yet."""
    with open_world(2, joins=False) as world:
        yield world


@pytest.fixture(scope="module", name="worlds")
def open_worlds() -> Iterator[Worlds]:
    worlds = Worlds(joins=False)
    yield worlds
    worlds.close()


@pytest.fixture
def apart(worlds: Worlds) -> World:
    """Two ranks that have no group, but may have had several: each test is to give its groups names of its own."""
    return worlds.get(2)


def meet(name: str, *, transport: str = "") -> int:
    """Form a default group, over the usual transport unless another is named, and return this rank."""
    os.environ.pop("ASYNCPAR_TRANSPORT", None)
    if transport:
        os.environ["ASYNCPAR_TRANSPORT"] = transport
    initialize(init_method=f"{place().meeting}-{name}")
    return dist.get_rank()


def store() -> Any:
    """Return where ranks leave word for each other."""
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001  # torch: the store under the default group, through which ranks of a test tell each other; torch has no public name for it


def all_works() -> None:
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [2.0, 2.0]


def end_right_after(transport: str) -> None:
    mine = place().rank
    small, large = torch.ones(3), torch.ones(1 << 18)
    lists = [torch.ones(3), torch.ones(3)]
    both: list[Callable[[], Any]] = [
        dist.barrier,
        lambda: dist.all_reduce(small),
        lambda: dist.all_reduce(large),
        lambda: dist.broadcast(large, 0),
        lambda: dist.broadcast(small, 0),
        lambda: dist.reduce(small, 1),
        lambda: dist.gather(small, lists if mine == 1 else None, dst=1),
        lambda: dist.scatter(small, lists if mine == 0 else None),
        lambda: dist.broadcast_object_list([{"some": "words"}], 0),
    ]
    one_sided: list[Callable[[], Any]] = [lambda: dist.send(small, 1) if mine == 0 else dist.recv(small, 0)]
    for number, call in enumerate([*both, *one_sided]):
        meet(f"end-{transport}-{number}", transport=transport)
        words = store()
        leaves_alone = transport == "tcp" and number >= len(both)  # else rank 0 has to wait for the other
        if mine == 1:
            words.wait(["go"])  # what it is sent by the quicker one may not go with its sender
        elif not leaves_alone:
            words.set("go", "both")
        call()
        if mine == 0 and leaves_alone:
            words.set("go", "alone")
        dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["", "tcp"])
def test_a_rank_that_ends_at_once_does_not_fail_slower_ones(apart: World, transport: str) -> None:
    apart.run(end_right_after, {"transport": transport}, limit=60)


def end_while_threads_wait() -> None:
    mine = meet("waiting")
    words = store()
    if mine == 0:
        errors: list[Exception] = []

        def wait(call: Callable[[], Any]) -> None:
            with pytest.raises(Cancelled) as raised:
                call()
            errors.append(raised.value)

        pendings = dist.group.WORLD._pending = Pendings(3)  # noqa: SLF001  # tells when operations are under way; the group makes this set itself
        work = dist.all_reduce(torch.ones(1 << 18), async_op=True)
        future, seen = work.get_future(), threading.Event()
        future.then(lambda _: seen.set())
        waits = [
            work.wait,
            lambda: dist.recv(torch.ones(3), 1),
            lambda: dist.recv(torch.ones(3)),
        ]
        threads = [threading.Thread(target=wait, args=(call,)) for call in waits]
        for thread in threads:
            thread.start()
        assert pendings.is_full.wait(5)
        dist.destroy_process_group()
        words.set("ended", "yes")
        for thread in threads:
            thread.join(5)
        assert len(errors) == 3
        assert seen.wait(5)
        message = r"Cancelled: all_reduce was cancelled: rank 0: all_reduce #1 (was not waiting|waited .* for rank 1)"
        with pytest.raises(RuntimeError, match=message):
            future.wait()
    else:
        words.wait(["ended"])
        with pytest.raises(PeerError, match="rank 0 "):
            dist.all_reduce(torch.ones(1 << 18))
        dist.destroy_process_group()
    meet("waited")
    all_works()
    dist.destroy_process_group()


def test_a_group_ends_while_threads_wait_for_its_operations(apart: World) -> None:
    apart.run(end_while_threads_wait, limit=30)


def end_twice_and_abort() -> None:
    mine = meet("twice")
    group = dist.group.WORLD
    dist.destroy_process_group()
    group.shutdown()
    group.abort()
    with pytest.raises(UsageError, match=r"all_reduce: this process group was destroyed; make a new one"):
        group.allreduce([torch.ones(1)])
    meet("aborted")
    group, words = dist.group.WORLD, store()
    if mine == 0:
        work = dist.all_reduce(torch.ones(1 << 18), async_op=True)
        group.abort()
        words.set("aborted", "yes")
        with pytest.raises(Cancelled):
            work.wait()
    else:
        words.wait(["aborted"])
        with pytest.raises(PeerError, match="rank 0 "):
            dist.all_reduce(torch.ones(1 << 18))
    dist.destroy_process_group()
    meet("after")
    all_works()
    dist.destroy_process_group()


def test_a_group_is_ended_twice_and_aborted_at_work(apart: World) -> None:
    apart.run(end_twice_and_abort, limit=30)


def counts() -> dict[str, int]:
    """Return what this process has open.

    Threads that complete futures are left out: there is another one whenever all are busy, however shortly, and each
    ends after ten seconds without work (``test_completion.py``).
    """
    me = psutil.Process()
    completing = sum(thread.name == "asyncpar completions" for thread in threading.enumerate())
    return {
        "threads": me.num_threads() - completing,
        "files": me.num_fds(),
        "sockets": len(me.net_connections("all")),
    }


def begin_and_end(number: int) -> None:
    meet(f"cycle-{number}")
    group = dist.new_group([0, 1])
    work = dist.all_reduce(torch.ones(1 << 16), group=group, async_op=True)
    work.get_future().wait()
    all_works()
    dist.destroy_process_group()


def begin_and_end_often() -> None:
    for number in range(2):
        begin_and_end(number)
    gc.collect()
    before = counts()
    for number in range(2, 10):
        begin_and_end(number)
    gc.collect()
    after = counts()
    assert after == before, (after, before)
    begin_and_end(10)
    assert counts()["files"] <= before["files"] + 8  # one world's, until its memory is collected


def test_nothing_is_left_after_many_groups(fresh: World) -> None:
    before = shared_files()
    fresh.run(begin_and_end_often, limit=60)
    assert not left_behind(before)


def make_and_destroy_groups() -> None:
    meet("groups")
    for _ in range(30):  # many more than there is memory for at once
        group: Any = dist.new_group()
        for count in (3, 100_000):
            x = torch.ones(count)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [2.0] * count
        arena = engine_of(group.communicator).arena
        assert arena is not None
        assert arena.is_open, "it goes by messages"
        dist.destroy_process_group(group)
    dist.destroy_process_group()


def test_groups_that_are_destroyed_leave_their_shared_memory_to_others(fresh: World) -> None:
    fresh.run(make_and_destroy_groups, limit=60)


@on_ranks(2)
def test_a_group_ends_with_its_operations_and_leaves_others_theirs() -> None:
    group, other = dist.new_group(), dist.new_group()
    if dist.get_rank() == 0:
        work = dist.irecv(torch.ones(3), 1, group=group)
        going_on = dist.irecv(torch.ones(3), 1, group=other)
        dist.destroy_process_group(group)
        with pytest.raises(Cancelled, match="recv was cancelled"):
            work.wait()
        dist.barrier()
        going_on.wait()
    else:
        dist.barrier()
        dist.send(torch.ones(3), 0, group=other)
    all_works()


def destroy_nothing(channel: socket.socket, *_: str) -> None:
    """Be a program that ends in the middle of everything."""
    dist.init_process_group("asyncpar")
    all_works()
    work = dist.all_reduce(torch.ones(1 << 18), async_op=True)
    work.get_future().then(lambda _: None)
    print("through", flush=True)


def test_programs_that_destroy_nothing_end_quietly(tmp_path: Path) -> None:
    port = free_port()
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TMPDIR": str(tmp_path)}
    processes = []
    for rank, server in enumerate(fork_servers()):
        ours, theirs = socket.socketpair()
        with ours, theirs, (tmp_path / f"{rank}.log").open("ab") as log:
            processes.append(
                server.start(
                    "tests.torch.test_ending:destroy_nothing",
                    [],
                    environment=os.environ | common | {"RANK": str(rank)},
                    log=log.fileno(),
                    channel=theirs.fileno(),
                )
            )
    statuses = [process.wait(timeout=50) for process in processes]
    written = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    assert (statuses, written) == ([0, 0], ["through\n", "through\n"])


def _send_then(words: Any, deliver: Callable[[], None], *_: object) -> None:
    words.set("ending", "yes")
    deliver()


def send_and_end(transport: str) -> None:
    """Rank 0 begins to send, and ends its group at once; rank 1 receives a while after that."""
    for number, count in enumerate([3, 1 << 12, 1 << 20]):
        rank = meet(f"send-{transport}-{number}", transport=transport)
        words = store()
        if rank == 0:
            sent = [dist.isend(torch.full((count,), float(n)), 1, tag=n) for n in range(3)]
            deliver = partial(_send_then, words, dist.group.WORLD._deliver)  # noqa: SLF001  # the delivery at the end of a group is followed by a message to the other rank, exactly then
            with mock.patch.object(GroupBase, "_deliver", deliver):
                dist.destroy_process_group()
            assert all(work is not None and work.is_success() for work in sent)
        else:
            words.wait(["ending"])
            for n in range(3):
                x = torch.zeros(count)
                dist.recv(x, 0, tag=n)
                assert x.tolist() == [float(n)] * count
            dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["", "tcp", "grpc"])
def test_sends_that_were_begun_are_delivered_before_the_group_ends(apart: World, transport: str) -> None:
    apart.run(send_and_end, {"transport": transport}, limit=60)


def send_in_vain() -> None:
    rank = meet("vain")
    words = store()
    if rank == 1:
        words.wait(["ended"])
        dist.destroy_process_group()
        return
    dist.isend(torch.ones(1 << 20), 1)
    dist.destroy_process_group()
    words.set("ended", "yes")


def test_what_nobody_receives_delays_the_end_of_a_group_only_so_long(apart: World) -> None:
    apart.run(send_in_vain, limit=60)  # nobody receives before it has ended


def leave_memory() -> None:
    """Begin worlds without a collection, which takes a tenth of a second with torch, unless it may free memory."""
    gc.disable()
    try:
        meet("memory-first")
        for count in (3, 1 << 20):
            dist.all_reduce(torch.ones(count))
        assert group_base._mappings(dist.group.WORLD.node), "there is no shared memory"  # noqa: SLF001  # what the group itself looks at
        dist.destroy_process_group()
        assert not group_base.remains
        with mock.patch.object(gc, "collect", side_effect=AssertionError("a collection")):
            meet("memory-second")
        garbage: list[Any] = [dist.group.WORLD.allocate_tensor(1 << 20, dtype=torch.float32)]
        garbage.append(garbage)
        dist.destroy_process_group()
        assert group_base.remains
        del garbage
        meet("memory-third")
        assert not group_base.remains
        all_works()
        dist.destroy_process_group()
    finally:
        gc.enable()


def test_a_world_that_was_left_is_collected_only_if_its_memory_is_still_mapped(fresh: World) -> None:
    fresh.run(leave_memory, limit=50)


def end_alone(transport: str) -> None:
    """Rank 1 ends while rank 0 waits for more of it, and stays until rank 0 has noticed and ends too."""
    mine = meet(f"alone-{transport}", transport=transport)
    part = dist.new_group([0, 1])
    x = torch.ones(3)
    if mine == 1:
        dist.send(x, 0, tag=7)
        dist.send(torch.full((3,), 5.0), 0, tag=8)
        with mock.patch.multiple(group_base, FAREWELL_SECONDS=60.0, ENDING_SECONDS=60.0):
            dist.destroy_process_group()
        return
    dist.recv(x, 1, tag=7)
    begun = [
        dist.all_reduce(x, async_op=True),
        dist.all_reduce(torch.ones(1 << 18), group=part, async_op=True),
        dist.irecv(torch.ones(3), 1),
        dist.irecv(torch.ones(3), 1, tag=7),
        dist.irecv(torch.ones(3), 1, tag=9),
    ]
    for work in begun:
        assert work is not None
        with pytest.raises(PeerError, match=r"rank 1 .*(it left the world|has destroyed its process group)"):
            work.wait()
    dist.recv(x, 1, tag=8)  # which rank 1 has sent
    assert x.tolist() == [5.0] * 3
    with pytest.raises(PeerError, match="rank 1 "):
        dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["", "tcp"])
def test_who_waits_for_a_rank_that_ends_learns_of_it_before_it_has_gone(apart: World, transport: str) -> None:
    apart.run(end_alone, {"transport": transport}, limit=20)
