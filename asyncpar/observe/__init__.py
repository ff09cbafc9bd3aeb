"""Seeing a job: what each rank did and waits for, read from its event ring and put together for all ranks."""

from typing import TYPE_CHECKING, Any

from asyncpar.observe.image import Event
from asyncpar.observe.progress import Progress, progress
from asyncpar.observe.summary import RankSummary
from asyncpar.observe.values import report

if TYPE_CHECKING:
    from asyncpar.observe.node_observer import EventStream, NodeObserver

__all__ = ["Event", "EventStream", "NodeObserver", "Progress", "RankSummary", "progress", "report"]


def __getattr__(name: str) -> Any:
    if name in ("EventStream", "NodeObserver"):  # they need an event loop, which commands that explain files do not
        from asyncpar.observe import node_observer

        return getattr(node_observer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
