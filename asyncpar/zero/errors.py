"""Errors of sharded training, in addition to those of collectives."""

from __future__ import annotations

from asyncpar.errors import AsyncparError, PeerError


class StepTorn(PeerError):  # noqa: N818
    """A step failed after some parameters were updated: this replica holds parameters of two different steps.

    ``resume`` completes the step if all ranks have done their part of it; otherwise restore a checkpoint.
    """


class MemoryExceeded(AsyncparError, MemoryError):  # noqa: N818
    """Buckets or gathered parameters do not fit into ``max_memory_usage_mb``; the message states how much they need."""
