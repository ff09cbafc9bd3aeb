"""Two inboxes and two outboxes in conversation, in every order that hypothesis can think of."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.net.transport import flow_control as inbox_module
from asyncpar.net.transport import flow_control as outbox_module
from asyncpar.net.transport.flow_control import Inbox, Outbox, SendNow, check_grant
from asyncpar.net.wire.frame import HEADER_BYTES, FrameHeader, FrameKind, Key
from tests.net.transport.conversation import Judge, Outcome, frame
from tests.soak import chosen

LIMIT = 256
WINDOW = 2 * (LIMIT + HEADER_BYTES)  # less than all small transfers of one direction together
LENGTHS = (0, 1, LIMIT - 1, LIMIT, LIMIT, LIMIT + 1, 3 * LIMIT)
TRANSFERS = 14
FINGERPRINT = 7


class Frame(NamedTuple):
    header: FrameHeader
    payload: bytes
    value: int


class Posted(NamedTuple):
    buffer: bytearray
    outcome: Outcome


def key_of(number: int) -> Key:
    return Key(1, number, 0)


def payload_of(number: int) -> bytes:
    return bytes([number + 1]) * LENGTHS[number % len(LENGTHS)]


class Side:
    """One end of a link: what ``Link`` does around an inbox and an outbox, without a lane."""

    def __init__(self) -> None:
        self.judge = Judge()
        self.inbox = Inbox(referee=self.judge, emit=self._emit)
        self.outbox = Outbox(referee=self.judge)
        self.outgoing: deque[Frame] = deque()
        self.waiting: dict[Key, bytes] = {}
        self.arriving: tuple[Frame, memoryview | None] | None = None
        self.posted: dict[int, Posted] = {}
        self.sent: set[int] = set()

    def post(self, number: int) -> None:
        """Post the receive of a transfer, as long as it is neither posted nor over."""
        key = key_of(number)
        if number in self.posted or key[:2] in self.judge.stale:
            return
        posted = self.posted[number] = Posted(bytearray(len(payload_of(number))), Outcome())
        if self.inbox.take_early(key, FINGERPRINT, memoryview(posted.buffer)):
            posted.outcome.set_result(None)
        else:
            self.inbox.post(key, FINGERPRINT, memoryview(posted.buffer), posted.outcome)

    def send(self, number: int) -> None:
        """Send the payload of a transfer, as long as it is neither sent nor over."""
        key, payload = key_of(number), payload_of(number)
        if number in self.sent or key[:2] in self.judge.stale:
            return
        self.sent.add(number)
        decision = self.outbox.admit(key, len(payload))
        if isinstance(decision, SendNow):
            self._push(decision.kind, key, payload)
            return
        self.waiting[key] = payload
        if decision.ask:
            self._emit(FrameKind.REQUEST, key, FINGERPRINT, len(payload))

    def give_up(self, number: int) -> None:
        """End a transfer here, whatever has become of it."""
        key = key_of(number)
        self.withdraw(number)
        self.judge.stale.add(key[:2])
        self.inbox.forget(key.group, key.sequence)
        self.outbox.forget(key.group, key.sequence)
        self.waiting.pop(key, None)

    def withdraw(self, number: int) -> None:
        """Take the receive back; if its payload is arriving, the rest of that is dropped."""
        if self.inbox.withdraw(key_of(number)):
            assert self.arriving is not None
            self.arriving = self.arriving[0], None

    def begin_arrival(self, peer: Side) -> None:
        """Let the next frame of ``peer`` begin to arrive, unless one is arriving."""
        if self.arriving is None and peer.outgoing:
            incoming = peer.outgoing.popleft()
            is_payload = incoming.header.kind in (FrameKind.EAGER, FrameKind.BULK)
            self.arriving = incoming, self.inbox.lend(incoming.header) if is_payload else None

    def end_arrival(self) -> None:
        """Let the frame that is arriving be complete."""
        if self.arriving is None:
            return
        (header, payload, value), place = self.arriving
        self.arriving = None
        match header.kind:
            case FrameKind.EAGER | FrameKind.BULK:
                if place is not None:
                    place[:] = payload
                    self.inbox.landed(header)
            case FrameKind.REQUEST:
                self.inbox.request(header)
            case FrameKind.CREDIT:
                self.outbox.credit(value)
            case _:
                self._granted(header, value)

    def _granted(self, header: FrameHeader, length: int) -> None:
        payload = self.waiting.pop(header.key, None)
        if payload is None:
            self.outbox.granted(header, length)
        else:
            check_grant(header.key, length, len(payload))
            self._push(FrameKind.BULK, header.key, payload)

    def _push(self, kind: FrameKind, key: Key, payload: bytes) -> None:
        self.outgoing.append(Frame(frame(kind, key, len(payload), fingerprint=FINGERPRINT), payload, 0))

    def _emit(self, kind: FrameKind, key: Key, fingerprint: int, value: int) -> None:
        self.outgoing.append(Frame(frame(kind, key, 8, fingerprint=fingerprint), b"", value))


def deliver_everything(one: Side, other: Side) -> None:
    while one.arriving or other.arriving or one.outgoing or other.outgoing:
        for side, peer in ((one, other), (other, one)):
            side.end_arrival()
            side.begin_arrival(peer)


def credit_that_is_out(sender: Side, receiver: Side) -> int:
    """Return the credit that has been spent and that the receiver has not counted as returned."""
    return WINDOW - sender.outbox._credit - receiver.inbox._owed  # noqa: SLF001  # credit that is lost shows only once it is used up


VERBS = ("post", "send", "give up sending", "give up receiving", "give up arriving", "begin", "end", "answer")
WEIGHED = (*VERBS, "post", "send", "send", "send", "begin", "end", "answer")
STEPS = st.lists(st.tuples(st.sampled_from(WEIGHED), st.integers(0, TRANSFERS - 1)), min_size=40, max_size=150)


def play(verb: str, number: int, sender: Side, receiver: Side) -> None:
    match verb:
        case "post":
            receiver.post(number)
        case "send":
            sender.send(number)
        case "give up sending" if number % 5 == 0:  # so that many are completed
            sender.give_up(number)
        case "give up receiving" if number % 5 == 0:
            receiver.give_up(number)
        case "give up arriving" if receiver.arriving is not None:
            receiver.give_up(receiver.arriving[0].header.sequence)
        case "begin":
            receiver.begin_arrival(sender)
        case "end":
            receiver.end_arrival()
        case "answer":  # a frame the other way: grants, credit
            sender.end_arrival()
            sender.begin_arrival(receiver)


@given(STEPS)
@settings(deadline=None, max_examples=chosen(60, soak=200))
def test_no_payload_is_lost_the_window_holds_and_all_credit_comes_back(steps: list[tuple[str, int]]) -> None:
    """Even numbers go one way, odd ones the other; each transfer may be given up on either side at any moment."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (inbox_module, outbox_module):
            patch.setattr(module, "EAGER_LIMIT", LIMIT)
            patch.setattr(module, "EAGER_WINDOW", WINDOW)
        sides = Side(), Side()
        for verb, number in steps:
            play(verb, number, sides[number % 2], sides[1 - number % 2])
            assert max(side.inbox.early_bytes for side in sides) <= WINDOW
        over = sides[0].judge.stale | sides[1].judge.stale
        for number in range(TRANSFERS):  # whatever was not given up is completed
            sides[number % 2].send(number)
            sides[1 - number % 2].post(number)
        deliver_everything(*sides)
        for number in range(TRANSFERS):
            posted = sides[1 - number % 2].posted.get(number)
            if key_of(number)[:2] not in over:
                assert posted is not None
                assert posted.outcome == Outcome(is_done=True)
            if posted is not None and posted.outcome.done():
                assert posted.buffer == payload_of(number)
        for side in sides:
            assert {key[:2] for key in side.inbox._requested} <= over  # noqa: SLF001  # a request left behind shows nowhere else
            for number in range(TRANSFERS):
                side.give_up(number)
        deliver_everything(*sides)
        for sender, receiver in (sides, sides[::-1]):
            assert credit_that_is_out(sender, receiver) == 0
            assert receiver.inbox.early_bytes == 0
            assert not receiver.inbox._posted  # noqa: SLF001  # a receive left behind shows nowhere else
            assert not receiver.inbox._requested  # noqa: SLF001  # a request left behind shows nowhere else
            assert not sender.outbox._grants  # noqa: SLF001  # a grant left behind shows nowhere else
