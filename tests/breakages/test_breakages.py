"""Tests of the tests: each mistake that must not come back is switched on, and a check must fail."""

from __future__ import annotations

import pytest

from asyncpar.errors import AsyncparError
from tests.breakages import hybrids, nodes, partitions, pipelines, sharding, synchronization
from tests.breakages.breakage import Breakage, Mistake

CASES = (*synchronization.CASES, *partitions.CASES, *nodes.CASES, *pipelines.CASES, *sharding.CASES, *hybrids.CASES)

EACH_CHECK = tuple({case.check: case for case in CASES}.values())
"""One case for each of the checks, which several may share."""

pytestmark = pytest.mark.timeout(20)


@pytest.mark.parametrize("case", EACH_CHECK, ids=str)
def test_the_check_passes_without_the_mistake(case: Breakage) -> None:
    case.check()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_check_fails_with_the_mistake(case: Breakage, monkeypatch: pytest.MonkeyPatch) -> None:
    case.switch_on(monkeypatch)
    with pytest.raises((AssertionError, AsyncparError), match=case.shows):
        case.check()


def test_there_is_a_case_of_every_mistake() -> None:
    assert {case.mistake for case in CASES} == set(Mistake)
