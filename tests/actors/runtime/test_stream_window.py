"""A stream is never far ahead of its reader, and never stands still while both ends want to move."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.actors.runtime.window import ITEM_OVERHEAD, STREAM_WINDOW, Outflow, ReceiveWindow, item_cost
from asyncpar.errors import ProtocolError

SMALL = item_cost(memoryview(bytes(10)))
HUGE = item_cost(memoryview(bytes(3 * STREAM_WINDOW)))


def test_at_most_64_small_items_are_ahead() -> None:
    out = Outflow(STREAM_WINDOW)
    sent = 0
    while out.is_open:
        out.spend(SMALL)
        sent += 1
    assert sent == 64


def test_one_item_of_any_size_passes_and_is_alone() -> None:
    out, inlet = Outflow(STREAM_WINDOW), ReceiveWindow(STREAM_WINDOW)
    out.spend(HUGE)
    inlet.receive(HUGE)
    states = [out.is_open]
    out.credit(inlet.take(HUGE))
    states.append(out.is_open)
    assert states == [False, True]


def test_credit_comes_in_lumps_of_at_least_a_quarter() -> None:
    inlet = ReceiveWindow(STREAM_WINDOW)
    for _ in range(64):
        inlet.receive(ITEM_OVERHEAD)
    lumps = [inlet.take(ITEM_OVERHEAD) for _ in range(64)]
    assert [lump for lump in lumps if lump] == [STREAM_WINDOW // 4] * 4


def test_a_stream_that_was_granted_nothing_waits_for_its_first_credit() -> None:
    out, inlet = Outflow(0), ReceiveWindow(STREAM_WINDOW, is_shut=True)
    states = [out.is_open]
    out.credit(inlet.settle())
    states.append(out.is_open)
    assert states == [False, True]
    assert inlet.settle() == 0


def test_an_item_without_credit_breaks_the_protocol() -> None:
    with pytest.raises(ProtocolError, match="overspent its window"):
        ReceiveWindow(STREAM_WINDOW, is_shut=True).receive(1)
    inlet = ReceiveWindow(STREAM_WINDOW)
    inlet.receive(STREAM_WINDOW)
    with pytest.raises(ProtocolError, match="overspent its window"):
        inlet.receive(1)


def test_more_credit_than_is_out_breaks_the_protocol() -> None:
    out = Outflow(STREAM_WINDOW)
    out.spend(100)
    with pytest.raises(ProtocolError, match="100 are outstanding, the peer returned 101"):
        out.credit(101)
    out.credit(100)


@given(
    sizes=st.lists(st.integers(0, 2 * STREAM_WINDOW), min_size=1, max_size=200),
    turns=st.lists(st.sampled_from(["produce", "deliver", "read", "return"]), max_size=600),
    begins_open=st.booleans(),
)
def test_any_schedule_keeps_order_and_bounds_and_can_be_finished(
    sizes: list[int], turns: list[str], begins_open: bool
) -> None:
    """Both ends and the two directions of the link between them move in any order, then to the end."""
    granted = STREAM_WINDOW if begins_open else 0
    out, inlet = Outflow(granted), ReceiveWindow(STREAM_WINDOW, is_shut=not begins_open)
    pending, link, arrived = deque(enumerate(sizes)), deque[tuple[int, int]](), deque[tuple[int, int]]()
    credits_ = deque[int]() if begins_open else deque([inlet.settle()])
    read: list[int] = []

    def move(turn: str) -> bool:
        """Do it, if it can be done."""
        if turn == "produce" and pending and out.is_open:
            number, size = pending.popleft()
            out.spend(size + ITEM_OVERHEAD)
            link.append((number, size))
        elif turn == "deliver" and link:
            arrived.append(link.popleft())
            inlet.receive(arrived[-1][1] + ITEM_OVERHEAD)
        elif turn == "read" and arrived:
            number, size = arrived.popleft()
            read.append(number)
            if lump := inlet.take(size + ITEM_OVERHEAD):
                assert lump >= STREAM_WINDOW // 4
                credits_.append(lump)
        elif turn == "return" and credits_:
            out.credit(credits_.popleft())
        else:
            return False
        ahead = [size + ITEM_OVERHEAD for _, size in (*arrived, *link)]
        assert sum(ahead[:-1]) < STREAM_WINDOW
        return True

    for turn in turns:
        move(turn)
    while any(move(turn) for turn in ("return", "produce", "deliver", "read")):
        pass
    assert read == list(range(len(sizes)))
