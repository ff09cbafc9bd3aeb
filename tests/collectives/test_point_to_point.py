"""Messages between two ranks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from asyncpar.collectives.ledger import ChannelLedger, GroupLedger
from asyncpar.collectives.protocol import ENVELOPE_BYTES, decode_envelope, encode_envelope
from asyncpar.errors import ProtocolError, UsageError
from tests.collectives.conftest import OpenRanks


@dataclass
class Point:
    x: int
    y: float


async def test_shape_and_dtype_travel_with_the_array(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        for array in (
            np.arange(6, dtype=np.int16).reshape(2, 3),
            np.array(2.5),
            np.empty((3, 0, 2), np.complex64),
            np.ones((2, 2), ml_dtypes.bfloat16),
            np.arange(20).reshape(4, 5).T[::2],
        ):
            _, received = await asyncio.gather(zero.send(array, 1), one.recv(0))
            assert received.dtype == array.dtype
            np.testing.assert_array_equal(received, array)


async def test_a_receive_posted_first_takes_the_first_message(open_ranks: OpenRanks) -> None:
    async with open_ranks(3) as ranks:
        zero, one, two = ranks.communicators
        receives = [zero.recv(), zero.recv(2), zero.recv(1), zero.recv()]
        for value in (1.0, 2.0):
            await one.send(np.array([10 + value]), 0)
            await two.send(np.array([20 + value]), 0)
        got = [float((await receive)[0]) for receive in receives]
        assert sorted(got) == [11.0, 12.0, 21.0, 22.0]
        assert got[1] in (21.0, 22.0)
        assert got[2] in (11.0, 12.0)


async def test_out_may_have_any_layout(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        out = np.zeros((6, 4))[::2].T
        sent = np.arange(12.0).reshape(4, 3)
        _, received = await asyncio.gather(zero.send(sent, 1), one.recv(0, out=out))
        assert received is out
        np.testing.assert_array_equal(out, sent)


async def test_messages_of_different_groups_do_not_meet(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        pairs = [c.subgroup((1, 0)) for c in ranks.communicators]
        assert pairs[0] is not None
        assert pairs[1] is not None
        await zero.send(np.array([1.0]), 1)
        await pairs[0].send(np.array([2.0]), 0)
        assert float((await pairs[1].recv(1))[0]) == 2.0
        assert float((await one.recv(0))[0]) == 1.0


async def test_objects_are_sent_and_checked(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        _, value = await asyncio.gather(zero.send_object(Point(1, 2.5), 1), one.recv_object(0, wanted=Point))
        assert value == Point(1, 2.5)
        await zero.send_object([1, "a", None], 1)
        assert await one.recv_object() == [1, "a", None]
        with pytest.raises(UsageError, match=r"value, at \.\w+: a value of type \S+ cannot be sent"):
            await zero.send_object(ranks, 1)


async def test_arrays_and_objects_are_not_mixed_up(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        await zero.send_object("text", 1)
        with pytest.raises(UsageError, match="rank 0 sends an object where rank 1 receives an array; use recv_object"):
            await one.recv(0)
        await zero.send(np.zeros(2), 1)
        with pytest.raises(UsageError, match=r"rank 0 sends float64\[2\] where rank 1 receives an object; use recv"):
            await one.recv_object(0)


@pytest.mark.parametrize("tag", [-1, 1 << 16, True, "0"])
async def test_a_tag_out_of_range_is_refused(open_ranks: OpenRanks, tag: int) -> None:
    async with open_ranks(2) as ranks:
        with pytest.raises(UsageError, match=r"tag: expected an integer 0\.\.65535"):
            await ranks.communicators[0].send(np.zeros(1), 1, tag=tag)


async def test_a_group_of_one_has_nobody_to_talk_to(open_ranks: OpenRanks) -> None:
    async with open_ranks(1) as ranks:
        alone = ranks.communicators[0]
        with pytest.raises(UsageError, match="no other rank"):
            await alone.recv()
        with pytest.raises(UsageError, match="dest: expected another rank"):
            await alone.send(np.zeros(1), 0)


async def test_nothing_is_left_behind_by_many_messages(open_ranks: OpenRanks) -> None:
    async with open_ranks(2) as ranks:
        zero, one = ranks.communicators
        for _ in range(200):
            await asyncio.gather(zero.send(np.zeros(3), 1), one.recv())
        table = ranks.links[1].operations
        groups = table._groups.values()  # type: ignore[attr-defined]  # noqa: SLF001  # operations left in the table show nowhere but in memory
        assert sum(len(group.active) + len(group.loose) for group in groups) <= 1
        assert max(len(group.history) for group in groups) <= 256


def test_an_envelope_says_dtype_and_shape() -> None:
    content = encode_envelope(np.zeros((3, 4), np.float16), is_object=False)
    assert len(content) == ENVELOPE_BYTES
    envelope = decode_envelope(content)
    assert envelope.dtype == np.float16
    assert (envelope.shape, envelope.nbytes, str(envelope)) == ((3, 4), 24, "float16[3,4]")


@pytest.mark.parametrize(("offset", "value"), [(0, 99), (1, 17), (2, 3), (8, 7), (16, 255)])
def test_an_envelope_that_lies_is_refused(offset: int, value: int) -> None:
    content = bytearray(encode_envelope(np.zeros((3, 4)), is_object=False))
    content[offset] = value
    with pytest.raises(ProtocolError, match="message envelope"):
        decode_envelope(content)


def test_what_has_no_envelope_is_refused() -> None:
    with pytest.raises(UsageError, match="at most 16 dimensions, got 17"):
        encode_envelope(np.zeros((1,) * 17), is_object=False)
    with pytest.raises(UsageError, match="x: expected one of bool, int8"):
        encode_envelope(np.zeros(1, np.longdouble), is_object=False)


def test_numbers_are_past_once_they_are_allotted() -> None:
    ledger = GroupLedger()
    ledger.last += 2
    assert [ledger.is_past(number) for number in (1, 2, 3)] == [True, True, False]


def test_the_same_use_of_a_key_has_the_same_number_everywhere() -> None:
    one, other = GroupLedger(), GroupLedger()
    numbers = [one.allot_keyed("a", ()), one.allot_keyed("b", ()), one.allot_keyed("a", ())]
    assert [other.allot_keyed("b", ()), other.allot_keyed("a", ()), other.allot_keyed("a", ())] == [
        numbers[1],
        numbers[0],
        numbers[2],
    ]
    assert [use for _, use in numbers] == [1, 1, 2]
    assert len({number for number, _ in numbers}) == 3
    assert all(one.is_past(number) for number, _ in numbers)
    assert not GroupLedger().is_past(numbers[0][0])


def test_few_keyed_numbers_are_remembered_but_never_active_ones_forgotten() -> None:
    ledger = GroupLedger()
    first, _ = ledger.allot_keyed("first", ())
    for i in range(5000):
        ledger.allot_keyed(f"key {i}", {first})
    assert ledger.is_past(first)
    for i in range(5000):
        ledger.allot_keyed(f"key {i}", ())
    assert not ledger.is_past(first)
    assert len(ledger._keyed) == 4096  # noqa: SLF001  # the bound of what is remembered shows nowhere else


def test_messages_are_numbered_by_tag() -> None:
    ledger = ChannelLedger()
    numbers = [ledger.allot(0), ledger.allot(7), ledger.allot(0)]
    assert len(set(numbers)) == 3
    assert all(ledger.is_past(number) for number in numbers)
    assert not ledger.is_past(numbers[2] + 1)
    assert not ledger.is_past(8 << 47)
