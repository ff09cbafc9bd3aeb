"""How the ranks of the Gloo backend find each other.  Blocks: to be called in a thread."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from asyncpar.errors import PeerTimeout

_FOR_EVER = timedelta(days=3650)
"""Gloo breaks connections on which nothing comes for its timeout; how long an operation may take is ours to say."""


@dataclass(frozen=True, slots=True)
class Met:
    """A process group of all ranks, and the names of their hosts."""

    group: Any
    hosts: list[str]


def meet(store: Any, distributed: Any, *, rank: int, size: int, timeout: float | None) -> Met:
    """Wait for all ranks in ``store`` of torch and join them in a process group of their own.

    On one host it listens on loopback only.  Raises ``PeerTimeout``, naming them, when ranks do not come within
    ``timeout`` seconds.
    """
    patience = _FOR_EVER if timeout is None else timedelta(seconds=timeout)
    attempt = store.add(f"asyncpar/opened/{rank}", 1)
    own = distributed.PrefixStore(f"asyncpar/{attempt}", store)
    own.set(f"host/{rank}", socket.gethostname())
    keys = [f"host/{other}" for other in range(size)]
    try:
        own.wait(keys, patience)
    except RuntimeError as error:
        missing = [other for other, key in enumerate(keys) if not own.check([key])]
        raise PeerTimeout(
            f"rank {rank}: waited {timeout} s for rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} "
            "to open the gloo backend",
            rank=missing[0] if missing else None,
            cause="it did not open the backend",
        ) from error
    hosts = [own.get(key).decode() for key in keys]
    return Met(_join(distributed, own, rank, size, is_alone=len(set(hosts)) == 1), hosts)


def _join(distributed: Any, store: Any, rank: int, size: int, *, is_alone: bool) -> Any:
    gloo = distributed.ProcessGroupGloo
    if not is_alone:
        return gloo(store, rank, size, _FOR_EVER)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = _FOR_EVER
    return gloo(store, rank, size, options)
