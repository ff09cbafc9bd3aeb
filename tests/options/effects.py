"""Show that an option has an effect: two runs that differ in nothing else, and their visible results."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.options.discovery import Option

Probe = Callable[..., Any]
"""Runs what the settings that it is given are for, and returns what can be seen of it: equal from equal settings."""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """``probe`` shows another thing with ``value`` than with the default, both with the settings ``given``, too.

    With ``refused`` the value raises ``UsageError`` with that text instead.
    """

    option: Option
    probe: Probe
    value: Any
    given: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""

    def observe(self, **changes: Any) -> Any:
        """Run the probe once."""
        settings = {**self.given, **changes}
        seen = self.probe(**settings)
        return asyncio.run(seen) if inspect.iscoroutine(seen) else seen

    def __str__(self) -> str:
        return str(self.option)


@dataclass(frozen=True)
class With:
    """A value, and what else must be set so that it matters."""

    value: Any
    given: Mapping[str, Any]


@dataclass(frozen=True)
class Refused:
    """A value that is refused, and the beginning of what the error says."""

    value: Any
    text: str
    given: Mapping[str, Any] = field(default_factory=dict)


def effects(owner: str, probe: Probe, /, **values: Any) -> Iterator[Effect]:
    """Yield the effects of options of ``owner``: a value, or one with more to it."""
    for name, value in values.items():
        option = Option(f"asyncpar.{owner}", name)
        match value:
            case With(chosen, given):
                yield Effect(option=option, probe=probe, value=chosen, given=given)
            case Refused(chosen, text, given):
                yield Effect(option=option, probe=probe, value=chosen, given=given, refused=text)
            case _:
                yield Effect(option=option, probe=probe, value=value)


def digest(*arrays: Any) -> str:
    """Return a word that is equal for arrays of equal bits."""
    content = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    return hashlib.sha256(content).hexdigest()[:12]
