"""Keep the store that rank 0 serves a while longer than its group, for ranks that come back to it first.

After ``destroy_process_group`` on all ranks, some begin the next group before rank 0 has even ended the last one.
They connect to the server that is still there, and are lost when it goes with rank 0's group; unless it stays.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from asyncpar.errors import UsageError
from asyncpar.net.membership.host import resolve
from asyncpar.net.transport.rpc import check_bindable

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_TIMEOUT = timedelta(seconds=10)


class StoreKeeper:
    """Keeps the last server that it was told to, as a tenant of it.  For the event loop only."""

    def __init__(self) -> None:
        self._tenant: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, tenant: Any) -> None:
        """Keep the server of ``tenant`` until ``release``, instead of another."""
        if self._timer is not None:
            self._timer.cancel()
        self._tenant = tenant

    def release(self, tenant: Any, *, after: float) -> None:
        """Let the server of ``tenant`` go after so many seconds, unless it is kept again."""
        if self._tenant is tenant:
            self._timer = asyncio.get_running_loop().call_later(after, self.keep, None)


@functools.cache
def store_keeper() -> StoreKeeper:
    """Return the keeper of this process."""
    return StoreKeeper()


def become_tenant(store: Any, environment: Mapping[str, str]) -> Any:
    """Return another client of the server of ``store`` that keeps it alive; None if this process does not share one.

    Blocks.  ``env://``, ``tcp://`` and ``asyncpar://`` make servers in rank 0 that may be shared.
    """
    if not isinstance(store, dist.TCPStore) or environment.get(_AGENT_STORE) == "True":
        return None
    try:
        check_bindable(resolve(store.host), 0)
        return dist.TCPStore(
            store.host, store.port, is_master=True, multi_tenant=True, wait_for_workers=False, timeout=_TIMEOUT
        )
    except (OSError, UsageError, dist.DistError):  # another host's, another process's, or not to be shared
        return None
