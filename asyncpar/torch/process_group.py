"""The process group of ``torch.distributed`` over asyncpar."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from asyncpar.errors import UsageError
from asyncpar.torch.compiling import uncompiled
from asyncpar.torch.devices import path_of
from asyncpar.torch.errors import as_torch
from asyncpar.torch.exchanges import Exchanges
from asyncpar.torch.gathers import Gathers
from asyncpar.torch.monitored_barrier import monitored_barrier
from asyncpar.torch.reductions import Reductions


@uncompiled
class ProcessGroup(Reductions, Gathers, Exchanges):
    """A group of ranks whose collectives are asyncpar's: what torch has after ``init_process_group("asyncpar")``.

    All of torch's operations on tensors in the CPU's memory, of any dtype, from any thread.  Calls take their place in
    the order of the group's operations when they are made; the ranks of the group make the same calls in the same
    order.  Errors are those of ``asyncpar.errors`` and ``torch.distributed.DistBackendError`` at the same time.
    """

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have come here, and raise ``PeerTimeout`` naming those that have not in time.

        With ``wait_all_ranks`` all that are missing are named, else the first found.
        """
        monitored_barrier(self, timeout, wait_all_ranks=wait_all_ranks)

    def split_group(self, *_: Any, **__: Any) -> None:
        """Refuse: torch itself splits only groups of accelerators, and would look for one here without asking."""
        raise as_torch(UsageError("split_group: expected a group of an accelerator's backend; use dist.new_group"))

    # -- what torch asks about devices -------------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        """Return what runs operations for ``device``: this group itself, for the CPU's memory."""
        place = torch.device(device)
        try:
            return self if place.type == "cpu" else path_of(self, place)
        except UsageError as error:
            raise as_torch(error, "_get_backend") from None

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def supports_time_estimate(self) -> bool:
        return False
