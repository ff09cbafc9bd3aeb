"""Seeing a job: what each rank did and waits for, read from its event ring and put together for all ranks."""

from asyncpar.observe.progress import Progress, progress
from asyncpar.observe.values import report

__all__ = ["Progress", "progress", "report"]
