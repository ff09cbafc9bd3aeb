"""Shared by all commands: options in both spellings, and errors in one line."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from asyncpar.errors import AsyncparError, LaunchError, UsageError

USAGE_EXIT = 2
Function = TypeVar("Function", bound=Callable[..., object])


class BothSpellings(click.Option):
    """An option that may be written with dashes or, as torchrun allows, with underscores; help shows the dashes."""

    def __init__(self, declarations: list[str], **attributes: Any) -> None:
        super().__init__(declarations, **attributes)
        self.shown = list(self.opts)
        self.opts += [f"--{name[2:].replace('-', '_')}" for name in self.opts if "-" in name[2:]]

    def get_help_record(self, context: click.Context) -> tuple[str, str] | None:
        every, self.opts = self.opts, self.shown
        try:
            return super().get_help_record(context)
        finally:
            self.opts = every


class OneLineCommand(click.Command):
    """Says what is wrong with the command line in one line."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        try:
            return super().parse_args(context, arguments)
        except click.UsageError as error:
            called = f"asyncpar {self.name}"
            click.echo(f"{called}: {error.format_message()} ({called} --help shows all)", err=True)
            sys.exit(USAGE_EXIT)


def option(*declarations: str, **attributes: Any) -> Callable[[Function], Function]:
    """Declare an option that may be written in both spellings."""
    return click.option(*declarations, cls=BothSpellings, **attributes)


def print_result(what: str, text: str | bytes) -> None:
    """Write ``text`` to stdout.  Raises ``LaunchError``, which names ``what``, when that is impossible."""
    try:
        click.echo(text, nl=False)
    except OSError as error:
        raise LaunchError(f"{what} cannot be written: {error.strerror}") from error


def exit_with(command: str, run: Callable[[], int]) -> None:
    """Exit with what ``run`` returns; errors that are ours become one line and the exit code that belongs to them."""
    try:
        if command != "launch" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # they end in their own way
        exit_code = run()
    except UsageError as error:
        click.echo(f"asyncpar {command}: {error}", err=True)
        exit_code = USAGE_EXIT
    except AsyncparError as error:
        click.echo(f"asyncpar {command}: {error}", err=True)
        exit_code = 1
    except KeyboardInterrupt:  # before or after the agent, which has a handler of its own
        exit_code = 128 + signal.SIGINT
    sys.exit(exit_code)
