"""The options of a group, as torch's own backends have them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch._C import _distributed_c10d as c10d

from asyncpar.errors import UsageError
from asyncpar.torch.instrumentation import NAME


class GroupOptions(c10d.Backend.Options):
    """What ``group.options`` returns: ``_timeout`` is that of ``group``, and setting it sets that of ``group``."""

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        super().__init__(NAME)
        self._group = group
        self.group_name = group.getGroupName()
        self.global_ranks_in_group = list(ranks)

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._group.seconds)

    @_timeout.setter
    def _timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)


def check_options(options: Any, timeout: timedelta) -> None:
    """Raise ``UsageError`` unless ``options`` are None or those of a group of this backend.

    They have nothing but a timeout, and ``timeout``, that of the call that makes the group, comes before it: that is
    warned of where they differ, as torch does for NCCL.
    """
    if options is None:
        return
    if not isinstance(options, c10d.Backend.Options) or options.backend != NAME:
        raise UsageError(f"pg_options: expected None or the options of a group of the backend {NAME}, got {options!r}")
    if options._timeout != timeout:
        warnings.warn(
            f"pg_options: their _timeout, {options._timeout}, has no effect; the argument timeout is {timeout}",
            stacklevel=2,
        )
