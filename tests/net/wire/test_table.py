"""The table of the documentation has every type that travels as it is."""

from __future__ import annotations

import re
from pathlib import Path

from asyncpar.net.wire.typed_values import RESTORED, UNCHANGED

PAGE = Path(__file__).parents[3] / "docs" / "actors.md"


def test_every_type_that_keeps_itself_is_in_the_table() -> None:
    rows = PAGE.read_text().split("## What can be sent")[1].splitlines()
    kept = {name for row in rows if "as they are" in row for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert kept == {kind.__name__ for kind in (*UNCHANGED, *RESTORED, list)}
