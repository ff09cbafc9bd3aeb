"""Messages between a pool and its ranks, pickled over a pipe.

Pickles run code, so others must not write them: the pipe is a pair of sockets without a name, each rank inherits one
end of its own, and only children of this script can open it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A rank has imported everything.  ``tests`` maps each test to why its decorators skip it, "" if they do not."""

    tests: dict[str, str]
    versions: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """Play one test.  ``folder`` is new, and the same for all ranks."""

    test: str
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How one rank fared.  Without ``error`` and ``skipped`` it passed."""

    error: str = ""
    skipped: str = ""
