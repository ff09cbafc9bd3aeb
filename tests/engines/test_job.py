"""Jobs on engines and places that break: the caller always hears of it, whatever it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from asyncpar.engines import place_agent, rendezvous
from asyncpar.engines.elastic_place import ElasticPlace
from asyncpar.engines.function_call import encode_call
from asyncpar.engines.interface import (
    BeginRanks,
    Handle,
    JobSpec,
    Place,
    PlaceCommand,
    PlaceEvent,
    PlaceLost,
    PlacementEngine,
    PlaceOrder,
    PlaceReport,
    encode,
)
from asyncpar.engines.job import run_job
from asyncpar.engines.mesh import serve_actors
from asyncpar.engines.place_agent import PlaceAgent
from asyncpar.engines.place_node import PlaceNode
from asyncpar.engines.polled_place import pass_events_on
from asyncpar.errors import LaunchError
from tests.engines.consoles import RecordingConsole

PATIENCE = 10.0


class Broken(Exception):
    """What nobody expects of an engine."""


class StandIn(PlacementEngine, Handle):
    """Engine with one place; fails in the ``step`` named."""

    def __init__(self, step: str) -> None:
        self.step = step
        self.was_released = False

    async def allocate(self, spec: JobSpec) -> Sequence[Place]:
        self._break_in("allocate")
        return [Place(name="the place", host="a", address="127.0.0.1", slots=spec.ranks)]

    async def start(self, place: Place, order: PlaceOrder, take: Callable[[PlaceEvent], None]) -> Handle:
        del place, order, take
        self._break_in("start")
        return self

    async def failures(self) -> AsyncIterator[PlaceLost]:
        self._break_in("failures")
        await asyncio.Event().wait()
        yield PlaceLost(0, "it never comes here")

    async def release(self) -> None:
        self.was_released = True

    async def send(self, command: PlaceCommand) -> None:
        del command

    def _break_in(self, step: str) -> None:
        if step == self.step:
            raise Broken(step)


@pytest.mark.parametrize("step", ["allocate", "start", "failures"])
async def test_an_engine_that_breaks_ends_its_job_with_its_error(step: str) -> None:
    engine = StandIn(step)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(Broken, match=step):
            await run_job(engine, JobSpec(program=b"", ranks=1), RecordingConsole())
    assert engine.was_released


def order() -> PlaceOrder:
    return PlaceOrder(
        job="job",
        number=0,
        places=1,
        slots=1,
        address="127.0.0.1",
        secret=b"s" * 32,
        program=encode_call(serve_actors, ("127.0.0.1:1", 2, False), pickle=False),
        timeout=5.0,
        grace=1.0,
        max_restarts=0,
        environment={},
        transport=None,
    )


@pytest.mark.parametrize("kind", [PlaceAgent, PlaceNode, ElasticPlace])
@pytest.mark.parametrize("step", ["tempfile.mkdtemp", "write_secret"])
async def test_a_place_that_breaks_reports_why(
    kind: type[PlaceAgent | PlaceNode | ElasticPlace], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for module in (place_agent, rendezvous):
        monkeypatch.setattr(f"{module.__name__}.{step}", fail)
    events: list[PlaceEvent] = []
    place = kind(order(), events.append)
    place.obey(BeginRanks(""))
    async with asyncio.timeout(PATIENCE):
        await place.run()
    [report] = events
    assert isinstance(report, PlaceReport)
    assert report.exit_code != 0
    assert "No space left on device" in report.message


@pytest.mark.parametrize("error", [Broken("gone\nwith details"), OSError("gone\nwith details"), LaunchError("gone")])
async def test_a_polled_place_that_does_not_answer_is_lost(error: Exception) -> None:
    async def ask() -> list[bytes]:
        raise error

    events: list[PlaceEvent] = []
    causes: list[str] = []
    await pass_events_on(ask, events.append, causes.append)
    assert (events, causes) == ([], [f"died ({type(error).__name__}: gone)"])


async def test_a_polled_place_is_not_asked_again_after_its_report() -> None:
    answers: list[list[bytes]] = [[], [encode(PlaceReport(exit_code=3))]]

    async def ask() -> list[bytes]:
        return answers.pop(0)

    events: list[PlaceEvent] = []
    causes: list[str] = []
    await pass_events_on(ask, events.append, causes.append)
    assert (events, causes) == ([PlaceReport(exit_code=3)], [])
    assert not answers
