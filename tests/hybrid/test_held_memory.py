"""Buckets and residuals count: in what a rank reports, against its limit, and before the first step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncpar.errors import UsageError
from asyncpar.gradsync import GradientCompressionConfig
from asyncpar.hybrid import HybridConfig
from asyncpar.hybrid.analysis import BottleneckKind, Severity
from asyncpar.zero import ZeROConfig, ZeROStage
from tests.held import held_arrays
from tests.hybrid.ranks import running
from tests.hybrid.worlds import TINY, make_config

MODEL = replace(TINY, layers=2, heads=4, features=64, vocabulary=600, dtype="float32")
"""Its parameters are much larger than all else that a step makes."""

GIGABYTE = 1_000_000_000

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8": {"compression": GradientCompressionConfig(codec="int8")},
    "zero2": {"zero": ZeROConfig(stage=ZeROStage.STAGE2)},
    "zero1-compressed": {"zero": ZeROConfig(stage=ZeROStage.STAGE1, gradient_compression=True)},
    "zero3": {"zero": ZeROConfig(stage=ZeROStage.STAGE3)},
}


def config_of(kind: str, **settings: Any) -> HybridConfig:
    return make_config(2, layers=2, **KINDS[kind], **settings)


async def run(config: HybridConfig) -> tuple[int, bool]:
    """Return the most that a rank reports of a step, and whether memory is CRITICAL."""
    async with running(MODEL, config) as ranks:
        await ranks.take_step()
        await ranks.take_step()
        used = max(one.monitor.measures[-1].memory_used for one in ranks.all)
        analysis = await ranks.together(lambda one: one.get_performance_stats())
    return used, any(
        one.kind is BottleneckKind.MEMORY and one.severity is Severity.CRITICAL for one in analysis[0].bottlenecks
    )


@pytest.mark.parametrize("kind", ["int8", "zero1-compressed", "zero2"])
async def test_an_alarm_comes_when_buckets_and_residuals_fill_the_memory(kind: str) -> None:
    """CRITICAL, or an error at once where a step may take more than there is."""
    used, _ = await run(config_of(kind))
    nearly_full = config_of(kind, max_memory_per_device=1.05 * used / GIGABYTE)
    if KINDS[kind].get("zero", ZeROConfig(stage=ZeROStage.NONE)).stage.shards_gradients:
        with pytest.raises(UsageError, match="max_memory_per_device"):
            await run(nearly_full)
    else:
        assert (await run(nearly_full))[1]
    _, is_critical = await run(config_of(kind, max_memory_per_device=2 * used / GIGABYTE))
    assert not is_critical


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_held_between_steps_is_told(kind: str) -> None:
    with held_arrays() as held:
        world = running(MODEL, config_of(kind))
        ranks = await world.__aenter__()
        await ranks.take_step()
    total = sum(one._session.assembly.flow.memory().total for one in ranks.all)  # noqa: SLF001  # what the gradient flow holds is not public
    await world.__aexit__(None, None, None)
    assert total == pytest.approx(held.nbytes, rel=0.1)


async def test_a_rank_without_room_for_its_buckets_says_so_before_the_first_step() -> None:
    async with running(MODEL, config_of("int8")) as ranks:
        flow = ranks.all[0]._session.assembly.flow  # noqa: SLF001  # the figures by which the gradient flow reserves memory are not public
        memory, needed = flow.memory(), flow.nbytes_needed
        kept = 2 * memory.parameters + memory.optimizer_states
    assert needed > 1.9 * kept
    config = config_of("int8", max_memory_per_device=(kept + needed) / 2 / GIGABYTE)
    with pytest.raises(UsageError, match="max_memory_per_device: parameters, gradients, states and buckets of rank 0"):
        async with running(MODEL, config):
            pass
