"""Comparison of the settings with which ranks were started."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.collectives.communicator import Communicator
from asyncpar.errors import UsageError

_MOST_SHOWN = 5

Lines: TypeAlias = dict[str, str]
"""Settings of one rank as text, by name."""


async def compare_settings(
    communicator: Communicator, settings: Mapping[str, object], *, key: str = "settings"
) -> None:
    """Raise ``SettingsDiffer``, on every rank, unless ``settings`` are the same on all.

    The message lists the settings that differ, and the value of each rank.  Values are plain data, dataclasses of it
    (compared field by field), enums, and tuples, lists and dicts of these.
    """
    lines = dict(_flatten(settings))
    gathered: list[Lines] = await communicator.all_gather_object(lines, key=key, wanted=Lines)
    difference = find_differences(gathered, communicator.ranks)
    if difference is not None:
        raise SettingsDiffer(f"settings: expected the same on all ranks, but {difference}")


def find_differences(gathered: Sequence[Lines], ranks: Sequence[int]) -> str | None:
    """Describe the differences between the settings of ``ranks``; None if there are none."""
    names = dict.fromkeys(name for lines in gathered for name in lines)
    differing = []
    for name in names:
        holders: dict[str, list[int]] = {}
        for rank, lines in zip(ranks, gathered, strict=True):
            holders.setdefault(lines.get(name, "not set"), []).append(rank)
        if len(holders) > 1:
            common_first = sorted(holders.items(), key=lambda item: -len(item[1]))
            differing.append(f"{name} is " + " and ".join(f"{text} on {_listed(of)}" for text, of in common_first))
    if not differing:
        return None
    more = len(differing) - _MOST_SHOWN
    return "; ".join(differing[:_MOST_SHOWN]) + (f"; and {more} more differ" if more > 0 else "")


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_MOST_SHOWN]))
    return f"ranks {shown}" + (f" and {len(ranks) - _MOST_SHOWN} more" if len(ranks) > _MOST_SHOWN else "")


def _flatten(settings: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f"{name}.{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
            yield from _flatten(fields)
        elif isinstance(value, Mapping):
            yield from _flatten({f"{name}.{inner}": value[inner] for inner in sorted(value, key=str)} or {name: None})
        else:
            yield name, _text(name, value)


def _text(name: str, value: object) -> str:
    if isinstance(value, Enum):
        return f"{value.value}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(_text(name, inner) for inner in value)}]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    raise UsageError(f"{name}: expected plain data, which ranks can compare, got {type(value).__name__}")
