"""The tasks that the driver runs, and the queue in which those of one group wait for their turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from itertools import islice
from typing import Final

from asyncpar.net.arena.channel import Channel, Turn
from asyncpar.net.arena.sequencer import NAMED, Sequencer

RoundWait = tuple[Sequence[int], int]
"""Places of the group, and the round that they must have reached."""

Program = Generator[RoundWait, None, None]


class Task(ABC):
    """One operation in the queue of its channel.  All calls come on the loop and must not run other tasks."""

    __slots__ = ("has_entered", "is_dead", "is_wanted", "program", "sequence", "turn", "wait", "was_polled")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.turn: Turn | None = None
        self.program: Program | None = None
        self.wait: RoundWait = _NOTHING
        self.has_entered = False
        self.is_wanted = False
        """Is it awaited, or an operation that comes after it?"""
        self.is_dead = False
        """It has failed: its memory is not used any more, and its turn passes."""
        self.was_polled = False
        """Has its wait been polled for in vain, a moment ago?"""

    def resume(self, turn: Turn, program: Program, wait: RoundWait) -> None:
        """Go on with a turn that was entered already, at a wait that was polled for."""
        self.has_entered = self.was_polled = True
        self.turn, self.program, self.wait = turn, program, wait

    @abstractmethod
    def begin(self, turn: Turn) -> Program:
        """Enter ``turn``, for which the channel is clear, and return the program."""

    @abstractmethod
    def completed(self) -> None:
        """End the task: its program has ended well."""

    @abstractmethod
    def crashed(self, error: BaseException) -> None:
        """Fail the task, whose program raised ``error``; it must be dead afterwards."""

    @abstractmethod
    def mismatched(self, place: int) -> None:
        """Note that the rank at ``place`` runs another operation.  The task waits until one of the two fails."""

    @abstractmethod
    def blocked(self, places: Sequence[int]) -> None:
        """Note that the task waits for the ranks at ``places`` while the loop runs.  May make the task dead."""


_NOTHING: Final[RoundWait] = ((), 0)


class RunQueue:
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
        """Add ``task``, whose operation has got its sequence number."""
        self.tasks.append(task)

    def wanted(self, task: Task) -> None:
        """Mark ``task``, which is awaited, and the tasks before it as wanted."""
        for earlier in self.tasks:
            earlier.is_wanted = True
            if earlier is task:
                break

    def died(self, task: Task) -> None:
        """Take note that ``task`` is dead."""

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
        """Return the places of the ranks that keep ``task`` from getting a turn; none if it has one."""
        return ()


class KeyedRunQueue(RunQueue):
    """The tasks of one group that are matched by ``Task.sequence``, which has ``NAMED`` set until they have their turn.

    ``sequencer`` is set before the first of them is wanted.
    """

    __slots__ = ("_turn", "_unplaced", "_unsent", "sequencer")

    def __init__(self) -> None:
        super().__init__()
        self.sequencer: Sequencer | None = None
        self._unplaced: dict[int, Task] = {}
        """Tasks that were announced, or are about to be, and have no turn."""
        self._unsent: dict[int, None] = {}
        """Entries that there was no room to announce, in order."""
        self._turn = 0

    def called(self, task: Task) -> None:
        """Do nothing: a task is announced when it is wanted."""

    def wanted(self, task: Task) -> None:
        task.is_wanted = True
        self._unplaced[task.sequence] = task
        self._unsent[task.sequence] = None
        self._announce()

    def died(self, task: Task) -> None:
        number = task.sequence
        if self._unplaced.pop(number, None) is None:
            return  # never announced, or in line
        if number in self._unsent:
            del self._unsent[number]
        else:
            self._unsent[number ^ NAMED] = None
            self._announce()

    @property
    def is_expecting(self) -> bool:
        return bool(self._unplaced) or (self.sequencer is not None and self.sequencer.is_busy)

    @property
    def is_worth_polling(self) -> bool:
        return len(self._unplaced) == 1

    def has_news(self) -> bool:
        return self.sequencer is not None and self.sequencer.has_news()

    def refill(self) -> bool:
        sequencer = self.sequencer
        assert sequencer is not None
        has_sent = True
        while has_sent:
            has_sent = bool(self._unsent) and self._announce()
            for number in sequencer.turns():
                self._place(number)
        if self._unplaced and not self.tasks and sequencer.has_ended:
            assert self.channel is not None
            for task in list(self._unplaced.values()):
                task.blocked(self.channel.others)
        return bool(self.tasks)

    def close(self) -> None:
        super().close()
        self.sequencer = None
        self._unplaced.clear()
        self._unsent.clear()

    def absent(self, task: Task) -> Sequence[int]:
        return (
            self.sequencer.absent(task.sequence)
            if self.sequencer is not None and task.sequence in self._unplaced
            else ()
        )

    def _announce(self) -> bool:
        """Announce as much as there is room for; False if that is nothing."""
        sequencer = self.sequencer
        assert sequencer is not None
        entries = list(islice(self._unsent, sequencer.room))
        if not entries:
            return False
        for entry in entries:
            del self._unsent[entry]
        sequencer.announce(entries)
        return True

    def _place(self, number: int) -> None:
        """Put the operation that has the next turn in line."""
        self._turn += 1
        task = self._unplaced.pop(number, None) or _AbandonedTask(number)
        task.sequence = self._turn
        self.tasks.append(task)


class _AbandonedTask(Task):
    """Stands for an operation that this rank has given up."""

    __slots__ = ()

    def __init__(self, sequence: int) -> None:
        super().__init__(sequence)
        self.is_dead = True

    def begin(self, turn: Turn) -> Program:
        raise AssertionError(f"turn {turn.sequence} of a dead task was entered")

    def completed(self) -> None: ...
    def crashed(self, error: BaseException) -> None: ...
    def mismatched(self, place: int) -> None: ...
    def blocked(self, places: Sequence[int]) -> None: ...
