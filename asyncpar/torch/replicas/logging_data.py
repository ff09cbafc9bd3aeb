"""Settings, buckets and times of replicas, under the names that torch's class has in ``_get_ddp_logging_data``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

LoggingData = dict[str, str | int]

_UNSET: Final = "N/A"

_ENVIRONMENT: Final = ("CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "MASTER_PORT", "TORCH_DISTRIBUTED_DEBUG")

_DTYPES: Final[Mapping[torch.dtype, str]] = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
"""Names of dtypes in C++, as torch's class has them."""


@dataclass(slots=True)
class _Moments:
    """Moments of one pass, in nanoseconds of Unix time."""

    forward: int = 0
    backward: int = 0
    computed: int = 0
    """When the last gradient was final."""
    communicates: int = 0
    over: int = 0

    def times(self) -> LoggingData:
        return {
            "forward_compute_time": self.backward - self.forward,
            "backward_compute_time": self.computed - self.backward,
            "backward_comm_time": self.over - self.communicates,
            "backward_compute_comm_overlap_time": max(0, self.computed - self.communicates),
        }


class PassTimes:
    """The times of passes that reduce gradients: of the last successful one, and means of all."""

    def __init__(self) -> None:
        self.passes = 0
        """Successful passes."""
        self._now = _Moments()
        self._last = _Moments()
        self._sums: dict[str, int] = {}

    def forward_begins(self) -> None:
        """Record that a forward begins whose backward reduces gradients."""
        self._now = _Moments(forward=time.time_ns())

    def backward_begins(self) -> None:
        """Record that the first gradient has arrived."""
        self._now.backward = time.time_ns()

    def first_bucket_begins(self) -> None:
        """Record that the ranks begin to exchange gradients."""
        self._now.communicates = time.time_ns()

    def is_computed(self) -> None:
        """Record that all gradients of this rank are final."""
        self._now.computed = time.time_ns()

    def is_over(self) -> None:
        """Record that all gradients are reduced."""
        now, self._now = self._now, _Moments()
        if not now.forward or not now.backward or not now.communicates:
            return  # a pass that repeats those of other ranks, or a second one after a forward
        now.over = time.time_ns()
        self.passes, self._last = self.passes + 1, now
        for name, nanoseconds in now.times().items():
            self._sums[name] = self._sums.get(name, 0) + int(nanoseconds)

    def describe(self) -> LoggingData:
        """Return the times in nanoseconds, by torch's names; nothing before the first pass."""
        if not self.passes:
            return {}
        last = self._last
        return {
            **last.times(),
            **{f"avg_{name}": total // self.passes for name, total in self._sums.items()},
            "forward_compute_time_start": last.forward,
            "backward_compute_time_start": last.backward,
            "backward_compute_time_end": last.computed,
            "backward_comm_time_start": last.communicates,
            "backward_comm_time_end": last.over,
        }


def describe_place() -> LoggingData:
    """Return the variables of the environment that torch's class shows."""
    return {name.lower(): os.environ.get(name) or _UNSET for name in _ENVIRONMENT}


def describe_parameters(parameters: Iterable[torch.Tensor]) -> LoggingData:
    """Describe the parameters whose gradients are reduced."""
    known = [*parameters]
    return {
        "dtypes": ", ".join(dict.fromkeys(_DTYPES.get(each.dtype, str(each.dtype)) for each in known)),
        "num_parameter_tensors": len(known),
        "total_parameter_size_bytes": sum(each.nbytes for each in known),
    }


def in_a_row(numbers: Iterable[Any]) -> str:
    return ", ".join(map(str, numbers))
