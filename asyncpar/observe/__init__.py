"""Seeing a job: what each rank did and waits for, read from its event ring and put together for all ranks."""

from asyncpar.observe.image import Event
from asyncpar.observe.node_observer import NodeObserver
from asyncpar.observe.progress import Progress, progress
from asyncpar.observe.summary import RankSummary
from asyncpar.observe.values import report

__all__ = ["Event", "NodeObserver", "Progress", "RankSummary", "progress", "report"]
