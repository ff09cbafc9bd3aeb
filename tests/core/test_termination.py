"""Termination: the first SIGTERM may ask for an end in good order, the second one ends."""

from __future__ import annotations

from collections.abc import Callable

from asyncpar.core.signals import Termination


class Program:
    """Notes what happens to it; ``is_asked`` states whether anybody can be asked."""

    def __init__(self, *, is_asked: bool = True) -> None:
        self.happened: list[str] = []
        self.refuse: Callable[[], None] = self.end
        self._is_asked = is_asked

    def end(self) -> None:
        self.happened.append("ended")

    def ask(self, refused: Callable[[], None]) -> bool:
        self.happened.append("asked")
        self.refuse = refused
        return self._is_asked


def test_nobody_is_asked_unless_somebody_wants_to_be() -> None:
    program = Program()
    termination = Termination(program.end)
    termination.handle()
    assert program.happened == ["ended"]


def test_the_first_asks_and_the_second_ends() -> None:
    program = Program()
    termination = Termination(program.end)
    termination.ask_first(program.ask)
    termination.handle()
    assert program.happened == ["asked"]
    termination.handle()
    assert program.happened == ["asked", "ended"]


def test_the_first_ends_where_nobody_can_be_asked() -> None:
    program = Program(is_asked=False)
    termination = Termination(program.end)
    termination.ask_first(program.ask)
    termination.handle()
    assert program.happened == ["asked", "ended"]


def test_a_refusal_ends() -> None:
    program = Program()
    termination = Termination(program.end)
    termination.ask_first(program.ask)
    termination.handle()
    program.refuse()
    assert program.happened == ["asked", "ended"]


def test_after_the_job_the_first_ends() -> None:
    program = Program()
    termination = Termination(program.end)
    termination.ask_first(program.ask)
    termination.ask_first(None)
    termination.handle()
    assert program.happened == ["ended"]
