"""Reasons why asyncpar does not pass some tests that Gloo passes, by the name of the test.

A reason says what torch fixes to Gloo's name or form, never that something is broken: what is broken is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_MONITORED_BARRIER = (
    "`torch.distributed.monitored_barrier` refuses every backend that is not named gloo; "
    "`group.monitored_barrier(timeout, wait_all_ranks)` does the same"
)

REASONS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        (
            "test_monitored_barrier_failure_order",
            "test_monitored_barrier_gloo",
            "test_monitored_barrier_gloo_subgroup",
            "test_monitored_barrier_wait_all_ranks",
        ),
        _MONITORED_BARRIER,
    )
)
