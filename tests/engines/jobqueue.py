"""The package dask-jobqueue, without what its import does to the process."""

from __future__ import annotations

import signal
from typing import Any

import pytest


def import_jobqueue(module: str) -> Any:
    """Return ``module`` of dask-jobqueue, or skip; Ctrl-C means what it did before, and not the end of the process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return pytest.importorskip(module, reason="dask-jobqueue (extra test) is not installed")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
