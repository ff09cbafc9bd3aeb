"""What a rank knows about the operations of one group: which run, and which have run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from asyncpar.collectives.description import Description
from asyncpar.collectives.ledger import Ledger
from asyncpar.collectives.operation import Limits, Operation
from asyncpar.errors import PeerCancelled, UsageError

_REMEMBERED = 256


class Group:
    """The operations of one set of ranks under one number on the wire.

    ``ranks`` are ranks of the world, in the order of the group.  ``active`` holds the operations that have a sequence
    number and are not over; ``loose`` those that have none: receives that do not know their message yet.
    """

    def __init__(
        self,
        *,
        number: int,
        name: str,
        ranks: tuple[int, ...],
        ledger: Ledger,
        limits: Limits,
        admit_early: Callable[[], None] | None = None,
    ) -> None:
        self.number = number
        self.name = name
        self.ranks = ranks
        self.members = frozenset(ranks)
        self.ledger = ledger
        self.limits = limits
        self.active: dict[int, Operation] = {}
        self.loose: set[Operation] = set()
        self.given_up: tuple[int, str] | None = None
        """Which rank of the world is the cause, and why, if there are to be no more operations."""
        self.is_closed = False
        """Was it given up by its own rank, with ``close``, or dropped?"""
        self.channels: list[int] = []
        """The numbers under which its messages between two ranks go."""
        self.early: dict[int, Any] = {}
        """Calls that are no operations yet, by number: see ``quick``."""
        self._admit_early = admit_early
        self.history: OrderedDict[int, Description] = OrderedDict()

    def check_open(self) -> None:
        """Raise ``PeerCancelled`` if the group was given up, ``UsageError`` if it was closed here."""
        if self.is_closed:
            raise UsageError(f"group {self.name}: it was closed on this rank; make another one")
        if self.given_up is not None:
            rank, text = self.given_up
            raise PeerCancelled(f"group {self.name} was given up, because {text}", rank=rank, cause=text)

    def is_stale(self, sequence: int) -> bool:
        """Is the operation with this number over here?"""
        return sequence not in self.active and sequence not in self.early and self.ledger.is_past(sequence)

    def find(self, sequence: int) -> Operation | None:
        """Return the operation with this number, if it has begun and is not over."""
        if sequence in self.early and self._admit_early is not None:
            self._admit_early()
        return self.active.get(sequence)

    def retire(self, sequence: int, description: Description) -> None:
        """The operation with this number is over; remember for a while what it was."""
        self.active.pop(sequence, None)
        self.history[sequence] = description
        if len(self.history) > _REMEMBERED:
            self.history.popitem(last=False)

    def pending(self) -> list[Operation]:
        """Return the operations that are not over."""
        if self.early and self._admit_early is not None:
            self._admit_early()
        return [*self.active.values(), *self.loose]
