"""The store through which ranks rendezvous: its keys, and the lease of its server.

After ``destroy_process_group`` on all ranks, some may begin the next group before rank 0 has ended the last one.  They
connect to the server of rank 0's old group, and would lose it with that group; so a lease keeps the server alive for a
while.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from asyncpar.core.addresses import is_ours, resolve
from asyncpar.errors import UsageError
from asyncpar.torch.rendezvous.messages import Participants, RankClaim, RendezvousResult, decode, encode

T = TypeVar("T")

Store = Any
"""A ``torch.distributed.Store``."""

_PREFIX = "asyncpar"


class RendezvousStore:
    """The keys of rendezvous ``number`` in ``store``, which no other rendezvous uses.  All calls block briefly."""

    def __init__(self, store: Store, number: int) -> None:
        self.number = number
        self._store = store

    def claim(self, rank: int, claim: RankClaim) -> RankClaim:
        """Write ``claim`` for ``rank`` unless there already is one; return the stored claim."""
        return decode(self._store.compare_set(self._key("claim", rank), "", encode(claim)), RankClaim)

    def put(self, what: str, rank: int, text: str) -> None:
        """Write ``what`` of ``rank``."""
        self._store.set(self._key(what, rank), text)

    def get(self, what: str, rank: int) -> str | None:
        """Return ``what`` of ``rank``; None if it has not been written."""
        content = self._read(self._key(what, rank))
        return None if content is None else content.decode()

    def message(self, what: str, rank: int, kind: type[T]) -> T:
        """Return ``what`` of ``rank``, which has been written."""
        return decode(self._store.get(self._key(what, rank)), kind)

    def find(self, what: str, ranks: Iterable[int]) -> list[int]:
        """Return those of ``ranks`` that have written ``what``, in order."""
        keys = {rank: self._key(what, rank) for rank in sorted(ranks)}
        if not keys or self._store.check([*keys.values()]):
            return list(keys)
        return [rank for rank, key in keys.items() if self._store.check([key])]

    def has_all(self, what: str, ranks: Iterable[int]) -> bool:
        """Return whether all ``ranks`` have written ``what``."""
        return bool(self._store.check([self._key(what, rank) for rank in ranks]))

    def append(self, what: str, text: str) -> None:
        """Append ``text`` to the entries of ``what``."""
        self._store.set(self._key(what, self._store.add(self._key(what, "count"), 1)), text)

    def appended(self, what: str, known: int, kind: type[T]) -> list[T]:
        """Return the messages of ``kind`` that were appended to ``what`` after the first ``known``."""
        found = []
        for number in range(known + 1, self._store.add(self._key(what, "count"), 0) + 1):
            content = self._read(self._key(what, number))
            if content is None:  # it is being written
                break
            found.append(decode(content, kind))
        return found

    def read_participants(self) -> Participants | None:
        """Return the participants; None if rank 0 has not written them."""
        content = self._read(self._key("participants"))
        return None if content is None else decode(content, Participants)

    def write_participants(self, participants: Participants) -> None:
        self._store.set(self._key("participants"), encode(participants))

    def read_end(self) -> RendezvousResult | None:
        """Return the result; None if there is none yet."""
        content = self._read(self._key("end"))
        return None if content is None else decode(content, RendezvousResult)

    def write_end(self, end: RendezvousResult) -> RendezvousResult:
        """Write the result ``end`` unless there already is one; return the stored result."""
        return decode(self._store.compare_set(self._key("end"), "", encode(end)), RendezvousResult)

    def _read(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        content: bytes = self._store.get(key)
        return content

    def _key(self, *what: object) -> str:
        return "/".join([_PREFIX, str(self.number), *map(str, what)])


class LastRendezvous:
    """The number of the last rendezvous that a rank entered in ``store``."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._key = f"{_PREFIX}/last/{rank}"

    def read(self) -> int:
        """Return the number, 1 for a rank that has entered none."""
        return int(self._store.get(self._key)) if self._store.check([self._key]) else 1

    def write(self, number: int) -> None:
        self._store.set(self._key, str(number))


_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_TIMEOUT = timedelta(seconds=10)


class StoreLease:
    """Keeps one server alive by holding a client of it.  Used only on the event loop."""

    def __init__(self) -> None:
        self._client: Any = None
        self._timer: asyncio.TimerHandle | None = None

    def keep(self, client: Any) -> None:
        """Keep the server of ``client`` until ``release``, in place of the previous one."""
        if self._timer is not None:
            self._timer.cancel()
        self._client = client

    def release(self, client: Any, *, after: float) -> None:
        """Stop keeping the server of ``client`` after so many seconds, unless it is kept again."""
        if self._client is client:
            self._timer = asyncio.get_running_loop().call_later(after, self.keep, None)


@functools.cache
def store_lease() -> StoreLease:
    """Return the lease of this process."""
    return StoreLease()


def share_server(store: Any, environment: Mapping[str, str]) -> Any:
    """Return another client of the server of ``store`` that keeps it alive; None if this process does not share one.

    Blocks.  ``env://``, ``tcp://`` and ``asyncpar://`` create servers in rank 0 that may be shared.
    """
    if not isinstance(store, dist.TCPStore) or environment.get(_AGENT_STORE) == "True":
        return None
    try:
        if not is_ours(resolve(store.host)):
            return None
        return dist.TCPStore(
            store.host, store.port, is_master=True, multi_tenant=True, wait_for_workers=False, timeout=_TIMEOUT
        )
    except (OSError, UsageError, dist.DistError):  # a server of another host or process, or one that cannot be shared
        return None
