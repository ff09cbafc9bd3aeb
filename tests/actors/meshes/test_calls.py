"""Many calls as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import pytest

from asyncpar.actors.meshes.calls import Notices, collect, items, results
from asyncpar.actors.meshes.shape import MeshShape
from asyncpar.actors.meshes.values import MeshError
from asyncpar.errors import PeerLost, RemoteError

PAIR = MeshShape.line(range(2))


def quiet() -> Notices:
    return Notices(0, range(2), lambda failed, text: None)


async def give(value: str, after: asyncio.Event | None = None) -> str:
    if after is not None:
        await after.wait()
    return value


async def fail(rank: int) -> str:
    raise RemoteError("no", rank=rank, type_name="ValueError", remote_traceback="")


async def wait_for_ever(begun: list[int], ended: list[int], rank: int) -> str:
    begun.append(rank)
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        ended.append(rank)
    return ""


async def test_values_come_in_mesh_order_for_any_order_of_replies() -> None:
    first_is_done = asyncio.Event()

    async def release() -> str:
        first_is_done.set()
        return "b"

    values = await collect("step", PAIR, {0: give("a", first_is_done), 1: release()}, quiet())
    assert list(values.by_rank().items()) == [(0, "a"), (1, "b")]


async def test_a_failure_leaves_the_others_alone_and_their_values_in_the_error() -> None:
    late = asyncio.Event()
    call = asyncio.ensure_future(collect("step", PAIR, {0: fail(0), 1: give("b", late)}, quiet()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not call.done()
    late.set()
    with pytest.raises(MeshError, match="step failed on 1 of 2 ranks") as caught:
        await call
    assert caught.value.values.by_rank() == {1: "b"}


@dataclass(frozen=True)
class FrozenError(Exception):
    """An exception that takes no notes."""

    code: int


async def stop_badly(error: Exception) -> str:
    raise error


@pytest.mark.parametrize("error", [LookupError("nothing to stop"), FrozenError(3)], ids=["plain", "frozen"])
async def test_what_user_code_of_this_rank_raises_is_a_failure_like_others(error: Exception) -> None:
    late = asyncio.Event()
    call = asyncio.ensure_future(collect("stop", PAIR, {0: stop_badly(error), 1: give("b", late)}, quiet()))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not call.done()
    late.set()
    with pytest.raises(MeshError, match="stop failed on 1 of 2 ranks") as caught:
        await call
    assert caught.value.exceptions == (error,)


async def test_cancelling_a_call_cancels_it_everywhere() -> None:
    begun: list[int] = []
    ended: list[int] = []
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await collect("step", PAIR, {rank: wait_for_ever(begun, ended, rank) for rank in range(2)}, quiet())
    assert (begun, sorted(ended)) == ([0, 1], [0, 1])


async def test_results_are_taken_as_they_arrive() -> None:
    late = asyncio.Event()
    seen = []
    async for place, value in results("step", PAIR, {0: give("a", late), 1: give("b")}, quiet()):
        seen.append((place["rank"], value))
        late.set()
    assert seen == [(1, "b"), (0, "a")]


async def test_failures_come_after_all_results() -> None:
    reading = results("step", PAIR, {0: fail(0), 1: give("b")}, quiet())
    place, value = await anext(reading)
    assert (place["rank"], value) == (1, "b")
    with pytest.raises(MeshError) as caught:
        await anext(reading)
    assert [type(error) for error in caught.value.exceptions] == [RemoteError]
    assert caught.value.values.by_rank() == {1: "b"}


async def test_who_stops_reading_results_cancels_the_rest() -> None:
    begun: list[int] = []
    ended: list[int] = []
    reading = results("step", PAIR, {0: give("a"), 1: wait_for_ever(begun, ended, 1)}, quiet())
    assert (await anext(reading))[1] == "a"
    await reading.aclose()
    assert (begun, ended) == ([1], [1])


async def count(to: int, error: Exception | None = None) -> AsyncGenerator[int, None]:
    for number in range(to):
        yield number
    if error is not None:
        raise error


async def test_items_of_all_streams_come_with_their_places_each_stream_in_its_order() -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}
    async for place, number in items("count", PAIR, {0: count(3), 1: count(2)}, quiet()):
        seen[place["rank"]].append(number)
    assert seen == {0: [0, 1, 2], 1: [0, 1]}


async def test_a_stream_that_fails_does_not_end_the_others() -> None:
    reading = items("count", PAIR, {0: count(1, PeerLost("gone", rank=0)), 1: count(4)}, quiet())
    seen = [(place["rank"], number) for place, number in [await anext(reading) for _ in range(5)]]
    with pytest.raises(MeshError) as caught:
        await anext(reading)
    assert sorted(seen) == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert [type(error) for error in caught.value.exceptions] == [PeerLost]
