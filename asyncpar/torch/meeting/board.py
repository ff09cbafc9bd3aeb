"""What the ranks of one meeting have written into a store of torch, under names that no other meeting uses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from asyncpar.torch.meeting.roll_call import End, Place, Roster, decode, encode

T = TypeVar("T")

Store = Any
"""A ``torch.distributed.Store``."""

_PREFIX = "asyncpar"


class Board:
    """Meeting ``number`` of ``store``.  All calls block, shortly."""

    def __init__(self, store: Store, number: int) -> None:
        self.number = number
        self._store = store

    def claim(self, rank: int, place: Place) -> Place:
        """Let ``rank`` be at ``place``, unless it is there already; return where it is."""
        return decode(self._store.compare_set(self._key("place", rank), "", encode(place)), Place)

    def put(self, what: str, rank: int, text: str) -> None:
        """Write ``what`` of ``rank``."""
        self._store.set(self._key(what, rank), text)

    def get(self, what: str, rank: int) -> str | None:
        """Return ``what`` of ``rank``, None if it is not there."""
        content = self._read(self._key(what, rank))
        return None if content is None else content.decode()

    def message(self, what: str, rank: int, kind: type[T]) -> T:
        """Return ``what`` of ``rank``, which is there."""
        return decode(self._store.get(self._key(what, rank)), kind)

    def find(self, what: str, ranks: Iterable[int]) -> list[int]:
        """Return which of ``ranks`` have written ``what``, in order."""
        keys = {rank: self._key(what, rank) for rank in sorted(ranks)}
        if not keys or self._store.check([*keys.values()]):
            return list(keys)
        return [rank for rank, key in keys.items() if self._store.check([key])]

    def have_all(self, what: str, ranks: Iterable[int]) -> bool:
        """Have all ``ranks`` written ``what``?"""
        return bool(self._store.check([self._key(what, rank) for rank in ranks]))

    def read_roster(self) -> Roster | None:
        """Who came, if rank 0 has written it."""
        content = self._read(self._key("roster"))
        return None if content is None else decode(content, Roster)

    def write_roster(self, roster: Roster) -> None:
        self._store.set(self._key("roster"), encode(roster))

    def read_end(self) -> End | None:
        """How the meeting ended, if it has."""
        content = self._read(self._key("end"))
        return None if content is None else decode(content, End)

    def write_end(self, end: End) -> End:
        """End the meeting with ``end``, unless it has ended; return how it did."""
        return decode(self._store.compare_set(self._key("end"), "", encode(end)), End)

    def _read(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        content: bytes = self._store.get(key)
        return content

    def _key(self, *what: object) -> str:
        return "/".join([_PREFIX, str(self.number), *map(str, what)])


class Bookmark:
    """In which meeting of ``store`` a rank was last, so that it need not look at all again."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._key = f"{_PREFIX}/last/{rank}"

    def read(self) -> int:
        """Return the number of the meeting, 1 for a rank that was in none."""
        return int(self._store.get(self._key)) if self._store.check([self._key]) else 1

    def write(self, number: int) -> None:
        self._store.set(self._key, str(number))
