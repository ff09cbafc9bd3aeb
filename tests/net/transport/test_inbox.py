"""The receiving half of a link, as a conversation: no loop, no lane."""

from __future__ import annotations

import pytest

from asyncpar.errors import OperationMismatch, PeerLost, ProtocolError
from asyncpar.net.transport import flow_control as inbox_module
from asyncpar.net.transport.flow_control import EAGER_LIMIT, EAGER_WINDOW, Inbox
from asyncpar.net.wire.frame import HEADER_BYTES, FrameKind, Key
from tests.net.transport.conversation import Emitted, Judge, Outcome, frame

KEY = Key(1, 2, 3)
LARGE = EAGER_LIMIT + 1
EAGER, BULK, REQUEST = FrameKind.EAGER, FrameKind.BULK, FrameKind.REQUEST


class Scene:
    """An inbox, and what it says."""

    def __init__(self) -> None:
        self.judge = Judge()
        self.emitted = Emitted()
        self.inbox = Inbox(referee=self.judge, emit=self.emitted)

    def post(self, buffer: bytearray, key: Key = KEY, *, fingerprint: int = 7) -> Outcome:
        outcome = Outcome()
        self.inbox.post(key, fingerprint, memoryview(buffer), outcome)
        return outcome

    def arrive(self, payload: bytes, key: Key = KEY, *, kind: FrameKind = EAGER, fingerprint: int = 7) -> bool:
        """Let a whole frame arrive; True if it landed somewhere."""
        header = frame(kind, key, len(payload), fingerprint=fingerprint)
        place = self.inbox.lend(header)
        if place is None:
            return False
        place[:] = payload
        self.inbox.landed(header)
        return True

    def take(self, length: int, key: Key = KEY, *, fingerprint: int = 7) -> bytes | None:
        buffer = bytearray(length)
        return bytes(buffer) if self.inbox.take_early(key, fingerprint, memoryview(buffer)) else None

    def returned_credit(self) -> int:
        """Return the credit that has gone back, or is about to."""
        credit = [value for kind, _, _, value in self.emitted.frames if kind is FrameKind.CREDIT]
        return sum(credit) + self.inbox._owed  # noqa: SLF001  # credit that is due and not yet sent back is told to nobody


@pytest.fixture
def scene() -> Scene:
    return Scene()


# -- payloads and receives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "length"), [(EAGER, 0), (EAGER, 5), (EAGER, EAGER_LIMIT), (BULK, LARGE)])
def test_a_payload_lands_in_the_memory_posted_for_it(scene: Scene, kind: FrameKind, length: int) -> None:
    buffer = bytearray(length)
    outcome = scene.post(buffer)
    assert scene.arrive(b"x" * length, kind=kind)
    assert outcome == Outcome(is_done=True)
    assert buffer == b"x" * length
    assert scene.inbox.early_bytes == 0


def test_a_payload_that_nobody_wants_yet_waits_and_is_taken_once(scene: Scene) -> None:
    assert scene.arrive(b"early")
    assert scene.inbox.early_bytes == 5 + HEADER_BYTES
    assert scene.take(5, Key(1, 2, 4)) is None
    assert scene.take(5) == b"early"
    assert scene.take(5) is None
    assert scene.inbox.early_bytes == 0


def test_payloads_meet_their_receives_in_any_order(scene: Scene) -> None:
    buffers = {sequence: bytearray(1) for sequence in range(4)}
    outcomes = {sequence: scene.post(buffers[sequence], Key(1, sequence, 0)) for sequence in range(4)}
    for sequence in (2, 0, 3, 1):
        scene.arrive(bytes([sequence]), Key(1, sequence, 0))
        assert outcomes[sequence].done()
    assert [bytes(buffer) for buffer in buffers.values()] == [b"\0", b"\1", b"\2", b"\3"]


def test_a_receive_posted_while_its_payload_arrives_elsewhere_gets_it(scene: Scene) -> None:
    header = frame(EAGER, KEY, 4)
    place = scene.inbox.lend(header)
    assert place is not None
    buffer = bytearray(4)
    outcome = scene.post(buffer)
    place[:] = b"late"
    scene.inbox.landed(header)
    assert outcome == Outcome(is_done=True)
    assert buffer == b"late"
    assert scene.inbox.early_bytes == 0


def test_a_key_has_one_receive(scene: Scene) -> None:
    scene.post(bytearray(1))
    with pytest.raises(AssertionError, match="already posted"):
        scene.post(bytearray(1))


def test_a_bulk_payload_that_was_never_granted_is_dropped(scene: Scene) -> None:
    assert not scene.arrive(bytes(LARGE), kind=BULK)
    assert scene.inbox.early_bytes == scene.returned_credit() == 0


def test_payloads_of_operations_that_are_over_are_dropped_and_give_credit_back(scene: Scene) -> None:
    scene.judge.stale.add(KEY[:2])
    assert not scene.arrive(b"stale")
    assert scene.returned_credit() == 5 + HEADER_BYTES


def test_a_payload_whose_operation_ends_while_it_arrives_is_dropped(scene: Scene) -> None:
    header = frame(EAGER, KEY, 4)
    scene.inbox.lend(header)
    scene.judge.stale.add(KEY[:2])
    scene.inbox.landed(header)
    assert scene.take(4) is None
    assert scene.inbox.early_bytes == 0
    assert scene.returned_credit() == 4 + HEADER_BYTES


# -- grants ------------------------------------------------------------------------------------------------------------


def test_only_large_receives_are_granted_unasked(scene: Scene) -> None:
    scene.post(bytearray(EAGER_LIMIT), Key(1, 0, 0))
    scene.post(bytearray(LARGE), Key(1, 1, 0), fingerprint=9)
    assert scene.emitted.take() == [(FrameKind.GRANT, Key(1, 1, 0), 9, LARGE)]


def test_a_request_is_granted_when_its_receive_is_posted(scene: Scene) -> None:
    scene.inbox.request(frame(REQUEST, KEY, 8))
    assert scene.emitted.take() == []
    scene.post(bytearray(5))
    assert scene.emitted.take() == [(FrameKind.GRANT, KEY, 7, 5)]


def test_a_request_for_a_posted_receive_is_granted_at_once(scene: Scene) -> None:
    scene.post(bytearray(5))
    scene.inbox.request(frame(REQUEST, KEY, 8))
    assert scene.emitted.take() == [(FrameKind.GRANT, KEY, 7, 5)]


def test_a_receive_is_granted_once(scene: Scene) -> None:
    scene.inbox.request(frame(REQUEST, KEY, 8))
    scene.post(bytearray(LARGE))
    scene.inbox.request(frame(REQUEST, KEY, 8))
    assert len(scene.emitted.take()) == 1


def test_requests_of_operations_that_are_over_are_dropped(scene: Scene) -> None:
    scene.judge.stale.add(KEY[:2])
    scene.inbox.request(frame(REQUEST, KEY, 8))
    scene.post(bytearray(5))
    assert scene.emitted.take() == []


def test_too_many_requests_break_the_protocol(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "MAX_PENDING", 3)
    for sequence in range(3):
        scene.inbox.request(frame(REQUEST, Key(1, sequence, 0), 8))
    with pytest.raises(ProtocolError, match="more than 3 requests"):
        scene.inbox.request(frame(REQUEST, Key(1, 3, 0), 8))


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_a_payload_of_another_length_fails_the_receive_posted_for_it(scene: Scene) -> None:
    outcome = scene.post(bytearray(3))
    assert not scene.arrive(b"four")
    assert isinstance(outcome.error, OperationMismatch)
    assert str(outcome.error).endswith("message 3: this rank expects 3 bytes, the peer sent 4")
    assert scene.returned_credit() == 4 + HEADER_BYTES


def test_an_early_payload_of_another_length_is_refused_and_used_up(scene: Scene) -> None:
    scene.arrive(b"four")
    with pytest.raises(OperationMismatch, match="expects 3 bytes, the peer sent 4"):
        scene.take(3)
    assert scene.inbox.early_bytes == 0


def test_a_payload_of_another_length_fails_the_receive_posted_while_it_arrived(scene: Scene) -> None:
    header = frame(EAGER, KEY, 4)
    scene.inbox.lend(header)
    outcome = scene.post(bytearray(3))
    scene.inbox.landed(header)
    assert isinstance(outcome.error, OperationMismatch)
    assert scene.inbox.early_bytes == 0


@pytest.mark.parametrize(("kind", "length"), [(EAGER, 4), (BULK, LARGE)])
def test_a_payload_of_another_operation_is_reported_and_dropped(scene: Scene, kind: FrameKind, length: int) -> None:
    outcome = scene.post(bytearray(length))
    assert not scene.arrive(bytes(length), kind=kind, fingerprint=8)
    assert [header.fingerprint for header in scene.judge.mismatches] == [8]
    assert not outcome.done()
    assert scene.returned_credit() == (length + HEADER_BYTES if kind is EAGER else 0)


def test_an_early_payload_of_another_operation_is_reported_when_its_receive_is_posted(scene: Scene) -> None:
    scene.arrive(b"four", fingerprint=8)
    assert scene.take(4) is None
    outcome = scene.post(bytearray(4))
    assert [(header.key, header.fingerprint) for header in scene.judge.mismatches] == [(KEY, 8)]
    assert not outcome.done()


def test_a_payload_of_another_operation_is_reported_if_its_receive_is_posted_while_it_arrives(scene: Scene) -> None:
    header = frame(EAGER, KEY, 4, fingerprint=8)
    scene.inbox.lend(header)
    outcome = scene.post(bytearray(4))
    scene.inbox.landed(header)
    assert [header.fingerprint for header in scene.judge.mismatches] == [8]
    assert not outcome.done()


def test_a_request_of_another_operation_is_reported_and_not_granted(scene: Scene) -> None:
    scene.post(bytearray(5))
    scene.inbox.request(frame(REQUEST, KEY, 8, fingerprint=8))
    assert [header.fingerprint for header in scene.judge.mismatches] == [8]
    assert scene.emitted.take() == []


# -- hostile senders ---------------------------------------------------------------------------------------------------


def test_an_oversize_eager_payload_breaks_the_protocol(scene: Scene) -> None:
    with pytest.raises(ProtocolError, match=f"at most {EAGER_LIMIT} bytes are allowed, got {LARGE}"):
        scene.inbox.lend(frame(EAGER, KEY, LARGE))


def test_overspent_credit_breaks_the_protocol_before_memory_is_given(scene: Scene) -> None:
    cost = EAGER_LIMIT + HEADER_BYTES
    within = EAGER_WINDOW // cost
    for sequence in range(within):
        scene.arrive(bytes(EAGER_LIMIT), Key(1, sequence, 0))
    with pytest.raises(ProtocolError, match="the peer overspent its credit"):
        scene.inbox.lend(frame(EAGER, KEY, EAGER_LIMIT))
    assert scene.inbox.early_bytes == within * cost


def test_two_payloads_for_one_key_break_the_protocol(scene: Scene) -> None:
    scene.arrive(b"one")
    with pytest.raises(ProtocolError, match="two payloads were sent"):
        scene.arrive(b"two")
    assert scene.take(3) == b"one"


# -- giving up ---------------------------------------------------------------------------------------------------------


def test_withdrawing_what_was_not_posted_does_nothing(scene: Scene) -> None:
    assert scene.inbox.withdraw(KEY) is False


def test_a_withdrawn_receive_gets_nothing(scene: Scene) -> None:
    buffer = bytearray(4)
    outcome = scene.post(buffer)
    assert scene.inbox.withdraw(KEY) is False
    scene.arrive(b"late")
    assert not outcome.done()
    assert buffer == bytes(4)


@pytest.mark.parametrize(("kind", "length", "credit"), [(EAGER, 4, 4 + HEADER_BYTES), (BULK, LARGE, 0)])
def test_withdrawing_a_receive_whose_payload_arrives_diverts_the_lane(
    scene: Scene, kind: FrameKind, length: int, credit: int
) -> None:
    outcome = scene.post(bytearray(length))
    scene.inbox.lend(frame(kind, KEY, length))
    assert scene.inbox.withdraw(KEY) is True
    assert scene.inbox.withdraw(KEY) is False
    assert not outcome.done()
    assert scene.returned_credit() == credit


def test_withdrawing_another_receive_than_the_arriving_one_does_not_divert_it(scene: Scene) -> None:
    scene.post(bytearray(4), Key(1, 0, 0))
    buffer = bytearray(4)
    outcome = scene.post(buffer)
    header = frame(EAGER, KEY, 4)
    place = scene.inbox.lend(header)
    assert place is not None
    assert scene.inbox.withdraw(Key(1, 0, 0)) is False
    place[:] = b"here"
    scene.inbox.landed(header)
    assert outcome.done()
    assert buffer == b"here"


def test_the_memory_of_a_cancelled_receive_is_not_lent(scene: Scene) -> None:
    buffer = bytearray(4)
    scene.post(buffer).cancel()
    assert scene.arrive(b"late")
    assert buffer == bytes(4)
    assert scene.take(4) == b"late"


def test_a_receive_cancelled_while_its_payload_arrives_stays_cancelled(scene: Scene) -> None:
    outcome = scene.post(bytearray(4))
    header = frame(EAGER, KEY, 4)
    scene.inbox.lend(header)
    outcome.cancel()
    scene.inbox.landed(header)
    assert outcome == Outcome(is_done=True)
    assert scene.returned_credit() == 4 + HEADER_BYTES


def test_a_receive_cancelled_while_its_payload_arrives_elsewhere_stays_cancelled(scene: Scene) -> None:
    header = frame(EAGER, KEY, 4)
    scene.inbox.lend(header)
    buffer = bytearray(b"mine")
    scene.post(buffer).cancel()
    scene.inbox.landed(header)
    assert buffer == b"mine"
    assert scene.inbox.early_bytes == 0


def test_a_cancelled_receive_is_not_failed_by_a_payload_of_another_length(scene: Scene) -> None:
    outcome = scene.post(bytearray(3))
    outcome.cancel()
    scene.arrive(b"four")
    assert outcome.error is None


def test_forgetting_an_operation_drops_its_payloads_and_requests_only(scene: Scene) -> None:
    for sequence in (1, 2):
        scene.arrive(b"early", Key(1, sequence, 0))
        scene.inbox.request(frame(REQUEST, Key(1, sequence, 1), 8))
    scene.inbox.forget(1, 2)
    assert scene.inbox.early_bytes == scene.returned_credit() == 5 + HEADER_BYTES
    assert scene.take(5, Key(1, 2, 0)) is None
    assert scene.take(5, Key(1, 1, 0)) == b"early"
    for sequence in (1, 2):
        scene.post(bytearray(1), Key(1, sequence, 1))
    assert [key for _, key, _, _ in scene.emitted.take()] == [Key(1, 1, 1)]


def test_a_failure_ends_every_receive_that_has_not_ended(scene: Scene) -> None:
    cancelled, waiting = scene.post(bytearray(1), Key(1, 0, 0)), scene.post(bytearray(1), Key(1, 1, 0))
    cancelled.cancel()
    error = PeerLost("gone", rank=1)
    scene.inbox.fail(error)
    assert cancelled.error is None
    assert waiting.error is error


def test_what_came_before_a_failure_can_still_be_taken(scene: Scene) -> None:
    scene.arrive(b"early")
    scene.inbox.fail(PeerLost("gone", rank=1))
    assert scene.take(5) == b"early"


# -- credit ------------------------------------------------------------------------------------------------------------


def test_credit_goes_back_in_lumps_of_a_quarter_of_the_window(scene: Scene) -> None:
    payload, cost = bytes(EAGER_LIMIT), EAGER_LIMIT + HEADER_BYTES
    consumed = 0
    while not scene.emitted.frames:
        scene.arrive(payload)
        assert scene.take(EAGER_LIMIT) == payload
        consumed += cost
    assert scene.emitted.take() == [(FrameKind.CREDIT, Key(0, 0, 0), 0, consumed)]
    assert EAGER_WINDOW // 4 <= consumed < EAGER_WINDOW // 4 + cost
    assert scene.inbox._owed == 0  # noqa: SLF001  # credit that is due and not yet sent back is told to nobody
