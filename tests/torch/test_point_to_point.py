"""Tensors from one rank to another."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.torch.values import MOVED, assert_same, draw
from tests.torch.worlds import on_ranks


@on_ranks(2)
def test_send_and_recv_move_every_dtype() -> None:
    for dtype in MOVED:
        if dist.get_rank() == 0:
            dist.send(draw(7, dtype), 1)
        else:
            x = torch.zeros_like(draw(0, dtype))
            assert dist.recv(x, 0) == 0
            assert_same(x, draw(7, dtype))


@on_ranks(2)
def test_tags_pair_sends_with_receives_in_any_order() -> None:
    if dist.get_rank() == 0:
        works = [dist.isend(draw(tag), 1, tag=tag) for tag in (1, 2, 3)]
    else:
        xs = {tag: torch.zeros(5, 3) for tag in (3, 1, 2)}
        works = [dist.irecv(x, 0, tag=tag) for tag, x in xs.items()]
    for work in works:
        assert work is not None
        work.wait()
    if dist.get_rank() == 1:
        for tag, x in xs.items():
            assert_same(x, draw(tag))


@on_ranks(2)
def test_messages_of_one_tag_keep_their_order() -> None:
    if dist.get_rank() == 0:
        works = [dist.isend(torch.full((n + 1,), float(n)), 1, tag=5) for n in range(20)]
    else:
        xs = [torch.empty(n + 1) for n in range(20)]
        works = [dist.irecv(x, 0, tag=5) for x in xs]
    for work in works:
        work.wait()
    if dist.get_rank() == 1:
        for n, x in enumerate(xs):
            assert_same(x, torch.full((n + 1,), float(n)))


@on_ranks(4)
def test_anyone_may_be_the_source() -> None:
    if dist.get_rank() == 0:
        seen = {}
        for _ in range(3):
            x = torch.zeros(5, 3)
            source = dist.recv(x, tag=9)
            seen[source] = x
        assert sorted(seen) == [1, 2, 3]
        for source, x in seen.items():
            assert_same(x, draw(source))
    else:
        dist.send(draw(dist.get_rank()), 0, tag=9)


@on_ranks(4)
def test_works_of_anyone_tell_their_source() -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() == 1:
        dist.send(draw(1), 3, group=group)
    if dist.get_rank() == 3:
        x = torch.zeros(5, 3)
        work = dist.irecv(x, group=group)
        assert work is not None
        work.wait()
        assert work._source_rank() == 0  # noqa: SLF001  # torch: where recv() of any rank reads the sender from the work
        assert_same(x, draw(1))


@on_ranks(2)
def test_big_messages_cross() -> None:
    other = 1 - dist.get_rank()
    mine, theirs = draw(dist.get_rank(), shape=(1_000_003,)), torch.empty(1_000_003)
    works = [dist.isend(mine, other), dist.irecv(theirs, other)]
    for work in works:
        work.wait()
    assert_same(theirs, draw(other, shape=(1_000_003,)))


@on_ranks(2)
def test_empty_strided_and_scalar_messages_arrive() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.empty(0), 1)
        dist.send(draw(0, shape=(4, 6)).T, 1)
        dist.send(torch.tensor(4.5), 1)
        dist.send(draw(1, shape=(3,)), 1)
    else:
        dist.recv(torch.empty(0), 0)
        x, scalar, spread = torch.zeros(6, 4), torch.tensor(0.0), torch.zeros(3, 2)
        dist.recv(x, 0)
        dist.recv(scalar, 0)
        dist.recv(spread[:, 1], 0)
        assert_same(x, draw(0, shape=(4, 6)).T.contiguous())
        assert scalar.item() == 4.5
        assert_same(spread[:, 1].contiguous(), draw(1, shape=(3,)))
        assert spread[:, 0].count_nonzero() == 0


@on_ranks(4)
def test_a_batch_of_sends_and_receives_runs_at_once() -> None:
    mine = dist.get_rank()
    left, right = (mine - 1) % 4, (mine + 1) % 4
    ins = [torch.zeros(5, 3), torch.zeros(70_000)]
    outs = [draw(mine), draw(mine, shape=(70_000,))]
    ops = [dist.P2POp(dist.irecv, x, left) for x in ins] + [dist.P2POp(dist.isend, x, right) for x in outs]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert_same(ins[0], draw(left))
    assert_same(ins[1], draw(left, shape=(70_000,)))


@on_ranks(2)
def test_a_message_may_wait_for_its_receiver() -> None:
    if dist.get_rank() == 0:
        work = dist.isend(draw(3), 1, tag=1)
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        x = torch.zeros(5, 3)
        dist.recv(x, 0, tag=1)
        assert_same(x, draw(3))
