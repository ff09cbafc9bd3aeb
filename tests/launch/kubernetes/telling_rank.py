"""A rank that prints what the suite of engines asks of ranks, and speaks and fails as its ranks do."""

from __future__ import annotations

import json
import sys
from typing import Any

import asyncpar as ap
from asyncpar.testing import engine_programs as programs


def main(what: str) -> None:
    """Do ``what``: ``tell`` all there is to tell, or ``fail`` or ``fail_once``."""
    if what == "fail":
        ap.run(programs.fail(1))
    elif what == "fail_once":
        attempt = programs.fail_once()
        seen: dict[str, Any] = {"attempt": attempt}
    else:
        seen = ap.run(programs.describe())
        programs.speak()
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
