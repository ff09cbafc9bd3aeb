"""Every option of every public class changes something that can be seen, or is refused with a reason.

A new option without an entry in one of the tables fails here, and so does an entry of an option that is gone.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from asyncpar.errors import UsageError
from tests.options import (
    of_backends,
    of_collectives,
    of_elastic,
    of_gradients,
    of_layers,
    of_names,
    of_plans,
    of_testing,
    of_training,
)
from tests.options.discovery import all_options, public_classes
from tests.options.effects import Effect
from tests.options.exceptions import EXCEPTIONS, NOT_CONFIGURED
from tests.soak import is_soak

TABLES = [
    of_backends,
    of_collectives,
    of_elastic,
    of_gradients,
    of_layers,
    of_names,
    of_plans,
    of_testing,
    of_training,
]
EFFECTS: list[Effect] = [effect for table in TABLES for effect in table.EFFECTS]


def test_every_option_has_an_entry() -> None:
    known = {effect.option for effect in EFFECTS} | EXCEPTIONS.keys()
    options = {option for option in all_options() if option.owner not in NOT_CONFIGURED}
    assert sorted(map(str, options - known)) == []
    assert sorted(map(str, known - options)) == []


def test_every_exception_is_of_a_class_that_there_is_and_has_a_sentence() -> None:
    assert NOT_CONFIGURED.keys() - public_classes().keys() == set()
    for sentence in (*NOT_CONFIGURED.values(), *EXCEPTIONS.values()):
        assert sentence.endswith(".")
        assert len(sentence.split()) > 3


@pytest.mark.parametrize("effect", EFFECTS, ids=str)
def test_another_value_than_the_default_can_be_seen_or_is_refused(effect: Effect) -> None:
    if effect.refused:
        with pytest.raises(UsageError, match=f"^{effect.refused}"):
            effect.observe(**{effect.option.name: effect.value})
        return
    before = usual(effect)
    assert effect.observe(**{effect.option.name: effect.value}) != before


def usual(effect: Effect) -> Any:
    """Return what is seen with the default, which must be the same whenever it is run."""
    return _usual(effect.probe, tuple(sorted(effect.given.items(), key=str)), _Hidden(effect))


class _Hidden:
    """Hands ``effect`` to a cached function without being a part of the key."""

    def __init__(self, effect: Effect) -> None:
        self.effect = effect

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hidden)

    def __hash__(self) -> int:
        return 0


@cache
def _usual(probe: Any, given: Any, hidden: _Hidden) -> Any:
    first = hidden.effect.observe()
    if is_soak() or probe not in _repeated:
        _repeated.add(probe)
        assert first == hidden.effect.observe(), "a probe must show the same thing twice"
    return first


_repeated: set[Any] = set()
"""Probes that have shown the same thing twice; with ``--soak`` they do so whatever they are given."""
