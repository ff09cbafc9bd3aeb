"""Observation of a job: the work and waits of each rank, read from its event ring and combined for all ranks."""

from typing import TYPE_CHECKING, Any

from asyncpar.observe.image import Event
from asyncpar.observe.progress import Progress, progress
from asyncpar.observe.summary import RankSummary
from asyncpar.observe.values import report

if TYPE_CHECKING:
    from asyncpar.observe.node_observer import EventStream, NodeObserver

__all__ = ["Event", "EventStream", "NodeObserver", "Progress", "RankSummary", "progress", "report"]


def __getattr__(name: str) -> Any:
    if name in ("EventStream", "NodeObserver"):  # they need an event loop, unlike commands that explain files
        from asyncpar.observe import node_observer

        return getattr(node_observer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
