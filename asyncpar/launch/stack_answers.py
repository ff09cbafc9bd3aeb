"""Answers of ranks that were asked for their stacks.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from asyncpar.observe.stack_views import ProcessStacks
from asyncpar.observe.summary import RankAnswer, unpack


def sort_answers(answers: Iterable[RankAnswer]) -> tuple[dict[int, ProcessStacks], dict[int, str]]:
    """Return the stacks by rank, and by rank why they are missing."""
    stacks: dict[int, ProcessStacks] = {}
    silent: dict[int, str] = {}
    for answer in answers:
        if answer.error:
            silent[answer.rank] = answer.error
            continue
        try:
            stacks[answer.rank] = unpack(answer.content, ProcessStacks)
        except msgspec.DecodeError as error:
            silent[answer.rank] = f"its answer cannot be read: {error}"
    return stacks, silent
