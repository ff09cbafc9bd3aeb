"""Settings of ranks are compared, and differences are shown."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import pytest

from asyncpar.agreement.errors import SettingsDiffer
from asyncpar.agreement.settings import compare_settings, find_differences
from asyncpar.core.config.parallel import PipelineScheduleType
from asyncpar.errors import UsageError
from asyncpar.testing.world import local_world


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    rate: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner = Inner()
    schedule: PipelineScheduleType = PipelineScheduleType.GPIPE
    split: tuple[int, ...] = (1, 2)


async def differences(*settings: dict[str, object]) -> list[str]:
    """Return the error of each rank."""
    async with local_world(len(settings)) as nodes:
        calls = [compare_settings(node.world, mine) for node, mine in zip(nodes, settings, strict=True)]
        return [str(result) for result in await asyncio.gather(*calls, return_exceptions=True)]


async def test_equal_settings_pass() -> None:
    mine: dict[str, object] = {"model": Outer(), "more": {"b": None, "a": ["x", 1.5]}, "none": {}}
    assert await differences(mine, mine, mine) == ["None"] * 3


async def test_the_order_of_names_does_not_matter() -> None:
    assert await differences({"more": {"a": 1, "b": 2}}, {"more": {"b": 2, "a": 1}}) == ["None"] * 2


async def test_a_field_inside_of_a_field_is_named() -> None:
    errors = await differences({"model": Outer()}, {"model": Outer(inner=Inner(rate=0.25), split=(1, 3))})
    assert (
        errors
        == [
            "settings: expected the same on all ranks, but model.inner.rate is 0.5 on rank 0 and 0.25 on rank 1; "
            "model.split is [1, 2] on rank 0 and [1, 3] on rank 1"
        ]
        * 2
    )


async def test_kinds_of_values_differ_even_when_they_look_alike() -> None:
    assert "seed is 1 on rank 0 and '1' on rank 1" in (await differences({"seed": 1}, {"seed": "1"}))[0]


async def test_what_only_some_ranks_have_is_a_difference() -> None:
    errors = await differences({"seed": 1}, {}, {"seed": 1})
    assert "seed is 1 on ranks 0, 2 and not set on rank 1" in errors[1]


async def test_the_error_is_a_usage_error() -> None:
    async with local_world(2) as nodes:
        calls = [compare_settings(node.world, {"rank": node.rank}) for node in nodes]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [SettingsDiffer] * 2
        assert issubclass(SettingsDiffer, UsageError)


async def test_values_that_cannot_be_compared_are_refused() -> None:
    async with local_world(1) as nodes:
        with pytest.raises(UsageError, match="weights: expected plain data, which ranks can compare, got ndarray"):
            await compare_settings(nodes[0].world, {"weights": np.zeros(3)})


def test_many_differences_and_ranks_are_shortened() -> None:
    everyone = [{f"field{i}": "0" for i in range(7)}] * 6 + [{f"field{i}": "1" for i in range(7)}] * 2
    text = find_differences(everyone, range(8))
    assert text is not None
    assert text.startswith("field0 is 0 on ranks 0, 1, 2, 3, 4 and 1 more and 1 on ranks 6, 7; field1 is ")
    assert text.endswith("; and 2 more differ")
