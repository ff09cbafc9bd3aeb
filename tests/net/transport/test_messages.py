"""Messages of one peer, as a conversation: order, grants, budget, and what breaks the protocol."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncpar.errors import ProtocolError
from asyncpar.net.transport import messages as messages_module
from asyncpar.net.transport.flow_control import EAGER_LIMIT, EAGER_WINDOW
from asyncpar.net.transport.messages import MessageInbox
from asyncpar.net.wire.frame import HEADER_BYTES, MESSAGE_GROUP, FrameKind, Key
from tests.net.transport.conversation import Emitted, frame

BUDGET = 1000
EAGER, BULK, REQUEST = FrameKind.EAGER, FrameKind.BULK, FrameKind.REQUEST


def key_of(sequence: int) -> Key:
    return Key(MESSAGE_GROUP, sequence, 0)


class Scene:
    """A message inbox, what it delivered, and what it says."""

    def __init__(self) -> None:
        self.emitted = Emitted()
        self.delivered: list[bytes] = []
        self.releases: list[Callable[[], None]] = []
        self.inbox = MessageInbox(deliver=self._deliver, emit=self.emitted, max_bytes=5000, budget=BUDGET)

    def _deliver(self, payload: memoryview, release: Callable[[], None]) -> None:
        self.delivered.append(bytes(payload[:1]))
        self.releases.append(release)

    def arrive(self, sequence: int, length: int = 1, *, kind: FrameKind = EAGER) -> None:
        header = frame(kind, key_of(sequence), length, fingerprint=0)
        self.inbox.lend(header)[:] = bytes([sequence % 256]) * length
        self.inbox.landed(header)

    def request(self, sequence: int, length: int) -> None:
        self.inbox.request(frame(REQUEST, key_of(sequence), 8), length)

    def take_back(self, sequence: int) -> None:
        self.inbox.taken_back(frame(REQUEST, key_of(sequence), 8, fingerprint=1))

    def grants(self) -> list[tuple[int, int]]:
        """Return sequence and length of the grants since the last time."""
        return [(key.sequence, value) for kind, key, _, value in self.emitted.take() if kind is FrameKind.GRANT]


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_messages_are_delivered_in_order_however_they_come(scene: Scene) -> None:
    scene.request(1, 100)
    for sequence in (2, 0, 3):
        scene.arrive(sequence)
    assert scene.delivered == [b"\0"]
    scene.arrive(1, 100, kind=BULK)
    assert scene.delivered == [b"\0", b"\1", b"\2", b"\3"]


# -- budget ------------------------------------------------------------------------------------------------------------


def test_requests_are_granted_in_order_while_the_budget_lasts(scene: Scene) -> None:
    for sequence, length in enumerate((400, 600, 1)):
        scene.request(sequence, length)
    assert scene.grants() == [(0, 400), (1, 600)]
    scene.arrive(0, 400, kind=BULK)
    assert scene.grants() == []
    scene.releases[0]()
    assert scene.grants() == [(2, 1)]


def test_a_message_above_the_budget_is_granted_alone(scene: Scene) -> None:
    scene.request(0, 10)
    scene.request(1, BUDGET + 1)
    assert scene.grants() == [(0, 10)]
    scene.arrive(0, 10, kind=BULK)
    scene.releases[0]()
    assert scene.grants() == [(1, BUDGET + 1)]


def test_a_small_request_does_not_overtake_a_large_one(scene: Scene) -> None:
    for sequence, length in enumerate((900, 200, 1)):
        scene.request(sequence, length)
    assert scene.grants() == [(0, 900)]


def test_credit_of_eager_messages_goes_back_when_they_are_released_not_when_they_come(scene: Scene) -> None:
    count = EAGER_WINDOW // 4 // (EAGER_LIMIT + HEADER_BYTES) + 1
    for sequence in range(count):
        scene.arrive(sequence, EAGER_LIMIT)
    assert scene.emitted.frames == []
    for release in scene.releases:
        release()
    assert scene.emitted.take() == [(FrameKind.CREDIT, Key(0, 0, 0), 0, count * (EAGER_LIMIT + HEADER_BYTES))]


# -- taken back --------------------------------------------------------------------------------------------------------


def test_a_message_taken_back_is_not_waited_for(scene: Scene) -> None:
    scene.arrive(1)
    scene.take_back(0)
    assert scene.delivered == [b"\1"]


def test_a_message_taken_back_before_its_grant_leaves_the_queue(scene: Scene) -> None:
    for sequence, length in enumerate((900, 800, 50)):
        scene.request(sequence, length)
    assert scene.grants() == [(0, 900)]
    scene.take_back(1)
    assert scene.grants() == [(2, 50)]


def test_a_message_taken_back_after_its_grant_returns_the_budget(scene: Scene) -> None:
    scene.request(0, 900)
    scene.request(1, 900)
    assert scene.grants() == [(0, 900)]
    scene.take_back(0)
    assert scene.grants() == [(1, 900)]


# -- hostile senders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_delivered", [True, False])
def test_a_message_that_comes_twice_breaks_the_protocol(scene: Scene, is_delivered: bool) -> None:
    sequence = 0 if is_delivered else 1
    scene.arrive(sequence)
    with pytest.raises(ProtocolError, match=f"message {sequence} came twice"):
        scene.arrive(sequence)


@pytest.mark.parametrize("is_delivered", [True, False])
def test_taking_back_a_message_that_came_breaks_the_protocol(scene: Scene, is_delivered: bool) -> None:
    sequence = 0 if is_delivered else 1
    scene.arrive(sequence)
    with pytest.raises(ProtocolError, match=f"message {sequence} was taken back after it came"):
        scene.take_back(sequence)


def test_sending_a_message_that_was_taken_back_breaks_the_protocol(scene: Scene) -> None:
    scene.take_back(1)
    with pytest.raises(ProtocolError, match="message 1 came twice"):
        scene.arrive(1)


def test_too_many_messages_taken_back_ahead_of_others_break_the_protocol(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_module, "MAX_PENDING", 3)
    for sequence in (1, 2, 3):
        scene.take_back(sequence)
    with pytest.raises(ProtocolError, match="more than 3 messages wait for an earlier one"):
        scene.take_back(4)


def test_a_bulk_message_without_a_grant_breaks_the_protocol(scene: Scene) -> None:
    with pytest.raises(ProtocolError, match="message 0: 10 bytes came without a grant"):
        scene.arrive(0, 10, kind=BULK)


def test_a_bulk_message_of_another_length_than_granted_breaks_the_protocol(scene: Scene) -> None:
    scene.request(0, 10)
    with pytest.raises(ProtocolError, match="message 0: 11 bytes came without a grant"):
        scene.arrive(0, 11, kind=BULK)


def test_a_grant_is_good_for_one_message(scene: Scene) -> None:
    scene.request(0, 10)
    scene.arrive(0, 10, kind=BULK)
    with pytest.raises(ProtocolError, match="came without a grant"):
        scene.arrive(0, 10, kind=BULK)


def test_a_request_above_the_limit_breaks_the_protocol(scene: Scene) -> None:
    with pytest.raises(ProtocolError, match="at most 5000 bytes are allowed, the peer wants to send 5001"):
        scene.request(0, 5001)


def test_too_many_requests_break_the_protocol(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_module, "MAX_PENDING", 3)
    for sequence in range(4):
        scene.request(sequence, BUDGET)  # the first is granted
    with pytest.raises(ProtocolError, match="more than 3 messages wait for a grant"):
        scene.request(4, BUDGET)


def test_grants_of_nothing_are_bounded_too(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages_module, "MAX_PENDING", 3)
    for sequence in range(6):
        scene.request(sequence, 0)
    assert scene.grants() == [(0, 0), (1, 0), (2, 0)]
    with pytest.raises(ProtocolError, match="more than 3 messages wait for a grant"):
        scene.request(6, 0)
    scene.arrive(0, 0, kind=BULK)
    scene.releases[0]()
    assert scene.grants() == [(3, 0)]


def test_a_message_that_is_announced_twice_breaks_the_protocol(scene: Scene) -> None:
    scene.request(0, 900)
    scene.request(1, 900)
    for sequence in (0, 1):
        with pytest.raises(ProtocolError, match=f"message {sequence} was announced twice"):
            scene.request(sequence, 900)


def test_an_oversize_eager_message_breaks_the_protocol(scene: Scene) -> None:
    with pytest.raises(ProtocolError, match=f"at most {EAGER_LIMIT} bytes are allowed, got {EAGER_LIMIT + 1}"):
        scene.arrive(0, EAGER_LIMIT + 1)


def test_overspent_credit_breaks_the_protocol(scene: Scene) -> None:
    count = EAGER_WINDOW // (EAGER_LIMIT + HEADER_BYTES)
    for sequence in range(count):
        scene.arrive(sequence, EAGER_LIMIT)
    with pytest.raises(ProtocolError, match="the peer overspent its credit"):
        scene.arrive(count, EAGER_LIMIT)


def test_messages_that_wait_for_an_earlier_one_count_against_the_credit(scene: Scene) -> None:
    count = EAGER_WINDOW // (EAGER_LIMIT + HEADER_BYTES)
    for sequence in range(1, count + 1):
        scene.arrive(sequence, EAGER_LIMIT)
    assert scene.delivered == []
    with pytest.raises(ProtocolError, match="the peer overspent its credit"):
        scene.arrive(count + 1, EAGER_LIMIT)


# -- whole frames ------------------------------------------------------------------------------------------------------


def test_the_next_message_is_taken_whole_and_any_other_goes_the_long_way(scene: Scene) -> None:
    def offer(sequence: int) -> bool:
        return scene.inbox.accept(frame(EAGER, key_of(sequence), 1, fingerprint=0), memoryview(bytes([sequence])))

    assert offer(0)
    assert not offer(2)
    scene.arrive(2)
    assert not offer(1)
    scene.arrive(1)
    assert offer(3)
    assert scene.delivered == [b"\0", b"\1", b"\2", b"\3"]
    assert not offer(3)


def test_whole_messages_spend_and_return_credit_like_others(scene: Scene) -> None:
    payload = memoryview(bytes(EAGER_LIMIT))
    count = EAGER_WINDOW // (EAGER_LIMIT + HEADER_BYTES)
    for sequence in range(count):
        assert scene.inbox.accept(frame(EAGER, key_of(sequence), EAGER_LIMIT, fingerprint=0), payload)
    with pytest.raises(ProtocolError, match="overspent"):
        scene.inbox.accept(frame(EAGER, key_of(count), EAGER_LIMIT, fingerprint=0), payload)
    for release in scene.releases:
        release()
    assert [kind for kind, *_ in scene.emitted.take()] == [FrameKind.CREDIT] * 3


def test_whole_messages_are_copies_that_can_be_written(scene: Scene) -> None:
    payloads: list[memoryview] = []
    inbox = MessageInbox(
        deliver=lambda payload, release: payloads.append(payload), emit=scene.emitted, max_bytes=10, budget=10
    )
    source = bytearray(b"abc")
    assert inbox.accept(frame(EAGER, key_of(0), 3, fingerprint=0), memoryview(source))
    source[:] = b"xyz"
    payloads[0][0] = 65
    assert bytes(payloads[0]) == b"Abc"
