"""A program's refusal of its arguments, without a process: what it writes as it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


def refusal_of(
    main: Callable[[], object], arguments: Sequence[str | Path], capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Run the program's ``main`` with ``arguments``, which it must refuse; return the exit code and the text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
    if isinstance(ended.value.code, str):
        return 1, ended.value.code
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().err
