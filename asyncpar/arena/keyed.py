"""The tasks of operations that are matched by name: they get in line as soon as all ranks are ready for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from asyncpar.arena.agenda import NAMED, Agenda
from asyncpar.arena.channel import Turn
from asyncpar.arena.lineup import Lineup, Program, Task


class KeyedLineup(Lineup):
    """The tasks of one group that are matched by ``Task.sequence``, which has ``NAMED`` set until they have their turn.

    ``agenda`` is set before the first of them is wanted.
    """

    __slots__ = ("_turn", "_unplaced", "_unsent", "agenda")

    def __init__(self) -> None:
        super().__init__()
        self.agenda: Agenda | None = None
        self._unplaced: dict[int, Task] = {}
        """What was announced, or is about to be, and has no turn."""
        self._unsent: dict[int, None] = {}
        """What there was no room to announce, in order."""
        self._turn = 0

    def called(self, task: Task) -> None:
        """Nothing: a task that nobody wants yet is not announced."""

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
        return bool(self._unplaced) or (self.agenda is not None and self.agenda.is_busy)

    @property
    def is_worth_polling(self) -> bool:
        return len(self._unplaced) == 1

    def has_news(self) -> bool:
        return self.agenda is not None and self.agenda.has_news()

    def refill(self) -> bool:
        agenda = self.agenda
        assert agenda is not None
        has_sent = True
        while has_sent:
            has_sent = bool(self._unsent) and self._announce()
            for number in agenda.turns():
                self._place(number)
        if self._unplaced and not self.tasks and agenda.has_ended:
            assert self.channel is not None
            for task in list(self._unplaced.values()):
                task.blocked(self.channel.others)
        return bool(self.tasks)

    def close(self) -> None:
        super().close()
        self.agenda = None
        self._unplaced.clear()
        self._unsent.clear()

    def absent(self, task: Task) -> Sequence[int]:
        return self.agenda.absent(task.sequence) if self.agenda is not None and task.sequence in self._unplaced else ()

    def _announce(self) -> bool:
        """Announce as much as there is room for; False if that is nothing."""
        agenda = self.agenda
        assert agenda is not None
        entries = list(islice(self._unsent, agenda.room))
        if not entries:
            return False
        for entry in entries:
            del self._unsent[entry]
        agenda.announce(entries)
        return True

    def _place(self, number: int) -> None:
        """Put the operation that has the next turn in line."""
        self._turn += 1
        task = self._unplaced.pop(number, None) or _Abandoned(number)
        task.sequence = self._turn
        self.tasks.append(task)


class _Abandoned(Task):
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
