"""``asyncpar.checkpoint`` for programs without an event loop: ``save`` and ``load``, which block."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from asyncpar.blocking import Communicator, run_coroutine
from asyncpar.checkpoint import values as on_loop
from asyncpar.checkpoint.saving import Saved
from asyncpar.checkpoint.values import Checkpoint
from asyncpar.collectives import communicator as of_coroutines
from asyncpar.errors import UsageError

__all__ = ["load", "save"]

T = TypeVar("T")


def save(
    folder: Path | str,
    values: Mapping[str, Any],
    *,
    step: int,
    communicator: Communicator | None = None,
    keep: int | None = None,
    timeout: float | None = None,
) -> Saved:
    """Save ``values`` as the checkpoint of ``step`` in ``folder``; return once it is on disk on all ranks.

    This is ``asyncpar.checkpoint.save`` of the ranks of ``communicator`` (None: of this process alone); ``keep``
    checkpoints stay (None: all); ``timeout`` is in seconds.
    """
    return _run(
        "save",
        communicator,
        lambda group: on_loop.save(folder, values, step=step, communicator=group, keep=keep),
        timeout,
    )


def load(
    folder: Path | str,
    *,
    communicator: Communicator | None = None,
    step: int | None = None,
    timeout: float | None = None,
) -> Checkpoint:
    """Return the last complete checkpoint in ``folder``, or that of ``step``.

    This is ``asyncpar.checkpoint.load`` for the ranks of ``communicator`` (None: for this process alone); ``timeout``
    is in seconds.
    """
    return _run("load", communicator, lambda group: on_loop.load(folder, communicator=group, step=step), timeout)


def _run(
    what: str,
    communicator: Communicator | None,
    make: Callable[[of_coroutines.Communicator | None], Coroutine[Any, Any, T]],
    timeout: float | None,
) -> T:
    if communicator is None:
        return run_coroutine(lambda: make(None), timeout=timeout)
    if not isinstance(communicator, Communicator):
        raise UsageError(
            "communicator: expected that of a blocking node, such as node.world of asyncpar.blocking.init(), or None, "
            f"got {communicator!r:.80}"
        )
    return communicator.run(make, what=what, timeout=timeout)
