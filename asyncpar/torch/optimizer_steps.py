"""Recording of the steps of torch's optimizers, where this package does not know the steps: FSDP, tensor parallelism.

Theory of operation.  FSDP calls operations of a process group, and waits for each; so the end of ``optimizer.step()``
is the end of a training step, and all time since the previous one is the rank's own, except for its thread's waits for
operations.  An optimizer that uses gradients averaged by DistributedDataParallel ends no step: its backward pass is the
step, and was recorded.  Neither does one before which the thread has awaited no operation, as when gradients are
accumulated, or in other threads.  The first step is not recorded, since its beginning is unknown.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from asyncpar.collectives.communicator import Communicator, recorder_of, step_meter


class _OfThread(threading.local):
    """Activity of one thread since its last optimizer step."""

    waits = 0
    waited = 0.0
    since: float | None = None
    stepped_at: float | None = None


class OptimizerSteps:
    """Records the steps of optimizers, by the operations of ``communicator``, which has all ranks, and of its parts."""

    def __init__(self, communicator: Communicator) -> None:
        self._recorder = recorder_of(communicator)
        self._meter = step_meter(communicator, "optimizer")
        self._steps = 0
        self._of_thread = _OfThread()
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def waited(self, seconds: float) -> None:
        """Record that this thread has waited for an operation."""
        mine = self._of_thread
        mine.waits += 1
        mine.waited += seconds

    def close(self) -> None:
        """Stop recording.  Idempotent."""
        self._handle.remove()

    def _stepped(self, optimizer: object, args: Any, kwargs: Any) -> None:
        del optimizer, args, kwargs
        if torch.compiler.is_compiling():  # the compiler follows hooks into its generated program
            return
        mine, recorder = self._of_thread, self._recorder
        if not mine.waits:
            return
        if mine.since is not None and mine.stepped_at == recorder.stepped_at:
            self._steps += 1
            self._meter.record(self._steps, own=recorder.clock() - mine.since - mine.waited, since=mine.since)
        mine.waits, mine.waited = 0, 0.0
        mine.since, mine.stepped_at = recorder.clock(), recorder.stepped_at
