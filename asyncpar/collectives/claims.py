"""Names that live objects have reserved for the keys of their collectives.

Operations meet by group and key.  Two objects that derive equal keys from one name would exchange each other's data
where ranks use them in different orders, and nothing could tell: so a name belongs to one live object at a time.
"""

from __future__ import annotations

import gc
import weakref

from asyncpar.errors import UsageError


class NameClaims:
    """The reserved names of one rank, by the number of the group.

    An object owns a name until it releases it or is collected.
    """

    def __init__(self) -> None:
        self._owners: dict[tuple[int, str], weakref.ref[object]] = {}
        self._kinds: dict[tuple[int, str], str] = {}

    def claim(self, group: int, name: str, owner: object, *, kind: str, group_name: str) -> None:
        """Reserve ``name`` in ``group`` for ``owner``, which is a ``kind``.

        Raises ``UsageError`` while another object has it.
        """
        other = self._owner(group, name)
        if other is not None and other is not owner:
            other = None
            gc.collect()  # it may be garbage in a cycle
            other = self._owner(group, name)
        if other is not None and other is not owner:
            raise UsageError(
                f"name: {name!r} is the name of a live {self._kinds[group, name]} on the group {group_name!r}, with "
                f"whose messages those of this {kind} would be mixed up; give each a name of its own, the same on all "
                "ranks, or close the other one first"
            )
        place = group, name
        self._kinds[place] = kind
        self._owners[place] = weakref.ref(owner, lambda gone: self._forget(place, gone))

    def release(self, group: int, name: str, owner: object) -> None:
        """Give ``name`` back, if ``owner`` has it."""
        if self._owner(group, name) is owner:
            self._drop((group, name))

    def _owner(self, group: int, name: str) -> object | None:
        known = self._owners.get((group, name))
        return None if known is None else known()

    def _forget(self, place: tuple[int, str], gone: weakref.ref[object]) -> None:
        if self._owners.get(place) is gone:
            self._drop(place)

    def _drop(self, place: tuple[int, str]) -> None:
        del self._owners[place], self._kinds[place]
