"""Every command line of asyncpar on the pages of the documentation is one that the commands take."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from asyncpar.launch.cli import main
from tests.docs.programs import PAGES, ROOT

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`(asyncpar [a-z0-9][^`:]*)`")
SHELL = ("", "bash", "console", "sh")
_PLACEHOLDER = re.compile(r"\.\.\.|\[|…")


def command_lines() -> list[tuple[str, str]]:
    """Return the lines that begin with ``asyncpar``, in blocks and in sentences, each with its page."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [
            line
            for words, block in _FENCE.findall(text)
            if words in SHELL
            for line in block.replace("\\\n", " ").splitlines()
        ]
        lines = [line.strip().removeprefix("$ ") for line in lines]
        lines += [" ".join(line.split()) for line in _INLINE.findall(_FENCE.sub("", text))]
        found += [
            (page.relative_to(ROOT).as_posix(), line) for line in lines if re.match(r"asyncpar [a-z0-9]+($| )", line)
        ]
    return sorted(set(found))


def parse(words: list[str]) -> None:
    """Give ``words`` to the parsers of click, one for each group on the way to the command, and run nothing.

    Missing arguments are no error: sentences leave them out.
    """
    command: click.Command = main
    context = click.Context(main, info_name="asyncpar")
    while isinstance(command, click.Group) and words:
        _, subcommand, words = command.resolve_command(context, list(words))
        assert subcommand is not None
        command, context = (
            subcommand,
            click.Context(subcommand, context, subcommand.name, **subcommand.context_settings),
        )
    context.allow_extra_args = isinstance(command, click.Group)
    command.make_parser(context).parse_args(list(words))


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_a_command_line_of_the_documentation_is_taken(page: str, line: str) -> None:
    words = shlex.split(_PLACEHOLDER.split(line)[0], comments=True)[1:]
    words = words[: words.index("|")] if "|" in words else words
    try:
        parse([word for word in words if word not in ("&", "&&", ";")])
    except click.ClickException as error:
        is_named = isinstance(error, click.BadOptionUsage) and error.option_name == words[-1]  # without its value
        if not is_named:
            pytest.fail(f"{page}: {line}: {error.format_message()}", pytrace=False)


def test_there_are_command_lines_and_a_stale_flag_is_found() -> None:
    assert len(command_lines()) > 60
    with pytest.raises(click.NoSuchOption, match="--no-such-flag"):
        parse(["launch", "--no-such-flag", "program.py"])
    with pytest.raises(click.UsageError, match="No such command"):
        parse(["lunch", "program.py"])
