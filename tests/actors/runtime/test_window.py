"""Windows decide which messages may travel; no loop is needed to see it."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncpar.actors.runtime.window import (
    MAX_QUEUED_MESSAGES,
    OVERHEAD,
    WINDOW,
    OutboundMessage,
    ReceiveWindow,
    SendWindow,
)
from asyncpar.errors import ProtocolError, UsageError

ZEROS = memoryview(bytes(3 * WINDOW))


def outgoing(cost: int) -> OutboundMessage:
    return OutboundMessage(ZEROS[: cost - OVERHEAD])


def give_credit(window: SendWindow, amount: int) -> list[OutboundMessage]:
    """Return what may travel then."""
    window.credit(amount)
    return list(iter(window.next, None))


def test_messages_travel_until_the_window_is_full_and_go_on_with_credit() -> None:
    window = SendWindow()
    first, second, third = outgoing(WINDOW - 1), outgoing(2000), outgoing(2000)
    assert window.put(first)
    assert window.put(second)
    assert not window.put(third)
    assert not third.is_sent
    assert give_credit(window, WINDOW - 1) == [third]
    assert third.is_sent


def test_a_message_larger_than_the_window_travels_alone() -> None:
    window = SendWindow()
    assert window.put(outgoing(3 * WINDOW))
    small = outgoing(2000)
    assert not window.put(small)
    assert give_credit(window, 3 * WINDOW) == [small]


def test_order_is_kept_when_later_messages_would_fit() -> None:
    window = SendWindow()
    window.put(outgoing(WINDOW))
    big, small = outgoing(WINDOW), outgoing(2000)
    assert not window.put(big)
    assert not window.put(small)
    assert give_credit(window, WINDOW) == [big]


def test_a_dropped_message_never_travels() -> None:
    window = SendWindow()
    sent, dropped = outgoing(WINDOW), outgoing(2000)
    window.put(sent)
    window.put(dropped)
    assert window.drop(dropped)
    assert not window.drop(dropped)
    assert not window.drop(sent)
    assert give_credit(window, WINDOW) == []
    assert window.is_idle


def test_credit_for_what_was_not_sent_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="0 are outstanding, the peer returned 1"):
        SendWindow().credit(1)


def test_a_queue_that_grows_too_long_is_a_usage_error() -> None:
    window = SendWindow()
    window.put(outgoing(WINDOW))
    for _ in range(MAX_QUEUED_MESSAGES):
        window.check_room("tell")
        window.put(outgoing(OVERHEAD))
    with pytest.raises(UsageError, match=r"tell: 65536 messages .* wait to be sent to this actor; await the tells"):
        window.check_room("tell")


def test_a_sender_that_overspends_is_a_protocol_error() -> None:
    window = ReceiveWindow()
    window.receive(WINDOW)
    with pytest.raises(ProtocolError, match="overspent its window"):
        window.receive(OVERHEAD)


@given(st.lists(st.tuples(st.integers(OVERHEAD, 2 * WINDOW), st.integers(0, 4)), max_size=40))
def test_an_honest_sender_never_overspends_and_never_gets_stuck(steps: list[tuple[int, int]]) -> None:
    sender, receiver = SendWindow(), ReceiveWindow()
    mailbox: deque[int] = deque()
    arrived: list[int] = []

    def arrive(cost: int) -> None:
        receiver.receive(cost)
        mailbox.append(cost)
        arrived.append(cost)

    def take() -> None:
        credit = receiver.take(mailbox.popleft())
        for released in give_credit(sender, credit) if credit else []:
            arrive(released.cost)

    for cost, takes in steps:
        if sender.put(outgoing(cost)):
            arrive(cost)
        for _ in range(min(takes, len(mailbox))):
            take()
    while mailbox:
        take()
    assert arrived == [cost for cost, _ in steps]
    rest = receiver.settle()
    assert rest == 0 or give_credit(sender, rest) == []
    assert sender.is_idle
