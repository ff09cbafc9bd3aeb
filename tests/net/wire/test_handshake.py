from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncpar.errors import AuthenticationError
from asyncpar.net.wire.handshake import Handshake, LinkTerms

SECRET = b"s" * 32
TERMS = LinkTerms(job="train", generation=2, dialer=5, listener=3, token=b"t" * 16)
DIALER_NONCE, LISTENER_NONCE = b"d" * 32, b"l" * 32


def dialer(terms: LinkTerms = TERMS, secret: bytes = SECRET, nonce: bytes = DIALER_NONCE) -> Handshake:
    return Handshake.dial(terms, secret=secret, nonce=nonce)


def listener(terms: LinkTerms | None = TERMS, secret: bytes = SECRET, nonce: bytes = LISTENER_NONCE) -> Handshake:
    return Handshake.listen(
        lambda token: terms if terms is not None and token == terms.token else None, secret=secret, nonce=nonce
    )


def give(handshake: Handshake, message: bytes, portion: int = 1000) -> bytes:
    """Give all of ``message``, and return the answers."""
    answer = b""
    while message:
        place = handshake.buffer()
        assert len(place) > 0, "the handshake took too little"
        count = min(len(place), portion, len(message))
        place[:count] = message[:count]
        answer += handshake.advance(count)
        message = message[count:]
    return answer


@pytest.mark.parametrize("portion", [1, 7, 1000])
def test_both_sides_with_the_secret_complete(portion: int) -> None:
    one, other = dialer(), listener()
    challenge = give(other, one.opening, portion)
    assert (other.is_trusted, other.is_complete) == (True, False)
    proof = give(one, challenge, portion)
    assert one.is_complete
    assert give(other, proof, portion) == b""
    assert other.is_complete
    assert other.terms == TERMS


def test_no_byte_beyond_the_handshake_is_asked_for() -> None:
    one, other = dialer(), listener()
    asked = len(other.buffer())
    assert asked == len(one.opening)
    challenge = give(other, one.opening)
    assert len(one.buffer()) == len(challenge)
    proof = give(one, challenge)
    assert len(other.buffer()) == len(proof)
    give(other, proof)
    assert len(one.buffer()) == len(other.buffer()) == 0


def test_a_dialer_with_another_secret_gets_no_byte() -> None:
    with pytest.raises(AuthenticationError, match="could not prove that it holds the secret"):
        give(listener(), dialer(secret=b"x" * 32).opening)


def test_a_listener_with_another_secret_is_refused() -> None:
    one = dialer()
    with pytest.raises(AuthenticationError, match="secret"):
        give(one, b"l" * 32 + b"m" * 32)
    assert not one.is_complete
    assert not one.is_trusted


@pytest.mark.parametrize(
    "other",
    [
        replace(TERMS, job="other"),
        replace(TERMS, generation=3),
        replace(TERMS, dialer=6),
        replace(TERMS, listener=4),
    ],
)
def test_terms_that_were_not_agreed_on_are_refused(other: LinkTerms) -> None:
    with pytest.raises(AuthenticationError, match="this side agreed on"):
        give(listener(), dialer(other).opening)


def test_an_unknown_token_is_refused() -> None:
    with pytest.raises(AuthenticationError, match="token"):
        give(listener(None), dialer().opening)


def test_a_replayed_dialer_cannot_answer_a_fresh_challenge() -> None:
    one, other = dialer(), listener()
    hello = one.opening
    proof = give(one, give(other, hello))
    replayed = listener(nonce=b"f" * 32)
    give(replayed, hello)
    with pytest.raises(AuthenticationError):
        give(replayed, proof)
    assert not replayed.is_complete


def test_a_replayed_listener_cannot_answer_a_fresh_hello() -> None:
    challenge = give(listener(), dialer().opening)
    with pytest.raises(AuthenticationError):
        give(dialer(nonce=b"f" * 32), challenge)


def test_reflected_messages_prove_nothing() -> None:
    one = dialer()
    with pytest.raises(AuthenticationError):
        give(one, one.opening[: len(one.buffer())])
    mirror = dialer(replace(TERMS, dialer=TERMS.listener, listener=TERMS.dialer))
    with pytest.raises(AuthenticationError):
        give(listener(), mirror.opening)
    two, other = dialer(), listener()
    challenge = give(other, two.opening)
    with pytest.raises(AuthenticationError):
        give(other, challenge[-32:])  # the listener's own MAC instead of the dialer's


@pytest.mark.parametrize(
    "opening",
    [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0", b"apLL", b"\0", b"SSH-2.0-x"],
)
def test_openings_of_other_protocols_are_refused_at_their_first_wrong_byte(opening: bytes) -> None:
    other = listener()
    with pytest.raises(AuthenticationError, match="the peer began with"):
        give(other, opening, portion=1)


def test_another_version_is_named() -> None:
    hello = bytearray(dialer().opening)
    hello[4] = 9
    with pytest.raises(AuthenticationError, match="speaks 4, the peer 9"):
        give(listener(), bytes(hello))


@settings(deadline=None)
@given(position=st.integers(0, 115), bit=st.integers(0, 7))
def test_no_bit_of_the_hello_can_be_changed(position: int, bit: int) -> None:
    hello = bytearray(dialer().opening)
    hello[position] ^= 1 << bit
    with pytest.raises(AuthenticationError):
        give(listener(), bytes(hello))


@settings(deadline=None)
@given(position=st.integers(0, 63), bit=st.integers(0, 7))
def test_no_bit_of_the_challenge_can_be_changed(position: int, bit: int) -> None:
    one = dialer()
    challenge = bytearray(give(listener(), one.opening))
    challenge[position] ^= 1 << bit
    with pytest.raises(AuthenticationError):
        give(one, bytes(challenge))


@settings(deadline=None)
@given(garbage=st.binary(max_size=400))
def test_garbage_is_refused_or_waits_for_more_and_is_never_answered(garbage: bytes) -> None:
    other = listener()
    answer = b""
    try:
        answer = give(other, garbage[:116])
    except AuthenticationError:
        assert not other.is_trusted
    assert answer == b""
    assert not other.is_complete


def test_a_truncated_handshake_stays_incomplete() -> None:
    one, other = dialer(), listener()
    assert give(other, one.opening[:-1]) == b""
    assert not other.is_trusted


def test_the_dialer_says_which_of_the_agreed_connections_it_opens() -> None:
    agreed = replace(TERMS, connections=3)
    for index in range(3):
        one, other = dialer(replace(agreed, connection=index)), listener(agreed)
        give(other, give(one, give(other, one.opening)))
        assert other.is_complete
        assert (other.terms.connection, other.terms.connections) == (index, 3)


def test_a_connection_that_was_not_agreed_on_is_refused() -> None:
    for other in (replace(TERMS, connections=4, connection=3), replace(TERMS, connections=3, connection=1)):
        with pytest.raises(AuthenticationError, match=r"this side agreed on .* connection . of 2"):
            give(listener(replace(TERMS, connections=2)), dialer(other).opening)


def test_a_message_for_one_connection_fits_no_other() -> None:
    agreed = replace(TERMS, connections=2)
    first, second = dialer(agreed), dialer(replace(agreed, connection=1))
    challenge = give(listener(agreed), first.opening)
    with pytest.raises(AuthenticationError):
        give(second, challenge)
