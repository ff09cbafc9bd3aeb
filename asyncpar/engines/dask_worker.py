"""The places of jobs on a Dask worker, with their agents."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from asyncpar.core.addresses import loopback
from asyncpar.engines.interface import PlaceReport, encode
from asyncpar.engines.polled_place import PolledPlace, describe_process

_PLACES = "_asyncpar_places"
_ENDED = "_asyncpar_ended"
_MOST_ENDED = 256
"""The number of places to remember that were ended before they had begun."""


def _places(worker: Any) -> dict[tuple[str, int], PolledPlace]:
    """Return the places on ``worker``; they live as long as it does."""
    places: dict[tuple[str, int], PolledPlace] = worker.__dict__.setdefault(_PLACES, {})
    return places


def _ended(worker: Any) -> dict[tuple[str, int], None]:
    """Return the places that were ended before they had begun, the oldest first."""
    ended: dict[tuple[str, int], None] = worker.__dict__.setdefault(_ENDED, {})
    return ended


async def describe_worker(dask_worker: Any = None) -> dict[str, str]:
    """Return the facts about this worker that the caller needs before it starts anything here."""
    place = urlsplit(dask_worker.address)
    is_on_network = place.scheme in ("tcp", "tls", "ucx") and place.hostname is not None
    return describe_process(str(place.hostname) if is_on_network else loopback())


async def start_place(job: str, number: int, order: bytes, on_loop: bool, dask_worker: Any = None) -> None:
    """Start the agent of an order, unless its place was ended: a stopped worker may get its calls in any order."""
    if (job, number) in _ended(dask_worker):
        return
    _places(dask_worker)[job, number] = PolledPlace(order, on_loop=on_loop)


async def place_events(job: str, number: int, dask_worker: Any = None) -> list[bytes]:
    """Return the encoded events of a place since the last call."""
    place = _places(dask_worker).get((job, number))
    if place is None:
        return [encode(PlaceReport(exit_code=1, message="the job has ended here"))]
    return await place.events()


async def send_to_place(job: str, number: int, command: bytes, dask_worker: Any = None) -> None:
    """Send a command to the agent of a place."""
    place = _places(dask_worker).get((job, number))
    if place is not None:
        place.send(command)


async def end_place(job: str, number: int, dask_worker: Any = None) -> None:
    """End a place with everything that runs there, and forget it."""
    place = _places(dask_worker).pop((job, number), None)
    if place is not None:
        await place.end()
        return
    ended = _ended(dask_worker)
    ended[job, number] = None
    while len(ended) > _MOST_ENDED:
        del ended[next(iter(ended))]


async def end_job(job: str, dask_worker: Any = None) -> None:
    """End all places of a job here, whose caller is gone."""
    for name, number in list(_places(dask_worker)):
        if name == job:
            await end_place(job, number, dask_worker)


async def hold_worker(job: str, number: int) -> None:
    """Wait for the job's end, as the task that shows Dask that this worker is busy."""
    from distributed import get_worker

    place = _places(get_worker()).get((job, number))
    if place is not None:
        await place.wait()
