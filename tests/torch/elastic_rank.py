"""One rank of an elastic training with torch: ``python -m tests.torch.elastic_rank UNTIL FOLDER``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import mse_loss

import asyncpar.torch
from asyncpar.core.config.names import CodecName
from asyncpar.elasticity.job import ElasticJob
from asyncpar.elasticity.samples import PortionSampler
from asyncpar.torch.elastic_job import ElasticTraining, TorchStep

PORTIONS = 8
SAMPLES = 96
HURRY = "hurry"
"""When there is a file of this name beside the results, steps take no longer than they must."""

HELD = ".held"
"""While there is a file of a rank's process number with this ending, it does not end its step, and writes so there."""

ASKED = ".asked"
"""A rank makes a file with this ending once it has asked to leave."""


def make_model(*, normalizes: bool = True) -> torch.nn.Module:
    """Return a model with everything that a step may change besides parameters: statistics and random numbers."""
    torch.manual_seed(5)
    norm = torch.nn.BatchNorm1d(12) if normalizes else torch.nn.LayerNorm(12)
    parts = [torch.nn.Linear(6, 12), norm, torch.nn.Dropout(0.25), torch.nn.Tanh()]
    return torch.nn.Sequential(*parts, torch.nn.Linear(12, 1))


def train(
    *,
    until: int,
    codec: CodecName | None = None,
    normalizes: bool = True,
    on_step: Callable[[ElasticTraining, TorchStep], None] | None = None,
) -> dict[str, Any]:
    """Train, and return everything that must be equal."""
    torch.set_num_threads(1)
    model = make_model(normalizes=normalizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
    inputs = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))
    targets = inputs.sum(1, keepdim=True)
    sampler = PortionSampler(samples=SAMPLES, batch=40, portions=PORTIONS, seed=2)
    used: list[int] = []
    with asyncpar.torch.elastic(
        model, optimizer, portions=PORTIONS, seed=3, codec=codec, scheduler=scheduler, losses=[]
    ) as job:
        for step in job.steps(until=until):
            with step:
                for portion in step.portions:
                    rows = torch.as_tensor(sampler.indices(step.number, portion))
                    loss = mse_loss(model(inputs[rows]), targets[rows])
                    loss.backward()
                    step.add(portion, loss)
                if on_step is not None:
                    on_step(job, step)
                step.update(max_norm=2.0)
                scheduler.step()
                job.state["losses"].append(step.loss)
            if step.is_committed and not step.is_replay:
                used.append(step.number)
        state = {name: value.tolist() for name, value in model.state_dict().items()}
        losses = [loss.hex() for loss in job.state["losses"]]
        rate = scheduler.get_last_lr()
    assert used == sorted(set(used))
    return {"state": state, "losses": losses, "rate": rate, "is_drained": job.is_drained}


def note_departures(asked: Path) -> None:
    """Have ``asked`` made when this process has asked to leave."""
    ask_to_leave = ElasticJob.ask_to_leave

    def ask(job: ElasticJob, refused: Callable[[], None]) -> bool:
        is_asked = ask_to_leave(job, refused)
        asked.touch()
        return is_asked

    ElasticJob.ask_to_leave = ask  # type: ignore[assignment, method-assign]


def main() -> None:
    """Train, and write what comes out."""
    until, folder = int(sys.argv[1]), Path(sys.argv[2])
    path = folder / str(os.getpid())
    progress, hurry, held = path.with_suffix(".progress"), folder / HURRY, path.with_suffix(HELD)
    begun: list[int] = []

    def on_step(_: ElasticTraining, step: TorchStep) -> None:
        if not step.is_replay:
            begun.append(step.number)
        progress.write_text(str(step.number))
        if held.exists():
            held.write_text(str(step.number))
        while held.exists():
            time.sleep(0.02)
        if not hurry.exists():
            time.sleep(0.1 if step.number < 10 else 1.2)

    note_departures(path.with_suffix(ASKED))
    result = train(until=until, on_step=on_step)
    path.with_suffix(".begun").write_text(json.dumps(begun))
    path.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
