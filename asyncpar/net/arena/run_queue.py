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
    """One operation in the queue of its channel.  All methods are called on the loop and must not run other tasks."""

    __slots__ = ("has_entered", "is_dead", "is_wanted", "program", "sequence", "turn", "wait", "was_polled")

    def __init__(self, sequence: int) -> None:
        self.sequence = sequence
        self.turn: Turn | None = None
        self.program: Program | None = None
        self.wait: RoundWait = _NOTHING
        self.has_entered = False
        self.is_wanted = False
        """Whether it, or an operation that comes after it, is awaited."""
        self.is_dead = False
        """Whether it has failed: its memory is not used any more, and its turn passes."""
        self.was_polled = False
        """Whether its wait has just been polled for without success."""

    def resume(self, turn: Turn, program: Program, wait: RoundWait) -> None:
        """Continue with a turn that was entered already, at a wait that was polled for."""
        self.has_entered = self.was_polled = True
        self.turn, self.program, self.wait = turn, program, wait

    @abstractmethod
    def begin(self, turn: Turn) -> Program:
        """Enter ``turn``, for which the channel is clear, and return the program."""

    @abstractmethod
    def completed(self) -> None:
        """End the task: its program has ended normally."""

    @abstractmethod
    def crashed(self, error: BaseException) -> None:
        """Fail the task, whose program raised ``error``; it must be dead afterwards."""

    @abstractmethod
    def mismatched(self, place: int) -> None:
        """Record that the rank at ``place`` runs another operation.  The task waits until one of the two fails."""

    @abstractmethod
    def blocked(self, places: Sequence[int]) -> None:
        """Record that the task waits for the ranks at ``places`` while the loop runs.  May make the task dead."""


_NOTHING: Final[RoundWait] = ((), 0)


class RunQueue:
    """The tasks of one group, in the order of their sequence numbers; ``channel`` is None until the group has one."""

    __slots__ = ("channel", "tasks")

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self.tasks: deque[Task] = deque()

    @property
    def is_expecting(self) -> bool:
        """Whether ``refill`` may find something; not if turns are in the order of calls."""
        return False

    @property
    def is_worth_polling(self) -> bool:
        """Whether polling for the next turn pays; not for a caller that has more operations to start meanwhile."""
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
        """Record that ``task`` is dead."""

    def has_news(self) -> bool:
        """Return whether ``refill`` is worth calling again; fast enough for polling."""
        return False

    def refill(self) -> bool:
        """Queue the tasks that have got their turn; return whether there are any."""
        return False

    def close(self) -> None:
        """Drop all tasks, which have failed, and the channel."""
        self.channel = None
        self.tasks.clear()

    def absent(self, task: Task) -> Sequence[int]:  # noqa: ARG002
        """Return the places of the ranks that keep ``task`` from its turn; none if it has one."""
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
        """Tasks without a turn that were announced, or are about to be."""
        self._unsent: dict[int, None] = {}
        """Entries for whose announcement there was no room, in order."""
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
        """Announce as many entries as there is room for; return False if that is none."""
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
        """Queue the operation that has the next turn."""
        self._turn += 1
        task = self._unplaced.pop(number, None) or _AbandonedTask(number)
        task.sequence = self._turn
        self.tasks.append(task)


class _AbandonedTask(Task):
    """A stand-in for an operation that this rank has given up."""

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
