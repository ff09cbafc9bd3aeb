"""Parts shared by all commands: options in both spellings, and errors in one line."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from asyncpar.core.addresses import join_address, loopback
from asyncpar.core.private_files import write_private
from asyncpar.core.system_errors import FULL, os_reason
from asyncpar.errors import AsyncparError, LaunchError, UsageError
from asyncpar.harmless import harmless, harmless_json
from asyncpar.launch.options import ObserverOptions

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


class OptionalValue(BothSpellings):
    """An option whose value follows ``=``; without one, the value is ``bare``."""

    def __init__(self, declarations: list[str], *, bare: str | Callable[[], str], **attributes: Any) -> None:
        super().__init__(declarations, **attributes)
        self.bare = bare

    def get_help_record(self, context: click.Context) -> tuple[str, str] | None:
        record = super().get_help_record(context)
        return None if record is None else (f"{record[0].replace(' ', '[=', 1)}]", record[1])


def fill_bare(options: list[click.Parameter], arguments: list[str]) -> list[str]:
    """Fill in the values of options without one in ``arguments``, up to the program and its own arguments."""
    by_name = {name: option for option in options if isinstance(option, click.Option) for name in option.opts}
    filled, rest = [], list(arguments)
    while rest and rest[0].startswith("-") and rest[0] != "--":
        word = rest.pop(0)
        found = by_name.get(word)
        if isinstance(found, OptionalValue):
            word = f"{word}={found.bare() if callable(found.bare) else found.bare}"
        filled.append(word)
        if found is not None and not found.is_flag and not isinstance(found, OptionalValue) and rest:
            filled.append(rest.pop(0))
    return filled + rest


class OneLineCommand(click.Command):
    """Reports errors of the command line in one line."""

    def parse_args(self, context: click.Context, arguments: list[str]) -> list[str]:
        try:
            return super().parse_args(context, fill_bare(self.params, arguments))
        except click.UsageError as error:
            called = f"asyncpar {self.name}"
            print_line(f"{called}: {error.format_message()} ({called} --help shows all)", err=True)
            sys.exit(USAGE_EXIT)


class UncutGroup(click.Group):
    """Lists its commands with the whole first sentence of each, however narrow the terminal is."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.write_commands(ctx, formatter, "Commands", self.list_commands(ctx))

    def write_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter, title: str, names: Iterable[str]
    ) -> None:
        """Write a section with the commands of ``names``."""
        commands = [(name, self.get_command(ctx, name)) for name in names]
        rows = [(name, command.get_short_help_str(_WHOLE)) for name, command in commands if command is not None]
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows)


_WHOLE = 500


def option(*declarations: str, **attributes: Any) -> Callable[[Function], Function]:
    """Declare an option that may be written in both spellings."""
    kind = OptionalValue if "bare" in attributes else BothSpellings
    return click.option(*declarations, cls=kind, **attributes)


_OBSERVER_OPTIONS = (
    option(
        "--dashboard",
        metavar="ADDRESS:PORT",
        default=None,
        bare=lambda: join_address(loopback(), 8787),
        help="Serve a page about the job.  [127.0.0.1:8787]",
    ),
    option(
        "--dashboard-names", metavar="NAME,...", default="", help="Names of proxies before the page, as a JupyterHub's."
    ),
    option(
        "--metrics",
        metavar="ADDRESS:PORT",
        default=None,
        bare=lambda: join_address(loopback(), 9464),
        help="Serve Prometheus metrics of this host.  [127.0.0.1:9464]",
    ),
    option(
        "--sink",
        metavar="NAME",
        multiple=True,
        help="Pass the job's figures on: opentelemetry, package.module:NAME.",
    ),
)


def observer_options(function: Function) -> Function:
    """Declare the options for showing a job while it runs."""
    for declare in reversed(_OBSERVER_OPTIONS):
        function = declare(function)
    return function


def parse_observers(given: Mapping[str, Any]) -> ObserverOptions:
    """Parse the values of ``observer_options``.  Raises ``UsageError``."""
    return ObserverOptions(
        dashboard=given["dashboard"],
        dashboard_names=tuple(filter(None, given["dashboard_names"].split(","))),
        metrics=given["metrics"],
        sinks=given["sink"],
    )


def print_result(what: str, text: str | bytes, *, colors: bool = False) -> None:
    """Write ``text``, or the bytes of a JSON document, to stdout, without control sequences that a terminal would obey.

    ``colors`` keeps colors for a terminal.  Raises ``LaunchError``, which names ``what``, when it cannot be written.
    """
    shown = harmless_json(text) if isinstance(text, bytes) else harmless(text, colors=colors and sys.stdout.isatty())
    try:
        click.echo(shown, nl=False)
    except OSError as error:
        raise LaunchError(f"{what} cannot be written: {os_reason(error)}") from error


def print_line(text: str, *, err: bool = False, color: str | None = None) -> None:
    """Write a line to stdout or stderr, without control sequences that a terminal would obey."""
    shown = harmless(text)
    click.echo(shown if color is None else click.style(shown, fg=color), err=err)


def write_result(path: Path, content: bytes) -> None:
    """Write ``content`` to the file ``path``, whole or not at all.  Raises ``LaunchError`` when that is impossible.

    Only this user can read the file.  A path that is no regular file (a pipe, a device) is written to directly.
    """
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(content)
            return
        write_private(path, content)
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {os_reason(error)}") from error


_STAND_FOR = {"rdzv_endpoint": ("master_addr", "master_port"), "nnodes": ("nodes",)}
"""For options that error messages name: the options that may be given instead."""

_SUBJECT = re.compile(r"(--)?([A-Za-z][A-Za-z_ -]*):")


def as_typed(text: str) -> str:
    """Return ``text``, an error that begins with the name of an option, with the name that the user has typed.

    That is the environment variable if the value came from one, or another option that was given instead of this one.
    """
    context, found = click.get_current_context(silent=True), _SUBJECT.match(text)
    if context is None or found is None:
        return text
    by_name = {one.name: one for one in context.command.params if isinstance(one, click.Option)}
    name = found[2].lower().replace("-", "_").replace(" ", "_")
    shown = [name, *_STAND_FOR.get(name, ())]
    given = [one for one in shown if one in by_name and context.get_parameter_source(one) in _TYPED]
    if not given:
        return text
    subject = next((option for option in by_name[given[0]].opts if option.startswith("--")), found[0])
    if context.get_parameter_source(given[0]) is ParameterSource.ENVIRONMENT:
        variable = by_name[given[0]].envvar
        subject = variable if isinstance(variable, str) else f"{context.auto_envvar_prefix}_{given[0].upper()}"
    return f"{subject}:{text[found.end() :]}"


_TYPED = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def exit_with(command: str, run: Callable[[], int]) -> None:
    """Exit with the result of ``run``; errors of asyncpar become one line and their exit code."""
    try:
        if command != "launch" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # commands handle Ctrl-C in their own way
        exit_code = run()
    except UsageError as error:
        print_line(f"asyncpar {command}: {as_typed(str(error))}", err=True)
        exit_code = USAGE_EXIT
    except AsyncparError as error:
        print_line(f"asyncpar {command}: {as_typed(str(error))}", err=True)
        exit_code = 1
    except OSError as error:
        if error.errno not in FULL:
            raise
        print_line(f"asyncpar {command}: {os_reason(error)}", err=True)
        exit_code = 1
    except KeyboardInterrupt:  # before or after the agent, which has a handler of its own
        exit_code = 128 + signal.SIGINT
    sys.exit(exit_code)
