"""Random numbers of a module, from a generator of its own.

Torch's layers draw from one generator per process.  A seeded pass sets that to a place of its own and puts it back
afterwards, so that what a module draws depends neither on other modules nor on what the program draws.  Passes of one
process take turns for that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from asyncpar.errors import UsageError

_PATIENCE: Final = 60.0
_TURN = threading.Lock()
"""Held while torch's generator, of which a process has one, is set."""


@contextmanager
def alone(what: str, *, patience: float = _PATIENCE) -> Iterator[None]:
    """Hold torch's generator exclusively in the block.

    Raises ``UsageError`` that names ``what`` instead of waiting for ever, as modules would that wait for each other.
    """
    if not _TURN.acquire(timeout=patience):
        raise UsageError(
            f"{what}: another module of this process has used torch's random numbers for {patience:g} s; modules that "
            "wait for each other within one process cannot draw any: pass seed=None to their stages"
        )
    try:
        yield
    finally:
        _TURN.release()


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Seed torch's generator in the block, and restore it after; for a block of ``alone``."""
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
