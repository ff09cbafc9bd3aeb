"""Slurm's compact lists: names of hosts, ``n[001-003,7]``, and numbers of tasks, ``2(x2),1``."""

from __future__ import annotations

import itertools
import re

from asyncpar.errors import UsageError

_LONGEST = 65536
"""Most hosts in a list; Slurm itself stops there."""
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a Slurm list in order, as ``scontrol show hostnames`` does.

    Leading zeros of a number are kept, and brackets multiply: ``n[01-02]x[1-2]`` has four hosts.  Raises
    ``UsageError``.
    """
    hosts: list[str] = []
    for name in _split(text):
        parts = [_expand_part(part, text) for part in re.split(r"(\[[^\]]*\])", name) if part]
        for combined in itertools.product(*parts):
            hosts.append("".join(combined))
            if len(hosts) > _LONGEST:
                raise UsageError(f"hosts: expected at most {_LONGEST}, {text[:80]!r} has more")
    return hosts


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks on each node: ``2(x2),1`` is ``[2, 2, 1]``.  Raises ``UsageError``."""
    counts: list[int] = []
    for part in text.split(","):
        found = _TASKS.fullmatch(part)
        if found is None or len(counts) + int(found[2] or 1) > _LONGEST:
            raise UsageError(f"tasks per node: expected counts such as 2(x2),1, got {text[:80]!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    names, start, depth = [], 0, 0
    for index, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if not 0 <= depth <= 1:
            break
        if letter == "," and depth == 0:
            names.append(text[start:index])
            start = index + 1
    names.append(text[start:])
    if depth != 0 or not all(names):
        raise UsageError(f"hosts: expected a list such as n[001-003,7],gpu1, got {text[:80]!r}")
    return names


def _expand_part(part: str, text: str) -> list[str]:
    if not part.startswith("["):
        return [part]
    expanded: list[str] = []
    for piece in part[1:-1].split(","):
        found = _RANGE.fullmatch(piece)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if found is None or not first <= last < first + _LONGEST:
            raise UsageError(f"hosts: expected ranges such as [001-003,7], got {part[:80]!r} in {text[:80]!r}")
        expanded += [str(number).zfill(len(found[1])) for number in range(first, last + 1)]
    return expanded
