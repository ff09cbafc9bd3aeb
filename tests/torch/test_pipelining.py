"""torch's own pipeline schedules."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)

from tests.torch.models import WIDTH, Block, assert_close, rows
from tests.torch.worlds import on_ranks

pytestmark = pytest.mark.process

MICRO_BATCHES = 4
CPU = torch.device("cpu")


def parts(count: int) -> list[nn.Module]:
    torch.manual_seed(11)
    return [Block() for _ in range(count)]


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(y, target)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x, _ = rows(0, size=2)
    y, _ = rows(1, size=2)
    return x, y


def in_one_process(count: int) -> tuple[list[nn.Module], torch.Tensor]:
    """Return the parts with the gradients of one step, and the loss."""
    model = nn.Sequential(*parts(count))
    x, y = data()
    loss = loss_of(model(x), y)
    loss.backward()
    return list(model), loss.detach()


def assert_gradients(mine: dict[int, nn.Module], expected: list[nn.Module]) -> None:
    for index, part in mine.items():
        want = [parameter.grad for parameter in expected[index].parameters()]
        assert_close([parameter.grad for parameter in part.parameters()], want)


@on_ranks(4)
@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_one_stage_a_rank_gives_the_gradients_of_one_process(schedule: str) -> None:
    kinds = {"ScheduleGPipe": ScheduleGPipe, "Schedule1F1B": Schedule1F1B}
    mine, (x, y) = dist.get_rank(), data()
    part = parts(4)[mine]
    stage = PipelineStage(part, mine, 4, CPU)
    losses: list[torch.Tensor] = []
    running = kinds[schedule](stage, MICRO_BATCHES, loss_fn=loss_of)
    if mine == 0:
        running.step(x)
    elif mine == 3:
        running.step(target=y, losses=losses)
    else:
        running.step()
    expected, loss = in_one_process(4)
    assert_gradients({mine: part}, expected)
    if mine == 3:
        assert_close([torch.stack(losses).mean()], [loss])


@on_ranks(2)
@pytest.mark.parametrize("schedule", ["interleaved", "zero bubble", "v"])
def test_two_stages_a_rank_give_the_gradients_of_one_process(schedule: str) -> None:
    kind = {
        "interleaved": ScheduleInterleaved1F1B,
        "zero bubble": ScheduleInterleavedZeroBubble,
        "v": ScheduleZBVZeroBubble,
    }[schedule]
    mine, (x, y) = dist.get_rank(), data()
    indices = (mine, 3 - mine) if schedule == "v" else (mine, mine + 2)
    every = parts(4)
    stages = [PipelineStage(every[index], index, 4, CPU) for index in indices]
    running = kind(stages, MICRO_BATCHES, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    arguments = (x,) if 0 in indices else ()
    targets = {"target": y, "losses": losses} if 3 in indices else {}
    running.step(*arguments, **targets)
    expected, loss = in_one_process(4)
    assert_gradients({index: every[index] for index in indices}, expected)
    if 3 in indices:
        assert_close([torch.stack(losses).mean()], [loss])


@on_ranks(2)
def test_models_are_cut_where_told() -> None:
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    x, _ = data()
    expected = model(x)
    cut = pipeline(model, mb_args=(x[:2],), split_spec={"2": SplitPoint.BEGINNING})
    running = ScheduleGPipe(cut.build_stage(dist.get_rank(), CPU), MICRO_BATCHES)
    if dist.get_rank() == 0:
        running.step(x)
    else:
        assert_close([running.step()], [expected])
