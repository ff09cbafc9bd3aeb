"""The sending half of a link, as a conversation: no loop, no lane."""

from __future__ import annotations

import pytest

from asyncpar.errors import OperationMismatch, ProtocolError
from asyncpar.net.transport import flow_control as outbox_module
from asyncpar.net.transport.flow_control import (
    BULK_NOW,
    EAGER_LIMIT,
    EAGER_NOW,
    EAGER_WINDOW,
    Outbox,
    Wait,
    check_grant,
)
from asyncpar.net.wire.frame import HEADER_BYTES, MESSAGE_GROUP, FrameKind, Key
from tests.net.transport.conversation import Judge, frame

KEY = Key(1, 2, 3)
LARGE = EAGER_LIMIT + 1
COST = EAGER_LIMIT + HEADER_BYTES
GRANT = FrameKind.GRANT


def spend_all(outbox: Outbox) -> int:
    """Send small payloads until one has to wait, and return how many went."""
    sequence = 0
    while outbox.admit(Key(9, sequence, 0), EAGER_LIMIT) == EAGER_NOW:
        sequence += 1
    return sequence


def test_small_payloads_go_at_once() -> None:
    outbox = Outbox(referee=Judge())
    assert outbox.admit(KEY, 0) == EAGER_NOW
    assert outbox.admit(KEY, EAGER_LIMIT) == EAGER_NOW


def test_a_large_payload_waits_for_a_grant_that_comes_unasked() -> None:
    assert Outbox(referee=Judge()).admit(KEY, LARGE) == Wait(ask=False)


def test_a_large_message_asks_for_its_grant() -> None:
    assert Outbox(referee=Judge()).admit(Key(MESSAGE_GROUP, 0, 0), LARGE) == Wait(ask=True)


def test_a_granted_payload_goes_once() -> None:
    outbox = Outbox(referee=Judge())
    outbox.granted(frame(GRANT, KEY, 8), LARGE)
    assert outbox.admit(Key(1, 2, 4), LARGE) == Wait(ask=False)
    assert outbox.admit(KEY, LARGE) == BULK_NOW
    assert outbox.admit(KEY, LARGE) == Wait(ask=False)


def test_grants_are_used_in_any_order() -> None:
    outbox = Outbox(referee=Judge())
    for sequence in range(4):
        outbox.granted(frame(GRANT, Key(1, sequence, 0), 8), LARGE)
    assert [outbox.admit(Key(1, sequence, 0), LARGE) for sequence in (2, 0, 3, 1)] == [BULK_NOW] * 4


def test_small_payloads_never_exceed_the_window_and_then_ask() -> None:
    outbox = Outbox(referee=Judge())
    assert spend_all(outbox) == EAGER_WINDOW // COST
    assert outbox.admit(KEY, EAGER_LIMIT) == Wait(ask=True)


def test_a_small_payload_without_credit_goes_by_grant() -> None:
    outbox = Outbox(referee=Judge())
    spend_all(outbox)
    outbox.granted(frame(GRANT, KEY, 8), EAGER_LIMIT)
    assert outbox.admit(KEY, EAGER_LIMIT) == BULK_NOW


def test_returned_credit_can_be_spent_again() -> None:
    outbox = Outbox(referee=Judge())
    spend_all(outbox)
    outbox.credit(COST)
    assert outbox.admit(KEY, EAGER_LIMIT) == EAGER_NOW
    assert outbox.admit(KEY, EAGER_LIMIT) == Wait(ask=True)


def test_more_credit_than_was_spent_breaks_the_protocol() -> None:
    outbox = Outbox(referee=Judge())
    outbox.admit(KEY, 10)
    outbox.credit(10 + HEADER_BYTES)
    with pytest.raises(ProtocolError, match="the peer returned 1 bytes more than were sent"):
        outbox.credit(1)


def test_a_grant_of_another_length_is_a_mismatch_and_used_up() -> None:
    outbox = Outbox(referee=Judge())
    outbox.granted(frame(GRANT, KEY, 8), LARGE)
    with pytest.raises(OperationMismatch, match=f"this rank sends {LARGE + 1} bytes, the peer expects {LARGE}"):
        outbox.admit(KEY, LARGE + 1)
    assert outbox.admit(KEY, LARGE) == Wait(ask=False)


def test_a_grant_says_of_which_operation_it_is() -> None:
    outbox = Outbox(referee=Judge())
    assert outbox.grant_fingerprint(KEY) is None
    outbox.granted(frame(GRANT, KEY, 8, fingerprint=8), LARGE)
    assert outbox.grant_fingerprint(KEY) == 8


def test_grants_of_operations_that_are_over_are_dropped() -> None:
    outbox = Outbox(referee=Judge(stale={KEY[:2]}))
    outbox.granted(frame(GRANT, KEY, 8), LARGE)
    assert outbox.grant_fingerprint(KEY) is None


def test_grants_of_messages_nobody_waits_for_are_dropped() -> None:
    outbox = Outbox(referee=Judge())
    outbox.granted(frame(GRANT, Key(MESSAGE_GROUP, 5, 0), 8), LARGE)
    assert outbox.grant_fingerprint(Key(MESSAGE_GROUP, 5, 0)) is None


def test_too_many_grants_break_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_PENDING", 3)
    outbox = Outbox(referee=Judge())
    for sequence in range(3):
        outbox.granted(frame(GRANT, Key(1, sequence, 0), 8), LARGE)
    with pytest.raises(ProtocolError, match="more than 3 grants"):
        outbox.granted(frame(GRANT, Key(1, 3, 0), 8), LARGE)


def test_forgetting_an_operation_drops_its_grants_only() -> None:
    outbox = Outbox(referee=Judge())
    for sequence in (1, 2):
        for tag in (0, 1):
            outbox.granted(frame(GRANT, Key(1, sequence, tag), 8), LARGE)
    outbox.forget(1, 2)
    kept = [outbox.grant_fingerprint(Key(1, sequence, tag)) for sequence in (1, 2) for tag in (0, 1)]
    assert kept == [7, 7, None, None]


def test_a_grant_is_checked_against_what_the_sender_has() -> None:
    check_grant(KEY, 5, 5)
    with pytest.raises(OperationMismatch, match=r"group 0x1 operation #2 message 3: this rank sends 6 bytes"):
        check_grant(KEY, 5, 6)
