"""What the driver runs: tasks, and the line in which those of one group wait for their turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from typing import Final

from asyncpar.arena.channel import Channel, Turn

Wait = tuple[Sequence[int], int]
"""Places of the group, and the round that they must have reached."""

Program = Generator[Wait, None, None]


class Task(ABC):
    """One operation in the queue of its channel.  All calls come on the loop and must not run other tasks."""

    __slots__ = ("has_entered", "is_dead", "is_wanted", "program", "sequence", "turn", "wait")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.turn: Turn | None = None
        self.program: Program | None = None
        self.wait: Wait = _NOTHING
        self.has_entered = False
        self.is_wanted = False
        """Does somebody await it, or something that comes after it?"""
        self.is_dead = False
        """It has failed: nothing of it is touched any more, its turn just passes."""

    def resume(self, turn: Turn, program: Program, wait: Wait) -> None:
        """Go on with a turn that was entered already."""
        self.has_entered = True
        self.turn, self.program, self.wait = turn, program, wait

    @abstractmethod
    def begin(self, turn: Turn) -> Program:
        """The channel is clear: enter ``turn`` and return the program."""

    @abstractmethod
    def completed(self) -> None:
        """The program is through."""

    @abstractmethod
    def crashed(self, error: BaseException) -> None:
        """The program raised; must make the task dead."""

    @abstractmethod
    def mismatched(self, place: int) -> None:
        """The rank at ``place`` runs another operation.  The task waits for what the two make of it."""

    @abstractmethod
    def blocked(self, places: Sequence[int]) -> None:
        """It waits for the ranks at ``places``, and the loop goes on.  May make the task dead."""


_NOTHING: Final[Wait] = ((), 0)


class Lineup:
    """The tasks of one group, in the order of their sequence numbers; ``channel`` is None until the group has one."""

    __slots__ = ("channel", "tasks")

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.tasks: deque[Task] = deque()

    @property
    def is_expecting(self) -> bool:
        """May ``refill`` find something?  Not where turns are in the order of calls."""
        return False

    @property
    def is_worth_polling(self) -> bool:
        """Is it good to poll for the next turn?  Not for a caller that has more operations to start meanwhile."""
        return False

    def called(self, task: Task) -> None:
        """The operation of ``task`` has its sequence number."""
        self.tasks.append(task)

    def wanted(self, task: Task) -> None:
        """``task`` is awaited: so it is wanted, and what comes before it."""
        for earlier in self.tasks:
            earlier.is_wanted = True
            if earlier is task:
                break

    def died(self, task: Task) -> None:
        """``task`` is dead now."""

    def has_news(self) -> bool:
        """Is it worth calling ``refill`` again?  Made for polling."""
        return False

    def refill(self) -> bool:
        """Line up the tasks that have got their turn; True if there are any."""
        return False

    def close(self) -> None:
        """Forget all tasks, which have failed, and the channel."""
        self.channel = None
        self.tasks.clear()

    def absent(self, task: Task) -> Sequence[int]:  # noqa: ARG002
        """Return the places of those that keep ``task`` from getting a turn; nobody if it has one."""
        return ()
