"""Meshes of actors in a world of four ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import asyncpar as ap
from asyncpar.actors.meshes.mesh_ref import MeshRef
from asyncpar.actors.meshes.shape import NoSuchPlace
from asyncpar.actors.meshes.values import MeshError
from asyncpar.errors import NotFound, UsageError


@dataclass
class Settings:
    start: int
    breaks_on: int = -1


class Trainer(ap.Actor):
    """Remembers its messages."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.notes: list[str] = []
        self.gate = asyncio.Event()

    async def on_start(self) -> None:
        if self.rank == self.settings.breaks_on:
            raise ValueError("cannot start here")

    @ap.endpoint
    async def where(self, n: int = 0) -> int:
        return self.settings.start + 10 * self.rank + n

    @ap.endpoint
    async def total(self, x: NDArray[np.float64]) -> float:
        x += self.rank  # its own copy
        return float(x.sum())

    @ap.endpoint
    async def fail_on(self, rank: int) -> int:
        if self.rank == rank:
            raise ValueError(f"not on {rank}")
        return self.rank

    @ap.endpoint
    async def note(self, word: str) -> None:
        self.notes.append(word)

    @ap.endpoint
    async def report_notes(self) -> list[str]:
        return self.notes

    @ap.endpoint(concurrency=8)
    async def wait(self) -> int:
        await self.gate.wait()
        return self.rank

    @ap.endpoint(concurrency=8)
    async def release(self) -> None:
        self.gate.set()

    @ap.endpoint
    async def time_left(self, after: float) -> float | None:
        await asyncio.sleep(after)
        return ap.time_left()

    @ap.endpoint
    async def count(self, to: int) -> AsyncIterator[int]:
        for number in range(to):
            yield 10 * self.rank + number

    @ap.endpoint
    async def choose(self, n: int) -> int:
        return n


async def spawn(node: ap.Node, **settings: int) -> MeshRef[Trainer]:
    return await node.nodes.reshape(dp=2, tp=2).spawn(Trainer, Settings(100, **settings), name="trainer")


@pytest.mark.promise("mesh-call")
@pytest.mark.parametrize("transport", ["inproc", "tcp", "grpc"])
async def test_all_are_called_and_answer_with_their_places(transport: str) -> None:
    async with ap.testing.local_world(4, transport=transport) as nodes:
        trainers = await spawn(nodes[1])
        values = await trainers.where(n=1)
        assert [(tuple(place.values()), value) for place, value in values.items()] == [
            ((0, 0), 101),
            ((0, 1), 111),
            ((1, 0), 121),
            ((1, 1), 131),
        ]
        typed = await trainers.all(Trainer.where)(2)
        assert typed.at(dp=1, tp=0) == 122
        x = np.zeros(100_000)
        totals = await trainers.all(Trainer.total)(x)
        assert list(totals.values()) == [0.0, 1e5, 2e5, 3e5]
        assert not x.any()


@pytest.mark.promise("mesh-failure")
async def test_a_failure_comes_with_its_place_and_the_values_of_the_others() -> None:
    async with ap.testing.local_world(4) as nodes:
        trainers = await spawn(nodes[0])
        with pytest.raises(MeshError, match="fail_on failed on 1 of 4 ranks") as caught:
            await trainers.fail_on(2)
        (error,) = caught.value.exceptions
        assert isinstance(error, ap.RemoteError)
        assert (error.rank, error.type_name, error.message) == (2, "ValueError", "not on 2")
        assert error.__notes__[-1:] == ["from rank 2 at dp=1, tp=0 of a mesh of dp 2 x tp 2"]
        assert caught.value.values.by_rank() == {0: 0, 1: 1, 3: 3}


async def test_a_wrong_call_is_refused_before_anything_is_sent() -> None:
    async with ap.testing.local_world(4) as nodes:
        trainers = await spawn(nodes[0])
        sent = nodes[0].bytes_sent
        with pytest.raises(NotFound, match="nothing: Trainer has no endpoint of this name"):
            await trainers.nothing()
        with pytest.raises(NotFound, match="_notes: private names"):
            trainers._notes  # noqa: B018, SLF001  # the access is what is tested: a private name is refused
        with pytest.raises(ap.UsageError, match=r"takes .* got 2 positional arguments"):
            await trainers.where(1, 2)
        with pytest.raises(ap.UsageError, match=r"argument 1 of note\(\): a value of type object cannot be sent"):
            await trainers.note(object())
        with pytest.raises(ap.UsageError, match=r"argument 1 of note\(\): a value of type object cannot be sent"):
            trainers.note.tell(object())
        with pytest.raises(ap.UsageError, match="a stream can be read once"):
            await trainers.note(_words())
        assert nodes[0].bytes_sent == sent
        assert (await trainers.where()).at(dp=0, tp=0) == 100


async def _words() -> AsyncIterator[str]:
    yield "never"


@pytest.mark.promise("mesh-stream")
async def test_results_can_be_taken_as_they_arrive() -> None:
    async with ap.testing.local_world(4) as nodes:
        trainers = await spawn(nodes[0])
        results = trainers.all(Trainer.wait).as_completed()
        arrived = []
        first = asyncio.ensure_future(anext(results))
        for rank in (3, 0, 2, 1):
            await trainers.select([rank]).release()
            place, value = await (first if rank == 3 else anext(results))
            arrived.append((place["dp"], place["tp"], value))
        assert arrived == [(1, 1, 3), (0, 0, 0), (1, 0, 2), (0, 1, 1)]
        with pytest.raises(StopAsyncIteration):
            await anext(results)


async def test_items_of_all_actors_come_with_their_places() -> None:
    async with ap.testing.local_world(4) as nodes:
        trainers = await spawn(nodes[0])
        seen: dict[int, list[int]] = {rank: [] for rank in range(4)}
        async for place, item in trainers.all(Trainer.count).stream(3):
            seen[trainers.shape.at(place)].append(item)
        assert seen == {rank: [10 * rank + number for number in range(3)] for rank in range(4)}


async def test_who_leaves_a_loop_over_items_ends_the_streams() -> None:
    async with ap.testing.local_world(2) as nodes:
        trainers = await nodes[0].nodes.spawn(Trainer, Settings(0))
        streams = trainers.all(Trainer.count).stream(1_000_000)
        await anext(streams)
        await streams.aclose()
        assert list((await trainers.where()).values()) == [0, 10]


async def test_what_is_told_to_all_reaches_all_in_order() -> None:
    async with ap.testing.local_world(4) as nodes:
        trainers = await spawn(nodes[0])
        trainers.note.tell("one")
        await trainers.slice(tp=1).note.tell("two")
        notes = await trainers.report_notes()
        assert list(notes.values()) == [["one"], ["one", "two"], ["one"], ["one", "two"]]


@pytest.mark.promise("mesh-slice")
async def test_parts_and_single_actors_can_be_called() -> None:
    async with ap.testing.local_world(4) as nodes:
        trainers = await spawn(nodes[0])
        row = trainers.slice(dp=1)
        assert (row.axes, row.sizes, row.ranks, len(row)) == (("tp",), {"tp": 2}, (2, 3), 2)
        assert (await row.where()).at(tp=1) == 130
        one = trainers.at(dp=0, tp=1)
        assert await one.where(1) == 111
        assert [await ref.where() for ref in trainers.refs] == [100, 110, 120, 130]
        assert trainers.coordinates(3) == {"dp": 1, "tp": 1}
        with pytest.raises(NoSuchPlace, match=r"tp: expected a coordinate 0\.\.1, got 2"):
            trainers.at(dp=0, tp=2)
        with pytest.raises(NoSuchPlace, match="axis: expected one of dp, tp, got 'pp'"):
            trainers.slice(pp=0)


async def test_the_least_busy_actor_is_chosen_and_equals_take_turns() -> None:
    async with ap.testing.local_world(4) as nodes:
        trainers = await spawn(nodes[0])
        assert [await trainers.choose().where() for _ in range(5)] == [100, 110, 120, 130, 100]
        busy = [asyncio.ensure_future(trainers.select([rank]).wait()) for rank in (0, 2)]
        await asyncio.sleep(0)
        assert [await trainers.choose().where() for _ in range(3)] == [110, 130, 110]
        await trainers.release()
        await asyncio.gather(*busy)


async def test_endpoints_with_names_of_the_mesh_are_reached_by_all() -> None:
    async with ap.testing.local_world(2) as nodes:
        trainers = await nodes[0].nodes.spawn(Trainer, Settings(0))
        assert list((await trainers.all(Trainer.choose)(7)).values()) == [7, 7]


async def test_all_takes_an_endpoint_and_not_its_name() -> None:
    async with ap.testing.local_world(1) as nodes:
        trainers: Any = await nodes[0].nodes.spawn(Trainer, Settings(0))
        with pytest.raises(UsageError, match=r"endpoint: expected one as the class has it .*, got 'step'"):
            trainers.all("step")


async def test_all_start_or_none() -> None:
    async with ap.testing.local_world(4) as nodes:
        with pytest.raises(MeshError, match="spawn failed on 1 of 4 ranks") as caught:
            await spawn(nodes[0], breaks_on=2)
        (error,) = caught.value.exceptions
        assert isinstance(error, ap.RemoteError)
        assert (error.rank, error.type_name) == (2, "ValueError")
        assert caught.value.values == {}
        trainers = await spawn(nodes[0])
        assert len(await trainers.where()) == 4


async def test_a_name_that_is_taken_somewhere_is_refused_and_its_owner_lives_on() -> None:
    async with ap.testing.local_world(2) as nodes:
        owner = await nodes[1].spawn(Trainer, Settings(7), name="trainer")
        with pytest.raises(MeshError) as caught:
            await nodes[0].nodes.spawn(Trainer, Settings(0), name="trainer")
        (error,) = caught.value.exceptions
        assert isinstance(error, ap.UsageError)
        assert "'trainer' is taken by another actor on rank 1" in str(error)
        assert await owner.where() == 17


async def test_constructor_arguments_that_cannot_be_sent_are_refused_at_once() -> None:
    async with ap.testing.local_world(2) as nodes:
        with pytest.raises(ap.UsageError, match=r"argument 1 of Trainer\(\): a value of type object"):
            await nodes[0].nodes.spawn(Trainer, object())
        with pytest.raises(ap.UsageError, match=r"Trainer.* misses 'settings'"):
            await nodes[0].nodes.spawn(Trainer)
        with pytest.raises(ap.UsageError, match="name: expected 1 to 255 printable characters, got ''"):
            await nodes[0].nodes.spawn(Trainer, Settings(0), name="")
        with pytest.raises(ap.UsageError, match="actor class: expected a subclass of Actor, got 7"):
            await nodes[0].nodes.spawn(7)  # type: ignore[arg-type]


async def test_a_spawn_that_is_cancelled_leaves_no_actors_behind() -> None:
    async with ap.testing.local_world(2) as nodes:
        latch = await nodes[0].spawn(Latch, 2)
        spawning = asyncio.ensure_future(nodes[0].nodes.spawn(Slow, latch, 1, name="slow"))
        await latch.wait()
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning
        downs = [await nodes[0].watch(nodes[0].ref("slow", rank=rank)) for rank in range(2)]
        assert all(
            down.reason in (ap.DownReason.STOPPED, ap.DownReason.MISSING, ap.DownReason.KILLED) for down in downs
        )


class Latch(ap.Actor):
    """Opens when enough others have arrived."""

    def __init__(self, expected: int) -> None:
        self.missing = expected
        self.is_open = asyncio.Event()

    @ap.endpoint
    async def arrive(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.is_open.set()

    @ap.endpoint(concurrency=1)
    async def wait(self) -> None:
        await self.is_open.wait()


class Slow(ap.Actor):
    """Never gets ready on one rank."""

    def __init__(self, latch: Latch, stuck: int) -> None:
        self.latch = latch
        self.stuck = stuck

    async def on_start(self) -> None:
        await self.latch.arrive()
        if self.rank == self.stuck:
            await asyncio.get_running_loop().create_future()


async def test_cancelling_a_call_cancels_it_on_all_ranks() -> None:
    async with ap.testing.local_world(4) as nodes:
        trainers = await spawn(nodes[0])
        call = asyncio.ensure_future(trainers.wait())
        await trainers.where()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(30):  # nothing is left that a stop would have to wait for
            await trainers.stop()


def test_a_timeout_around_a_call_is_seen_by_all_actors() -> None:
    async def main() -> None:
        async with ap.testing.local_world(2) as nodes:
            trainers = await nodes[0].nodes.spawn(Trainer, Settings(0))
            async with asyncio.timeout(60):
                left = await trainers.time_left(after=10)
            assert list(left.values()) == pytest.approx([50.0, 50.0], abs=0.1)

    ap.testing.run_virtual(main())


async def test_the_ends_of_all_actors_are_reported_once_each() -> None:
    async with ap.testing.local_world(4) as nodes:
        trainers = await spawn(nodes[0])
        watch = trainers.watch()
        await trainers.slice(dp=1).stop()
        await trainers.slice(dp=0).kill()
        downs = {trainers.shape.at(place): down.reason async for place, down in watch}
        stopped, killed = ap.DownReason.STOPPED, ap.DownReason.KILLED
        assert downs == {0: killed, 1: killed, 2: stopped, 3: stopped}
        with pytest.raises(MeshError, match="where failed on 4 of 4 ranks") as caught:
            await trainers.where()
        assert {type(error) for error in caught.value.exceptions} == {ap.ActorDown}


async def test_a_watch_that_is_cancelled_reports_only_what_has_ended() -> None:
    async with ap.testing.local_world(2) as nodes:
        trainers = await nodes[0].nodes.spawn(Trainer, Settings(0))
        watch = trainers.watch()
        await trainers.select([1]).stop()
        place, _ = await anext(watch)
        assert place["rank"] == 1
        watch.cancel()
        assert [place async for place, _ in watch] == []


async def test_an_actor_can_spawn_and_call_a_mesh_by_references() -> None:
    async with ap.testing.local_world(2) as nodes:
        trainers = await nodes[0].nodes.spawn(Trainer, Settings(3))
        caller = await nodes[1].spawn(Caller)
        assert await caller.call_all(list(trainers.refs)) == [3, 13]


class Caller(ap.Actor):
    """Calls actors that it is given."""

    @ap.endpoint
    async def call_all(self, trainers: list[Trainer]) -> list[int]:
        return [await trainer.where() for trainer in trainers]


async def test_nodes_have_axes_and_places() -> None:
    async with ap.testing.local_world(4) as nodes:
        world = nodes[2].nodes
        assert (world.axes, world.sizes, world.ranks, len(world)) == (("rank",), {"rank": 4}, (0, 1, 2, 3), 4)
        grid = world.reshape(dp=2, tp=-1)
        assert grid.coordinates(2) == {"dp": 1, "tp": 0}
        assert grid.at(dp=1, tp=1) == 3
        assert grid.slice(dp=0).ranks == (0, 1)
        assert world.select([0, 2]).sizes == {"member": 2}
        assert repr(grid) == "<mesh of dp 2 x tp 2 of nodes>"
        html = grid._repr_html_()  # the name that notebooks call
        assert html.startswith("<table><thead><tr><th>mesh of dp 2 x tp 2 of nodes</th><th>rank</th></tr>")
        assert html.count("<tr>") == 5
        assert "<td>dp=1, tp=0</td><td>2</td>" in html


async def test_a_mesh_of_some_ranks_leaves_the_others_alone() -> None:
    async with ap.testing.local_world(4) as nodes:
        trainers = await nodes[0].nodes.select([3, 1]).spawn(Trainer, Settings(0), name="pair")
        assert list((await trainers.where()).values()) == [30, 10]
        assert repr(trainers) == "<mesh of member 2 of Trainer 'pair'>"
        assert "<tr><td>member=0</td><td>3</td></tr><tr><td>member=1</td><td>1</td></tr>" in trainers._repr_html_()
        with pytest.raises(ap.UsageError, match="no actor 'pair' on rank 2"):
            await nodes[0].ref("pair", rank=2).where()
