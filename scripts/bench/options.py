"""Options that the command lines of several scripts share."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and ends with 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def fill(arguments: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Give the options that were not given their ``defaults``."""
    for name, default in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)


def some_of(
    parser: argparse.ArgumentParser, name: str, given: str, known: Sequence[str], *, may_be_none: bool = False
) -> list[str]:
    """Return what ``given`` lists with commas between; an error of ``parser`` unless all of it is ``known``.

    ``name`` is that of the option, with its dashes.
    """
    chosen = [one for one in given.split(",") if one]
    unknown = [repr(one) for one in chosen if one not in known]
    if unknown or not (chosen or may_be_none):
        parser.error(f"{name}: expected some of {', '.join(known)}, got {unknown[0] if unknown else 'none'}")
    return chosen


def check_target(parser: argparse.ArgumentParser, name: str, file: Path | None) -> None:
    """An error of ``parser`` if ``file``, to be written at the end, is in no folder."""
    if file is not None and not file.absolute().parent.is_dir():
        parser.error(f"{name}: expected a file in a folder that exists, got {file}")
