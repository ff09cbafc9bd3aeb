"""The part of mpi4py that the MPI backend uses, with all processes in this one.

Messages are synchronous: a send is over when its message has been received.  Freeing a communicator in which messages
are left is an error, as they would turn up in another one.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class MpiError(Exception):
    """What MPI raises."""


@dataclass
class Status:
    source: int = -1
    tag: int = -1
    count: int = 0

    def Get_source(self) -> int:
        return self.source

    def Get_tag(self) -> int:
        return self.tag

    def Get_count(self, kind: object) -> int:
        return self.count


@dataclass
class Request:
    is_over: Callable[[], bool]

    def Test(self) -> bool:
        return self.is_over()


@dataclass
class Message:
    source: int
    tag: int
    content: memoryview
    is_received: bool = False

    def Irecv(self, place: tuple[memoryview, object]) -> Request:
        place[0][:] = self.content
        self.is_received = True
        return Request(lambda: True)


@dataclass
class Shared:
    """What the processes have in common."""

    mail: dict[tuple[Hashable, int], deque[Message]] = field(default_factory=lambda: defaultdict(deque))
    gathered: dict[Hashable, dict[int, Any]] = field(default_factory=lambda: defaultdict(dict))


class Comm:
    """A communicator as process ``rank`` has it."""

    def __init__(self, shared: Shared, rank: int, size: int, name: tuple[int, ...] = ()) -> None:
        self.is_broken = False
        self._shared, self._rank, self._size, self._name = shared, rank, size, name
        self._copies = 0

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._size

    def Set_errhandler(self, handler: object) -> None:
        """Errors are raised in any case."""

    def Idup(self) -> tuple[Comm, Request]:
        self._copies += 1
        copy = Comm(self._shared, self._rank, self._size, (*self._name, self._copies))
        everyone = self._shared.gathered[copy._name, "made"]
        everyone[self._rank] = True
        return copy, Request(lambda: len(everyone) == self._size)

    def Iallgather(self, mine: Any, everything: Any) -> Request:
        parts = self._shared.gathered[self._name, "gathered"]
        parts[self._rank] = mine.copy()

        def is_over() -> bool:
            if len(parts) == self._size:
                everything[:] = np.stack([parts[rank] for rank in range(self._size)])
            return len(parts) == self._size

        return Request(is_over)

    def Isend(self, what: tuple[memoryview, object], dest: int, tag: int) -> Request:
        if self.is_broken:
            raise MpiError("process failed")
        message = Message(self._rank, tag, what[0])
        self._shared.mail[self._name, dest].append(message)
        return Request(lambda: message.is_received)

    def Improbe(self, source: int, tag: int, status: Status) -> Message | None:
        if self.is_broken:
            raise MpiError("process failed")
        waiting = self._shared.mail[self._name, self._rank]
        if not waiting:
            return None
        message = waiting.popleft()
        status.source, status.tag, status.count = message.source, message.tag, len(message.content)
        return message

    def Free(self) -> None:
        assert not self._shared.mail[self._name, self._rank], "messages are left in a communicator that is freed"


class World:
    """Keeps what was handed to it until the end."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def Set_attr(self, key: int, value: object) -> None:
        self.kept.append(value)

    def Create_keyval(self, *, nopython: bool) -> int:
        return 0


class FakeMpi:
    """The module ``mpi4py.MPI``."""

    ANY_SOURCE = ANY_TAG = -1
    BYTE = ERRORS_RETURN = None
    REQUEST_NULL = Request(lambda: True)
    Exception = MpiError
    Status = Status

    def __init__(self) -> None:
        self.COMM_WORLD = self.Comm = World()

    def Get_processor_name(self) -> str:
        return "here"

    @staticmethod
    def processes(size: int) -> list[Comm]:
        """Return a communicator of ``size`` processes, as each of them has it."""
        shared = Shared()
        return [Comm(shared, rank, size) for rank in range(size)]
